"""The number of shards of each value that several units share, and the units that share its memory between units."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.cost.value_flow import SharedValue
from shardwright.core.layout.unit_layouts import Link, RealisedUnit
from shardwright.core.model.fold import Unit


def as_they_lie(
    counter: WorkCounter,
    units: Sequence[Unit],
    values: Sequence[SharedValue],
    realised: Callable[[int], RealisedUnit],
    *,
    gathered_stays: bool,
) -> tuple[tuple[SharedValue, int], ...]:
    """Each value with the units that hold it in the very memory in which it lies between units, and the number of its
    shards there. A unit that keeps it in another layout has a copy of its own, which it shares with nobody.

    ``realised`` gives the layouts of the unit like this one, ``gathered_stays`` is as in `WorkCounter.count`.
    """
    found = []
    for value in values:
        ways, own = 1, set()
        for unit in {*value.keepers, *value.enterers}:
            layouts = realised(unit)
            names = set(_names(counter, units[unit], layouts, value.tensor))
            ways = max(ways, _ways(layouts, names))
            if _has_copy(layouts, names, gathered_stays=gathered_stays):
                own.add(unit)
        found.append((replace(value, keepers=tuple(u for u in value.keepers if u not in own)), ways))
    return tuple(found)


def _names(counter: WorkCounter, unit: Unit, layouts: RealisedUnit, memory: int) -> Iterator[int]:
    """The tensors of this memory as they are numbered in the unit that the layouts belong to."""
    ops = counter.graph.ops
    ahead = layouts.first_op - unit.first_op
    for index in range(unit.first_op, unit.end_op):
        here, there = ops[index], ops[index + ahead]
        for mine, theirs in zip((*here.inputs, *here.outputs), (*there.inputs, *there.outputs), strict=True):
            if counter.memory_of(mine) == memory:
                yield theirs


def _ways(layouts: RealisedUnit, names: Collection[int]) -> int:
    """The number of shards of the value as it enters the unit; 1 where it does not."""
    return max((layouts.pieces(entering) for tensor, entering in layouts.enters if tensor in names), default=1)


def _has_copy(layouts: RealisedUnit, names: Collection[int], *, gathered_stays: bool) -> bool:
    """Whether the unit keeps the value in another layout than that in which it lies between units."""
    links = [link for link in layouts.links if link.tensor in names]
    if any(tensor in names for tensor, _ in layouts.enters):
        return any(_copies(link, gathered_stays=gathered_stays) for link in links)
    leaving = [link.after for link in links if link.leaves]
    return bool(leaving) and any(link.after != leaving[0] for link in links if link.reader is not None)


def _copies(link: Link, *, gathered_stays: bool) -> bool:
    """Whether the conversion leaves another tensor that is kept."""
    gathers = any(step.collective == "all_gather" for step in link.forward)
    return link.before != link.after and (gathered_stays or not gathers)
