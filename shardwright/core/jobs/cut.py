"""The cut of a model into shards that fit a device beside the buffer for the next shard: the fastest, then the fewest.

Every shard but the last computes its forward twice, unless its activations wait on the host. So the fastest cut is no
even one: dynamic programming over the first unit of each shard, c(b) = min over a of c(a) + cost of units a … b-1.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import PlanError
from shardwright.core.jobs.shard_tables import ShardTables
from shardwright.core.model.graph import Graph
from shardwright.core.out_of_core.blocks import Label
from shardwright.core.values.amounts import bytes_text

SAME = 1e-9
"""Costs that differ by less, as a share, are the same."""
LABELS: tuple[Label, ...] = ("recompute", "offload")
"""What may become of the activations of a shard before the last, in the order in which equals are taken."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A model cut into shards."""

    starts: tuple[int, ...]
    """The first unit of every shard."""
    labels: tuple[Label, ...]
    """What becomes of the activations of each; the last one keeps them."""
    cost_s: float
    """Seconds of a step on one device, by the longer of each pass and its copies where these run beside."""

    def ends(self, units: int) -> list[tuple[int, int]]:
        """The (first unit, end) of every shard."""
        return list(zip(self.starts, (*self.starts[1:], units), strict=True))


@dataclass(frozen=True)
class Choices:
    """Every shard of a model that fits a device by itself, with what becomes of its activations, in arrays of one entry
    each, in order of their ends."""

    units: int
    first: NDArray[np.int64]
    end: NDArray[np.int64]
    label: NDArray[np.int64]
    """0 and 1: as in `LABELS`."""
    cost_s: NDArray[np.float64]
    device_bytes: NDArray[np.int64]
    buffer_bytes: NDArray[np.int64]

    def cut(self, budget_bytes: int, buffer_bytes: int | None) -> Cut | None:
        """The fastest cut whose shards fit the budget beside a buffer, and of equally fast ones that into the fewest
        shards. None for the buffer: nothing is copied in ahead. None where there is no such cut."""
        fits = self.device_bytes <= budget_bytes - (buffer_bytes or 0)
        if buffer_bytes is not None:
            fits &= self.buffer_bytes <= buffer_bytes
        best_s, shards = np.full(self.units + 1, np.inf), np.zeros(self.units + 1, dtype=np.int64)
        taken = np.full(self.units + 1, -1)
        best_s[0] = 0.0
        edges = np.searchsorted(self.end, np.arange(self.units + 2))
        for end in range(1, self.units + 1):
            those = np.arange(edges[end], edges[end + 1])[fits[edges[end] : edges[end + 1]]]
            sums = best_s[self.first[those]] + self.cost_s[those]
            if not len(those) or not np.isfinite(least := sums.min()):
                continue
            close = np.flatnonzero(sums <= least * (1 + SAME))
            own = close[np.argmin(shards[self.first[those[close]]])]
            best_s[end], taken[end] = sums[own], those[own]
            shards[end] = shards[self.first[those[own]]] + 1
        if taken[-1] < 0:
            return None
        starts: list[int] = []
        labels: list[Label] = []
        end = self.units
        while end:
            choice = taken[end]
            labels.insert(0, "keep" if end == self.units else LABELS[self.label[choice]])
            end = int(self.first[choice])
            starts.insert(0, end)
        return Cut(tuple(starts), tuple(labels), float(best_s[-1]))


def choices_of(tables: ShardTables, budget_bytes: int, *, beside: bool, may_offload: bool = True) -> Choices:
    """The shards that fit a budget by themselves. ``beside``: whether copies run while other passes compute;
    ``may_offload``: whether activations may go to the host."""
    labels = LABELS if may_offload else LABELS[:1]
    rows: list[tuple[int, int, int, float, int, int]] = []
    for a in range(tables.units):
        for b in range(a + 1, tables.units + 1):
            if tables.parameters_bytes(a, b) > budget_bytes:
                break  # no larger one fits
            for number, of in enumerate(labels if b < tables.units else labels[:1]):
                passes = tables.passes(a, b, of)
                most = max(own.device_bytes for own in passes)
                if most <= budget_bytes:
                    cost_s = sum(own.seconds(beside=beside) for own in passes)
                    rows.append((a, b, number, cost_s, most, max(own.buffer_bytes for own in passes)))
    rows.sort(key=lambda row: (row[1], row[0], row[2]))
    numbers = np.array([(*row[:3], *row[4:]) for row in rows], dtype=np.int64)
    first, end, label, held, waiting = numbers.reshape(-1, 5).T
    return Choices(tables.units, first, end, label, np.array([row[3] for row in rows]), held, waiting)


def refusal(name: str, tables: ShardTables, budget_bytes: int, *, double: bool) -> PlanError:
    """Why a job has no cut that fits: the unit that is too large by itself, which of its operations is the largest, and
    by how much; or that no unit is, but one with the buffer for another."""
    worst = max(range(tables.units), key=lambda unit: _needs(tables, unit, double=double)[0])
    needed, waiting = _needs(tables, worst, double=double)
    graph, over = tables.tables.graph, needed - budget_bytes
    unit = tables.tables.folded.units[worst]
    paths = ", ".join(call.path for call in unit.calls[:2]) or "outside every module"
    operation, size = _largest_operation(tables, worst)
    one = (
        f"operation {graph.ops[operation].name} of {graph.calls[graph.ops[operation].call].path or graph.model_name} "
        f"has operands and results of {bytes_text(size)}"
    )
    if size > budget_bytes:
        said = f"{one}, {bytes_text(size - budget_bytes)} more than a device may hold"
    elif tables.units == 1:
        said = (
            f"{graph.model_name} is one unit, which no cut divides: it has no blocks that repeat and no module around "
            f"a part of its operations. It takes {bytes_text(needed)}, {bytes_text(max(0, over))} too many"
        )
    else:
        waiting_text = f", of which {bytes_text(waiting)} are the buffer for the next shard" if double else ""
        said = (
            f"unit {worst} ({paths}) takes {bytes_text(needed)}{waiting_text}: {bytes_text(max(0, over))} too many; "
            f"its largest {one}"
        )
    return PlanError(
        f"job {name!r} cannot be cut for a budget of {bytes_text(budget_bytes)}: {said}. Give a larger budget, a "
        f"smaller microbatch (now {tables.microbatch}) or smaller blocks"
    )


def _needs(tables: ShardTables, unit: int, *, double: bool) -> tuple[int, int]:
    """The least bytes that one unit needs as a shard, and those of them that are the buffer for another like it."""
    found = []
    for label in LABELS if unit + 1 < tables.units else LABELS[:1]:
        passes = tables.passes(unit, unit + 1, label)
        waiting = max(own.buffer_bytes for own in passes) if double else 0
        found.append((max(own.device_bytes for own in passes) + waiting, waiting))
    return min(found)


def _largest_operation(tables: ShardTables, unit: int) -> tuple[int, int]:
    """The operation of a unit with the most bytes of operands and results, and these bytes."""
    graph, counter, own = tables.tables.graph, tables.tables.counter, tables.tables.folded.units[unit]

    def size_bytes(graph: Graph, index: int) -> int:
        op = graph.ops[index]
        roots = {counter.memory_of(tensor) for tensor in (*op.inputs, *op.outputs)}
        return sum(counter.size_bytes(tensor, tables.microbatch, tables.precision) for tensor in roots)

    sizes = [(size_bytes(graph, index), index) for index in range(own.first_op, own.end_op)]
    size, index = max(sizes, key=lambda pair: (pair[0], -pair[1]))
    return index, size
