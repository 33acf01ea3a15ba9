"""Checks beyond those that every schedule passes when it is made: that it ends, trains, and keeps its memory.

A failed check raises ScheduleError with the reason and the grid, the failing cell in brackets.
"""

from collections.abc import Sequence

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.action_table import has_any
from shardwright.core.schedule.actions import TRANSFER, Action, B, Kind, W
from shardwright.core.schedule.costs import per_rank_limit
from shardwright.core.schedule.legality import report
from shardwright.core.schedule.passes.transfers import insert_transfers
from shardwright.core.schedule.peak_memory import bytes_of, walk_activations
from shardwright.core.schedule.run import ScheduleRun
from shardwright.core.schedule.schedule import Schedule
from shardwright.core.schedule.simulate import Costs, costs_by_slice, explain_stop


def check(
    schedule: Schedule, memory_limit_bytes: int | Sequence[int] | None = None, costs: Costs | None = None
) -> None:
    """Run every check: parameters are gathered when used, the schedule ends under asynchronous and under blocking
    transfers, and it keeps within its memory.

    Raises:
        ScheduleError: the first check that fails.
    """
    check_sharding(schedule)
    check_ends(schedule)
    check_ends(schedule, blocking=True)
    if memory_limit_bytes is not None:
        check_memory(schedule, memory_limit_bytes, costs)


def require_runnable(schedule: Schedule) -> None:
    """Check that every rank comes to its end, as a runtime asks of a schedule before it runs it.

    Raises:
        ScheduleError: the ranks wait for one another, or parameters are not gathered when they are used.
    """
    check_sharding(schedule)
    check_ends(schedule)


def require_trains(schedule: Schedule) -> None:
    """Check that a schedule has backwards, as a runtime asks of it before it trains under it.

    Raises:
        ScheduleError: it has no backwards.
    """
    if not schedule.trains:
        raise ScheduleError(
            f"{schedule.name} has no backward passes, and training needs them: take a schedule that has, such as 1f1b; "
            f"this one is for evaluation alone"
        )


def check_sharding(schedule: Schedule) -> None:
    """Check the gathers and frees of parameters: each stage is gathered when a forward or an input gradient of it runs,
    and freed at the end, not twice; and every gradient is reduced after it was added to. A rank that gathers nothing
    need free nothing, and one that reduces nothing leaves that to the runtime.

    Raises:
        ScheduleError: an action finds its stage's parameters or gradients in the wrong state.
    """
    for rank, order in enumerate(schedule.table):
        gathers = any(action.kind in (Kind.UNSHARD, Kind.RESHARD) for action in order)
        reduces = any(action.kind is Kind.REDUCE_GRAD for action in order)
        gathered: set[int] = set()
        unreduced: dict[int, Action] = {}
        for position, action in enumerate(order):
            if gathers and (problem := _gathering_problem(action, gathered)):
                raise ScheduleError(report(schedule.name, schedule.table, problem, rank, position))
            unreduced.update((part.stage, part) for part in action.flat if part.kind in (B, W))
            if action.kind is Kind.REDUCE_GRAD and unreduced.pop(action.stage, None) is None:
                problem = f"{action} reduces the gradients of stage {action.stage}, to which nothing was added"
                raise ScheduleError(report(schedule.name, schedule.table, problem, rank, position))
        if gathered:
            problem = f"rank {rank} never frees stage {', '.join(map(str, sorted(gathered)))}"
            raise ScheduleError(report(schedule.name, schedule.table, problem, rank, len(order)))
        if reduces and unreduced:
            stage, last = next(iter(unreduced.items()))
            problem = f"rank {rank} never reduces the gradients of stage {stage} after {last}"
            raise ScheduleError(report(schedule.name, schedule.table, problem, rank, len(order)))


def _gathering_problem(action: Action, gathered: set[int]) -> str | None:
    """The fault of an action, given what is gathered, or None. Notes what the action does to that."""
    stage = action.stage
    if action.kind is Kind.UNSHARD:
        if stage in gathered:
            return f"{action} gathers stage {stage}, which is gathered already"
        gathered.add(stage)
    elif action.kind is Kind.RESHARD:
        if stage not in gathered:
            return f"{action} frees stage {stage}, which is not gathered"
        gathered.remove(stage)
    elif action.kind.is_compute:
        for part in action.flat:
            if part.kind is not W and part.stage not in gathered:
                return f"{part} runs while the parameters of stage {part.stage} are not gathered"
    return None


def check_ends(schedule: Schedule, *, blocking: bool = False) -> None:
    """Check that the schedule runs to its end, with transfers beside the compute or, `blocking`, with every send held
    until its receive. For `blocking`, sends and receives are inserted first when the schedule has none.

    Raises:
        ScheduleError: the ranks wait for one another, or for what never comes.
    """
    if blocking and schedule.ranks > 1 and not has_any(schedule, TRANSFER):
        schedule = insert_transfers(schedule, blocking=True)
    ran = ScheduleRun(schedule, costs_by_slice(schedule, None), "blocking" if blocking else "asynchronous")
    if stuck := ran.run():
        raise ScheduleError(explain_stop(schedule, stuck))


def check_memory(schedule: Schedule, memory_limit_bytes: int | Sequence[int], costs: Costs | None = None) -> None:
    """Check that no rank holds more activations than its limit, in bytes. Costs give the bytes per stage; default 1.

    Raises:
        ScheduleError: a rank goes over; the message says by how much.
    """
    limits = per_rank_limit(memory_limit_bytes, schedule.ranks) or ()
    slices = tuple(map(bytes_of, costs_by_slice(schedule, costs)))
    for rank, order in enumerate(schedule.table):
        walk = walk_activations(order, slices=slices)
        for position, (held, _) in enumerate(walk):
            if held > limits[rank]:
                action = order[position]
                problem = f"rank {rank} holds {held} bytes of activations during {action}: its limit is {limits[rank]}"
                raise ScheduleError(report(schedule.name, schedule.table, problem, rank, position))
