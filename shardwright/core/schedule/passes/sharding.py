"""Insert the gathering and freeing of sharded parameters, and the reduction of their gradients."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.action_table import TableT, has_any, without
from shardwright.core.schedule.actions import SHARDING, Action, B, Kind, W
from shardwright.core.schedule.family import Order

ReduceAfter = Literal["each", "last"]
"""When the gradients of a stage are reduced: after each microbatch, so that no rank adds up whole ones, or after the
last."""


def insert_sharding(
    schedule: TableT,
    gathered_stages: int | None = 3,
    *,
    look_ahead: int | None = None,
    reduce_after: ReduceAfter = "last",
    weights_read: bool = True,
) -> TableT:
    """Gather a stage's parameters ahead of its use, free them when others need the room, and reduce its gradients after
    a weight gradient.

    Each rank keeps up to `gathered_stages` of its stages whole: the one in use and those that it uses next. When there
    is no room, the stage whose next use is furthest goes (Belady's rule, which frees least often), and one that is not
    used again goes at once. At the end nothing is left gathered.

    Args:
        gathered_stages: None: nothing is gathered or freed by the schedule, gradients alone are reduced.
        look_ahead: the number of stages, beside those that run, that are gathered before they are needed; None: as many
            as there is room for. With 0 no order of frees gathers less often; room for a stage ahead may be taken from
            one that is used again.
        reduce_after: reduce a stage's gradients after each microbatch or after the last one.
        weights_read: whether a weight gradient reads the parameters, as torch's own runtime asks; else those of a stage
            whose input gradients are done go.

    Raises:
        ScheduleError: the schedule has such actions already, or the room is too small for what runs at once.
    """
    if has_any(schedule, SHARDING):
        raise ScheduleError(f"{schedule.name} gathers parameters already: remove it with strip_sharding first")
    if look_ahead is not None and (look_ahead < 0 or gathered_stages is None or look_ahead >= gathered_stages):
        raise ScheduleError(
            f"look_ahead={look_ahead} and gathered_stages={gathered_stages}: expected from 0 to gathered_stages - 1, "
            f"as the stage that runs is one of those gathered"
        )
    needed = max((len({p.stage for p in a.flat}) for order in schedule.table for a in order), default=1)
    if gathered_stages is not None and gathered_stages < needed:
        raise ScheduleError(f"gathered_stages={gathered_stages} is too few: {needed} stages run at once here")
    table = []
    for order in schedule.table:
        if gathered_stages is not None:
            order = _gathered(order, gathered_stages, look_ahead, weights_read)
        table.append(_reduced(order, reduce_after))
    return replace(schedule, table=tuple(table))


def insert_residency(
    schedule: TableT, gathered_stages: int | None, look_ahead: int | None, *, reduces_each: bool
) -> TableT:
    """`insert_sharding` as plans have it: their runtimes' weight gradients read no parameters."""
    after: ReduceAfter = "each" if reduces_each else "last"
    return insert_sharding(schedule, gathered_stages, look_ahead=look_ahead, reduce_after=after, weights_read=False)


def with_gathers(order: Order, gathered_stages: int | None, look_ahead: int | None) -> Order:
    """The order of one rank with its gathers and frees of stages, as plans have them (`insert_residency`)."""
    return order if gathered_stages is None else _gathered(order, gathered_stages, look_ahead, weights_read=False)


def with_residency(order: Order, gathered_stages: int | None, look_ahead: int | None, *, reduces_each: bool) -> Order:
    """The same with the reductions of gradients."""
    return _reduced(with_gathers(order, gathered_stages, look_ahead), "each" if reduces_each else "last")


def strip_sharding(schedule: TableT) -> TableT:
    """The schedule without gathering, freeing and gradient reduction."""
    return without(schedule, SHARDING)


def without_idle_gathers(order: Order) -> Order:
    """An order without the gathers of stages of which nothing runs before they are freed, as where some actions of a
    schedule are left out."""
    idle: list[bool] = []
    began: dict[int, int] = {}
    for position, action in enumerate(order):
        idle.append(action.kind is Kind.UNSHARD)
        if action.kind is Kind.UNSHARD:
            began[action.stage] = position
        elif action.kind is Kind.RESHARD:
            idle[position] = idle[began.pop(action.stage)]
        else:
            for part in action.flat if action.kind.is_compute else ():
                if part.stage in began:
                    idle[began[part.stage]] = False
    return tuple(action for action, left_out in zip(order, idle, strict=True) if not left_out)


def _reduced(order: Order, after: ReduceAfter) -> Order:
    """The order with the reductions of gradients."""
    left: dict[int, int] = {}
    for action in order:
        for part in action.flat:
            left[part.stage] = left.get(part.stage, 0) + (part.kind in (B, W))
    out: list[Action] = []
    for action in order:
        out.append(action)
        for part in action.flat:
            if part.kind in (B, W):
                left[part.stage] -= 1
                if after == "each" or left[part.stage] == 0:
                    out.append(Action(part.stage, Kind.REDUCE_GRAD))
    return tuple(out)


def _gathered(order: Order, room: int, look_ahead: int | None, weights_read: bool) -> Order:
    """The order with the gathers and frees of stages."""
    out: list[Action] = []
    gathered: list[int] = []
    upcoming = _upcoming(order, weights_read)
    for position, action in enumerate(order):
        now = _read(action, weights_read)
        coming = upcoming[position]
        wanted = coming[: room if look_ahead is None else min(room, len(now) + look_ahead)]
        # Furthest use first; what is used no more is at the end of them all.
        for stage in sorted(gathered, key=lambda s: coming.index(s) if s in coming else len(coming), reverse=True):
            if stage in wanted or (stage in coming and len(set(gathered) | set(wanted)) <= room):
                continue
            gathered.remove(stage)
            out.append(Action(stage, Kind.RESHARD))
        for stage in wanted:
            if stage not in gathered:
                gathered.append(stage)
                out.append(Action(stage, Kind.UNSHARD))
        out.append(action)
    out += [Action(stage, Kind.RESHARD) for stage in gathered]
    return tuple(out)


def _read(action: Action, weights_read: bool) -> tuple[int, ...]:
    """The stages whose parameters an action reads."""
    if not action.kind.is_compute:
        return ()
    return tuple(dict.fromkeys(part.stage for part in action.flat if weights_read or part.kind is not W))


def _upcoming(order: Sequence[Action], weights_read: bool) -> list[tuple[int, ...]]:
    """The stages that are read from each position on, nearest first."""
    nearest: tuple[int, ...] = ()
    result: list[tuple[int, ...]] = []
    for action in reversed(order):
        now = _read(action, weights_read)
        if now and nearest[: len(now)] != now:
            nearest = (*now, *(stage for stage in nearest if stage not in now))
        result.append(nearest)
    return result[::-1]
