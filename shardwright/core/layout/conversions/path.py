"""The cheapest sequence of steps between two layouts of one mesh."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, product

from shardwright.core.errors import LayoutError
from shardwright.core.layout.conversions.step import Step, StepKind, moved_entries, step_on
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout, Partial, Placement, Replicate, Split
from shardwright.core.layout.shards import check_names

StepCost = Callable[[StepKind, tuple[str, ...], int], float]
"""What a step costs, from its kind, its axes and the bytes that all ranks together send."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """From ``before`` to ``after`` in steps."""

    shape: tuple[int, ...]
    item_bytes: int
    mesh: Mesh
    before: Layout
    after: Layout
    steps: tuple[Step, ...]

    @property
    def moved_bytes(self) -> int:
        """What all ranks together send."""
        return sum(step.moved_bytes for step in self.steps)


def _by_bytes(kind: StepKind, axes: tuple[str, ...], moved_bytes: int) -> float:
    return float(moved_bytes)


def convert(
    shape: tuple[int, ...], item_bytes: int, mesh: Mesh, before: Layout, after: Layout, cost: StepCost | None = None
) -> Conversion:
    """The sequence of steps of least cost (default: bytes; then fewest steps) from one layout to another.

    Every step changes one axis by one collective; where an axis cuts a dim outside another, an exchange over all
    axes that differ stands in. Dijkstra's algorithm over the layouts of the tensor. Raises LayoutError for layouts that
    do not fit the tensor and ClusterError for an axis that the mesh lacks.
    """
    for layout in (before, after):
        check_names(shape, layout, mesh)
    price = cost or _by_bytes
    ties = count()
    best: dict[Layout, tuple[float, int]] = {before: (0.0, 0)}
    came: dict[Layout, Step] = {}
    queue: list[tuple[float, int, int, Layout]] = [(0.0, 0, next(ties), before)]
    options = _placements(shape, before, after)
    while queue:
        spent, steps, _, here = heapq.heappop(queue)
        if here == after:
            break
        if (spent, steps) > best[here]:
            continue
        for kind, axes, there in _neighbours(here, after, mesh, options):
            moved = moved_entries(kind, axes, here, there, shape, mesh) * item_bytes
            reached = (spent + price(kind, axes, moved), steps + 1)
            if there not in best or reached < best[there]:
                best[there] = reached
                came[there] = Step(kind, axes, here, there, moved)
                heapq.heappush(queue, (*reached, next(ties), there))
    if after not in best:
        raise LayoutError(f"no sequence of collectives converts {before} to {after} on {mesh}")
    found: list[Step] = []
    at = after
    while at != before:
        found.append(came[at])
        at = came[at].before
    return Conversion(tuple(shape), item_bytes, mesh, before, after, tuple(reversed(found)))


def _placements(shape: tuple[int, ...], before: Layout, after: Layout) -> tuple[Placement, ...]:
    """What an axis may hold on the way: every split, replicated, and what the two ends hold."""
    ends = [p for layout in (before, after) for _, p in layout.placements]
    plain: list[Placement] = [Replicate(), *(Split(dim) for dim, size in enumerate(shape) if size > 1)]
    return tuple(dict.fromkeys([*plain, *ends]))


def _neighbours(
    here: Layout, goal: Layout, mesh: Mesh, options: tuple[Placement, ...]
) -> Iterator[tuple[StepKind, tuple[str, ...], Layout]]:
    for axis in mesh.names:
        if mesh.axis_size(axis) == 1 and here.on(axis) == goal.on(axis):
            continue
        for placement in options:
            if placement == here.on(axis):
                continue
            there = _with(here, {axis: placement})
            if not _is_layout(there):
                continue
            kind = step_on(axis, here, there, mesh)
            if kind is not None and not (kind == "term" and placement != goal.on(axis)):
                yield kind, (axis,), there
    # Straight to the goal on every axis that holds no partial value now; where the goal holds one, to anything that
    # can be made a term of it.
    choices = [_ways(here.on(axis), goal.on(axis), options) for axis in mesh.names]
    for chosen in product(*choices):
        there = Layout.of(dict(zip(mesh.names, chosen, strict=True)))
        differing = [axis for axis in mesh.names if here.on(axis) != there.on(axis)]
        alone = len(differing) == 1 and step_on(differing[0], here, there, mesh) is not None
        if differing and not alone and _is_layout(there):
            yield "exchange", _exchanging(here, there, mesh), there


def _ways(old: Placement, new: Placement, options: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """What an exchange may leave on one axis."""
    if isinstance(old, Partial):
        return (old,)
    if isinstance(new, Partial):
        return tuple(p for p in options if not isinstance(p, Partial))
    return (new,) if old == new else (old, new)


def _exchanging(here: Layout, there: Layout, mesh: Mesh) -> tuple[str, ...]:
    """The axes whose ranks have what each other lack: those that differ, and those that cut a dim of theirs."""
    differing = [axis for axis in mesh.names if here.on(axis) != there.on(axis)]
    dims = {p.dim for axis in differing for p in (here.on(axis), there.on(axis)) if isinstance(p, Split)}
    return tuple(
        axis
        for axis in mesh.names
        if axis in differing or (differing and isinstance(p := here.on(axis), Split) and p.dim in dims)
    )


def _with(layout: Layout, changes: dict[str, Placement]) -> Layout:
    return Layout.of({**dict(layout.placements), **changes})


def _is_layout(layout: Layout) -> bool:
    """Whether axes that cut one dim agree on its blocks, and partial values commute."""
    blocks: dict[int, tuple[int, ...]] = {}
    reductions = set()
    for _, placement in layout.placements:
        if isinstance(placement, Split) and blocks.setdefault(placement.dim, placement.blocks) != placement.blocks:
            return False
        if isinstance(placement, Partial):
            reductions.add(placement.op)
    return len(reductions) < 2 or reductions <= {"sum", "mean"}
