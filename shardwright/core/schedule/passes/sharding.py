"""Insert the gathering and freeing of sharded parameters, and the reduction of their gradients."""

from collections.abc import Sequence
from dataclasses import replace

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.action_table import TableT, has_any, without
from shardwright.core.schedule.actions import SHARDING, Action, B, Kind, W
from shardwright.core.schedule.family import Order


def insert_sharding(schedule: TableT, gathered_stages: int = 3) -> TableT:
    """Gather a stage's parameters ahead of its use, free them when others need the room, and reduce its gradients after
    its last weight gradient.

    Each rank keeps up to `gathered_stages` of its stages whole: the one in use and those that it uses next. When there
    is no room, the stage whose next use is furthest goes (Belady's rule, which frees least often). At the end nothing
    is left gathered.

    Raises:
        ScheduleError: the schedule has such actions already, or the room is too small for what runs at once.
    """
    if has_any(schedule, SHARDING):
        raise ScheduleError(f"{schedule.name} gathers parameters already: remove it with strip_sharding first")
    needed = max((len({p.stage for p in a.flat}) for order in schedule.table for a in order), default=1)
    if gathered_stages < needed:
        raise ScheduleError(f"gathered_stages={gathered_stages} is too few: {needed} stages run at once here")
    return replace(schedule, table=tuple(_rank(order, gathered_stages) for order in schedule.table))


def strip_sharding(schedule: TableT) -> TableT:
    """The schedule without gathering, freeing and gradient reduction."""
    return without(schedule, SHARDING)


def _rank(order: Order, room: int) -> Order:
    out: list[Action] = []
    gathered: list[int] = []
    left: dict[int, int] = {}
    for action in order:
        for part in action.flat:
            left[part.stage] = left.get(part.stage, 0) + (part.kind in (B, W))
    upcoming = _upcoming(order, room)
    for position, action in enumerate(order):
        wanted = upcoming[position]
        for stage in [held for held in gathered if held not in wanted]:
            if len(set(gathered) | set(wanted)) <= room:
                break
            gathered.remove(stage)
            out.append(Action(stage, Kind.RESHARD))
        for stage in wanted:
            if stage not in gathered:
                gathered.append(stage)
                out.append(Action(stage, Kind.UNSHARD))
        out.append(action)
        for part in action.flat:
            if part.kind in (B, W):
                left[part.stage] -= 1
                if left[part.stage] == 0:
                    out.append(Action(part.stage, Kind.REDUCE_GRAD))
    out += [Action(stage, Kind.RESHARD) for stage in gathered]
    return tuple(out)


def _upcoming(order: Sequence[Action], room: int) -> list[tuple[int, ...]]:
    """The stages used from each position on, nearest first and at most `room` of them."""
    nearest: list[int] = []
    result: list[tuple[int, ...]] = []
    for action in reversed(order):
        if action.kind.is_compute:
            now = [part.stage for part in action.flat]
            nearest = now + [stage for stage in nearest if stage not in now]
        result.append(tuple(dict.fromkeys(nearest))[:room])
    return result[::-1]
