"""The fewest bytes from which a backward pass makes all that it reads, by cheap arithmetic: a minimum cut.

Values are nodes with their bytes as capacity. What is not cheap to make flows in at a source, cheap ops let it through,
and what the backward reads flows out at a sink: a cut of least capacity (Ford and Fulkerson 1956) is what to keep.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from shardwright.core.cost.remade_values import ForwardOp, KeptValues

MOST_FLOW = 2**28
"""The sum of all capacities: scipy counts in 32 bits, and edges without a limit have twice that."""


def least_kept(
    ops: Sequence[ForwardOp],
    at_hand: Collection[int],
    wanted: Collection[int],
    size_bytes: Callable[[int], int],
) -> KeptValues:
    """The values of least bytes to keep, and the cheap ops that run again, so that the ``wanted`` values can be had.

    at_hand: the program's inputs and constants, which are there anyway. Of several such choices, the one with the
    fewest ops to run again. Sizes are counted to one part in `MOST_FLOW` of all.
    """
    free = set(at_hand)
    maker = {value: index for index, op in enumerate(ops) for value in op.makes}
    needed: dict[int, None] = {}
    missing = [value for value in wanted if value not in free]
    while missing:
        value = missing.pop()
        if value not in needed:
            needed[value] = None
            if ops[maker[value]].is_cheap:
                missing += [read for read in ops[maker[value]].reads if read not in free]
    if not needed:
        return KeptValues((), _again(ops, free, wanted))
    kept = _cut(list(needed), ops, maker, {v for v in wanted if v in needed}, size_bytes)
    return KeptValues(tuple(sorted(kept)), _again(ops, free | kept, wanted))


def _cut(
    values: Sequence[int],
    ops: Sequence[ForwardOp],
    maker: dict[int, int],
    wanted: Collection[int],
    size_bytes: Callable[[int], int],
) -> set[int]:
    """The values of a minimum cut, the one nearest to the sink. Value n has the nodes 2 n (in) and 2 n + 1 (out)."""
    place = {value: number for number, value in enumerate(values)}
    sizes = [max(1, size_bytes(value)) for value in values]
    unit = max(1, -(-sum(sizes) // MOST_FLOW))
    source, sink, endless = 2 * len(values), 2 * len(values) + 1, 2 * MOST_FLOW
    edges: dict[tuple[int, int], int] = {}
    for number, value in enumerate(values):
        edges[2 * number, 2 * number + 1] = -(-sizes[number] // unit)
        op = ops[maker[value]]
        if not op.is_cheap:
            edges[source, 2 * number] = endless
        for read in op.reads if op.is_cheap else ():
            if read in place:
                edges[2 * place[read] + 1, 2 * number] = endless
        if value in wanted:
            edges[2 * number + 1, sink] = endless
    ends = np.array(list(edges), dtype=np.int32)
    shape = (sink + 1, sink + 1)
    capacity = csr_array((np.array(list(edges.values()), dtype=np.int32), (ends[:, 0], ends[:, 1])), shape=shape)
    left = capacity - maximum_flow(capacity, source, sink).flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reaches: NDArray[np.bool_] = np.zeros(sink + 1, dtype=np.bool_)
    reaches[breadth_first_order(left.T.tocsr(), sink, return_predecessors=False)] = True
    return {value for number, value in enumerate(values) if reaches[2 * number + 1] and not reaches[2 * number]}


def _again(ops: Sequence[ForwardOp], there: Collection[int], wanted: Collection[int]) -> tuple[int, ...]:
    """The ops that make the wanted values from those that are there, in order."""
    missing, chosen = {value for value in wanted if value not in there}, []
    for index in reversed(range(len(ops))):
        if not missing.isdisjoint(ops[index].makes):
            chosen.append(index)
            missing.update(value for value in ops[index].reads if value not in there)
    return tuple(reversed(chosen))
