"""One step of a conversion: a collective, or something that every rank does alone."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout, Partial, Replicate, Split
from shardwright.core.layout.shards import common, entries, held

StepKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "exchange", "slice", "term"]
"""``exchange`` sends every rank exactly what it lacks, pair by pair, over several axes at once; ``slice`` keeps a part
of what is held, ``term`` makes a value one of the terms of a partial one: both are local."""

LOCAL: frozenset[StepKind] = frozenset({"slice", "term"})


@dataclass(frozen=True, slots=True)
class Step:
    """From one layout to the next, along ``axes``."""

    kind: StepKind
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    moved_bytes: int
    """What all ranks together send, padding included."""

    def __str__(self) -> str:
        return f"{self.kind} over {', '.join(self.axes)}: {self.before} → {self.after}, {self.moved_bytes} bytes"


def step_on(axis: str, before: Layout, after: Layout, mesh: Mesh) -> StepKind | None:
    """The kind of step that changes the placement on one axis; None where no collective on that axis alone does it:
    another axis cuts the same dim further inside, or the reduction of a partial value changes."""
    old, new = before.on(axis), after.on(axis)
    inner = mesh.names[mesh.names.index(axis) + 1 :]
    for placement, layout in ((old, before), (new, after)):
        if isinstance(placement, Split):
            for other in inner:
                there = layout.on(other)
                if isinstance(there, Split) and there.dim == placement.dim and mesh.axis_size(other) > 1:
                    return None
    if isinstance(new, Partial):
        if isinstance(old, Partial):
            return "term" if {old.op, new.op} == {"sum", "mean"} else None
        return "term"
    if isinstance(old, Partial):
        return "all-reduce" if isinstance(new, Replicate) else "reduce-scatter"
    if isinstance(old, Replicate):
        return "slice"
    if isinstance(new, Replicate):
        return "all-gather"
    return "exchange" if old.dim == new.dim else "all-to-all"  # other blocks of one dim


def moved_entries(kind: StepKind, axes: tuple[str, ...], before: Layout, after: Layout, shape: tuple[int, ...],
                  mesh: Mesh) -> int:  # fmt: skip
    """Entries that all ranks together send. Collectives send messages of one size: every message counts as the largest
    of its group, which is what padding costs where a dim does not divide. An exchange is not padded."""
    if kind in LOCAL:
        return 0
    total = 0
    for group in mesh.groups(*axes):
        had = [held(shape, before, mesh, rank) for rank in group]
        if kind == "all-reduce":
            total += 2 * (len(group) - 1) * entries(had[0])
            continue
        if kind == "all-gather":
            messages = [entries(places) for places in had]
            total += len(group) * (len(group) - 1) * max(messages)
            continue
        wanted = [held(shape, after, mesh, rank) for rank in group]
        if kind == "reduce-scatter":
            total += len(group) * (len(group) - 1) * max(entries(places) for places in wanted)
        elif kind == "all-to-all":
            largest = _largest_message(had, wanted)
            total += len(group) * (len(group) - 1) * largest
        else:
            total += sum(entries(w) - common(h, w) for h, w in zip(had, wanted, strict=True))
    return total


def _largest_message(had: list[tuple[np.ndarray, ...]], wanted: list[tuple[np.ndarray, ...]]) -> int:
    """Pieces of the first ranks are the largest, so the largest message is among the first two."""
    few = range(min(2, len(had)))
    return max(common(had[i], wanted[j]) for i in few for j in few)
