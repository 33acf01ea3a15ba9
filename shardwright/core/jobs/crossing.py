"""The values that enter and leave every run of units, where each run is loaded by itself and reads what it needs from
the host: branches, skip connections and encoder outputs are read by those shards alone that use them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.core.partition.exact import Matrix
from shardwright.core.tables.cost_tables import CostTables


@dataclass(frozen=True, slots=True)
class Crossing:
    """Bytes of one microbatch that a shard of units a … b-1 exchanges with others, in matrices ``[a, b]``."""

    entering: Matrix
    """Values that earlier shards made and this one reads."""
    entering_flowing: Matrix
    """Those of them through which a gradient flows: as many bytes of gradients leave in the backward."""
    leaving: Matrix
    """Values that this shard makes and later ones read."""
    leaving_flowing: Matrix
    """Those of them through which a gradient flows: as many bytes of gradients come in the backward."""
    partial_sums: Matrix
    """Gradients of values that later shards read too: their sum comes in, and this shard adds to it."""
    values: tuple[tuple[int, int, int, bool], ...]
    """(the unit that makes it, the last unit that reads it, bytes, whether a gradient flows) of every value that some
    later unit reads."""

    def host_bytes(self, starts: Sequence[int]) -> int:
        """The most bytes of one microbatch's values on the host under a cut: every value that crosses a border, and
        the gradients that cross the fullest border."""

        def crossing(maker: int, last: int) -> list[int]:
            return [start for start in starts if maker < start <= last]

        values = sum(size for maker, last, size, _ in self.values if crossing(maker, last))
        gradients = dict.fromkeys(starts, 0)
        for maker, last, size, flows in self.values:
            for start in crossing(maker, last) if flows else ():
                gradients[start] += size
        return values + max(gradients.values(), default=0)


def crossing_of(tables: CostTables, microbatch: int) -> Crossing:
    """The values that cross between units of a model."""
    graph, counter, units = tables.graph, tables.counter, tables.folded.units
    unit_of = [unit.index for unit in units for _ in range(unit.first_op, unit.end_op)]
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for tensor in op.inputs:
            if tensor in graph.producer and unit_of[graph.producer[tensor]] < unit_of[index]:
                readers.setdefault(tensor, []).append(unit_of[index])
    made = [
        (
            unit_of[graph.producer[tensor]],
            sorted(set(by)),
            counter.size_bytes(tensor, microbatch, tables.precision),
            counter.needs_gradient(tensor),
        )
        for tensor, by in readers.items()
    ]
    count = len(units)

    def sums(rectangles: Iterable[tuple[range, range, int]]) -> Matrix:
        return sums_of_rectangles(rectangles, count)

    def entering(rows: Iterable[tuple[int, list[int], int, bool]]) -> Matrix:
        return sums(each for maker, by, size, _ in rows for each in where_used(by, size, count, behind=maker))

    flowing = [row for row in made if row[3]]
    return Crossing(
        entering(made),
        entering(flowing),
        sums(_where_left(maker, by[-1], size) for maker, by, size, _ in made),
        sums(_where_left(maker, by[-1], size) for maker, by, size, _ in flowing),
        sums(
            each for maker, by, size, _ in flowing for each in where_used(by, size, count, behind=maker, up_to=by[-1])
        ),
        tuple((maker, by[-1], size, flows) for maker, by, size, flows in made),
    )


def where_used(
    users: Sequence[int], size: int, units: int, *, behind: int = -1, up_to: int | None = None
) -> Iterable[tuple[range, range, int]]:
    """The runs of units a … b-1 that begin behind a unit and hold any of the ``users``, in order, as rectangles of (all
    a, all b, size) that do not overlap; ``up_to``: only those with b up to this."""
    before = behind
    for user in users:
        yield range(before + 1, user + 1), range(user + 1, (units if up_to is None else up_to) + 1), size
        before = max(before, user)


def _where_left(maker: int, last: int, size: int) -> tuple[range, range, int]:
    """The runs of units that hold the maker of a value and not its last reader."""
    return range(maker + 1), range(maker + 1, last + 1), size


def sums_of_rectangles(rectangles: Iterable[tuple[range, range, int]], units: int) -> Matrix:
    """The sums ``[a, b]`` of the sizes of all rectangles that (a, b) lies in."""
    steps: Matrix = np.zeros((units + 2, units + 2))
    for rows, columns, size in rectangles:
        if not rows or not columns:
            continue
        for row, sign in ((rows.start, 1), (rows.stop, -1)):
            steps[row, columns.start] += sign * size
            steps[row, columns.stop] -= sign * size
    found: Matrix = np.cumsum(np.cumsum(steps, axis=0), axis=1)[:-1, :-1]
    return found
