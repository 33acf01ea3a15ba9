"""Whether a schedule does every action once and in legal order, and why one stops before its end."""

from collections.abc import Sequence

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import Action, B, F, I, Kind, W
from shardwright.core.schedule.grid import render
from shardwright.core.schedule.schedule import Schedule


def check_complete(schedule: Schedule) -> None:
    """Every (stage, microbatch) exactly once, on the rank that holds the stage, and in legal order there: F before its
    backward, I before its W, and no B beside I and W. A forward-only schedule has no backward at all.

    Raises:
        ScheduleError: an action is missing, doubled, unknown, on the wrong rank, or too early.
    """
    has_backward = any(part.kind in (B, I, W) for order in schedule.table for a in order for part in a.flat)
    for rank, order in enumerate(schedule.table):
        seen: dict[tuple[int, Kind, int], int] = {}
        for position, action in enumerate(order):
            for part in action.flat:
                if problem := _problem(schedule, rank, part, seen):
                    raise ScheduleError(report(schedule, problem, rank, position))
                if part.kind in (F, B, I, W):
                    seen[(part.stage, part.kind, part.microbatch or 0)] = position
        for stage in schedule.stages_of(rank):
            for mb in range(schedule.microbatches):
                if problem := _missing(seen, stage, mb, has_backward):
                    raise ScheduleError(report(schedule, f"rank {rank} never runs {problem}", rank, len(order)))


def _problem(schedule: Schedule, rank: int, part: Action, seen: dict[tuple[int, Kind, int], int]) -> str | None:
    """Why an action may not stand where it does, given what its rank ran before."""
    stage, mb = part.stage, part.microbatch or 0
    if stage >= schedule.stages:
        return f"{part}: there is no stage {stage}, only 0 to {schedule.stages - 1}"
    if schedule.placement[stage] != rank:
        return f"{part} is on rank {rank}: stage {stage} is on rank {schedule.placement[stage]}"
    if mb >= schedule.microbatches:
        return f"{part}: there is no microbatch {mb}, only 0 to {schedule.microbatches - 1}"
    if part.kind not in (F, B, I, W):
        return None
    if (stage, part.kind, mb) in seen:
        return f"{part} is on rank {rank} a second time; the first is at step {seen[(stage, part.kind, mb)]}"
    if part.kind is F:
        return None
    if part.kind is W:
        return None if (stage, I, mb) in seen else f"{part} comes before {stage}I{mb}, whose result it uses"
    if (stage, F, mb) not in seen:
        return f"{part} comes before {stage}F{mb}, whose activations it uses"
    other = I if part.kind is B else B
    if (stage, other, mb) in seen:
        return f"{part} repeats {stage}{other.value}{mb}: a backward is either whole (B) or split (I and W)"
    return None


def _missing(seen: dict[tuple[int, Kind, int], int], stage: int, mb: int, has_backward: bool) -> str | None:
    if (stage, F, mb) not in seen:
        return f"{stage}F{mb}"
    if not has_backward or (stage, B, mb) in seen:
        return None
    if (stage, I, mb) not in seen:
        return f"{stage}B{mb}, nor {stage}I{mb} and {stage}W{mb}"
    return None if (stage, W, mb) in seen else f"{stage}W{mb}"


def explain_stop(schedule: Schedule, stuck: Sequence[tuple[int, int]]) -> str:
    """Why a schedule did not run to its end, for each (rank, position) that it stopped at, and the grid."""
    try:
        check_complete(schedule)
    except ScheduleError as error:
        return str(error)
    lines = [f"rank {rank} waits at step {at} with {schedule.table[rank][at]}" for rank, at in stuck]
    what = "the schedule stops before its end (deadlock): " + "; ".join(lines)
    if schedule.credits is not None:
        what += f"; it is bound to {schedule.credits} tensors on each boundary"
    return report(schedule, what, *stuck[0])


def report(schedule: Schedule, problem: str, rank: int, position: int) -> str:
    """What is wrong, over the grid with the failing cell in brackets."""
    return f"{schedule.name}: {problem}\n{render(schedule.table, (rank, position))}"
