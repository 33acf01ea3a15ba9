"""The ops of a unit that a recomputed backward runs again, where it stops when all that the backward reads is there.

A system that enters a unit's forward again as a function of its own runs all of it. PyTorch's checkpoint without
re-entry stops at the last value that an op keeps (its ``early_stop``): of a transformer's block, before the last
product, which reads that value and makes none that is kept. Compilers, and `jax.checkpoint`, drop whatever makes
nothing that is kept, wherever it stands.
"""

from collections.abc import Collection, Iterable, Sequence

from shardwright.core.cost.saved_activations import Kept
from shardwright.core.model.fold import Unit
from shardwright.core.model.graph import Graph, Op
from shardwright.core.model.op_memory import at


def run_again(graph: Graph, kept: Kept, unit: Unit, *, compiled: bool) -> frozenset[int]:
    """The ops of a unit that run again, by number, in a compiled program or op by op."""
    if compiled:
        return frozenset(_needed(graph, kept, range(unit.first_op, unit.end_op)))
    by_call: dict[int, list[int]] = {}
    for op in range(unit.first_op, unit.end_op):  # each call is a checkpoint of its own
        path = graph.calls[graph.ops[op].call].path
        inside = (n for n, call in enumerate(unit.calls) if path == call.path or path.startswith(f"{call.path}."))
        by_call.setdefault(next(inside, -1), []).append(op)
    return frozenset(op for ops in by_call.values() for op in _up_to_the_last(graph, kept, ops))


def run_again_by_the_model(graph: Graph, kept: Kept, ops: Sequence[int], saved: Collection[int]) -> frozenset[int]:
    """Those of the ops in a checkpoint of the model's own that run again in a compiled program. ``saved``: the ops
    whose results its policy keeps."""
    return frozenset(_needed(graph, kept, ops, saved))


def _up_to_the_last(graph: Graph, kept: Kept, ops: list[int]) -> Iterable[int]:
    """Op by op, all before the last one that keeps something, and that one if it keeps what it makes."""
    for number in reversed(range(len(ops))):
        op = graph.ops[ops[number]]
        read = kept.read_by_backward(op)
        makes = _keeps_its_own(kept, op) or not {*read}.isdisjoint(op.outputs)
        if makes or read:
            return ops[: number + makes]
    return ()


def _needed(graph: Graph, kept: Kept, ops: Sequence[int], saved: Collection[int] = ()) -> set[int]:
    """What makes something that is kept, but for the ops ``saved``, whose results are there. The mask of a dropout is
    made without what it drops."""
    roots = kept.roots
    needed = {root for op in ops for root in kept.by(graph.ops[op])}
    again = set()
    for number in reversed(ops):
        if number in saved:
            continue
        op = graph.ops[number]
        makes = any(roots.get(tensor, tensor) in needed for tensor in op.outputs)
        if makes or _keeps_its_own(kept, op):
            again.add(number)
        if makes or (number in again and op.kind != "dropout"):
            needed.update(roots.get(tensor, tensor) for tensor in op.inputs)
    return again


def _keeps_its_own(kept: Kept, op: Op) -> bool:
    """Whether an op keeps for its backward what is none of the graph's values: a mask, or statistics."""
    samples = kept.graph.sample_batch
    if (seen := kept.seen(op, "fp32")) is not None:
        return at(seen.kept, samples) > 0
    return bool(kept.masks(op)) or kept.statistics(op, samples) > 0
