"""Simulation: a schedule and its costs give a timeline."""

from collections.abc import Sequence

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.action_table import ActionTable
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.legality import report
from shardwright.core.schedule.run import Mode, ScheduleRun
from shardwright.core.schedule.timeline import Timeline

Costs = StageCosts | Sequence[StageCosts]
"""The costs of a microbatch, or of each of its slices."""


def simulate(schedule: ActionTable, costs: Costs | None = None) -> Timeline:
    """The times at which each action of a schedule runs; see `simulate_schedule`."""
    if not isinstance(schedule, ActionTable):
        raise ScheduleError(f"simulate takes a schedule, not a {type(schedule).__name__}")
    return simulate_schedule(schedule, costs)


def simulate_schedule(
    schedule: ActionTable, costs: Costs | None = None, *, transfers: Mode = "asynchronous"
) -> Timeline:
    """The times at which each action of a schedule runs.

    Args:
        schedule: compute actions only, or with sends and receives (then these are what moves tensors).
        costs: of a microbatch; where the schedule has slices, one for each slice in turn, or one for all of them.
            Default: 1 s for every action and none for transfers.
        transfers: `asynchronous`: a link works beside the ranks; `blocking`: a send and its receive start together and
            hold both ranks until the tensor is across (the schedule must contain them: `insert_transfers`).

    Raises:
        ScheduleError: the costs are of another number of stages or slices, or the schedule does not run to its end; the
            message prints the grid with the action where it stops.
    """
    ran = ScheduleRun(schedule, costs_by_slice(schedule, costs), transfers)
    stuck = ran.run()
    if stuck:
        raise ScheduleError(explain_stop(schedule, stuck))
    return ran.timeline()


def require_costs(costs: object) -> tuple[StageCosts, ...]:
    """The costs of a microbatch, or of its slices, as a tuple. Raises ScheduleError for anything else."""
    found = costs if isinstance(costs, list | tuple) else (costs,)
    if not found or not all(isinstance(one, StageCosts) for one in found):
        raise ScheduleError(
            f"costs={costs!r}: expected StageCosts, such as StageCosts.uniform(stages), or one for each slice"
        )
    return tuple(found)


def costs_by_slice(schedule: ActionTable, costs: Costs | None) -> tuple[StageCosts, ...]:
    """The costs of each slice of a schedule. Raises ScheduleError for costs of another number of stages or slices, or
    slices that share links and devices in different ways."""
    if costs is None:
        costs = StageCosts.uniform(schedule.stages)
    found = require_costs(costs)
    if isinstance(costs, StageCosts):
        found *= schedule.slices
    if len(found) != schedule.slices:
        raise ScheduleError(
            f"{len(found)} costs were given for a schedule of {schedule.slices} slices: expected StageCosts for each"
        )
    for one in found:
        one.require_stages(schedule.stages)
    for name in ("overlap", "idle_lent", "sender_waits"):
        if len({getattr(one, name) for one in found}) > 1:
            raise ScheduleError(
                f"the costs of slices differ in {name}: expected the same for all, as it is of the devices"
            )
    return found


def explain_stop(schedule: ActionTable, stuck: Sequence[tuple[int, int]]) -> str:
    """The reason why a schedule did not run to its end, for each (rank, position) at which it stopped, and the grid."""
    lines = [f"rank {rank} waits at step {at} with {schedule.table[rank][at]}" for rank, at in stuck]
    what = "the schedule stops before its end (deadlock): " + "; ".join(lines)
    if schedule.credits is not None:
        what += f"; it is bound to {schedule.credits} tensors on each boundary"
    return report(schedule.name, schedule.table, what, *stuck[0])
