"""Bound the buffers between ranks: a producer waits until its consumer has used what was sent before.

The bounds are credits as in a dataflow runtime (Yuan et al., arXiv 2110.15032, section 4): each boundary between two
ranks, in each direction, has so many buffers. One is taken when an action that fills it starts, and given back when the
action that uses it has ended. With one credit the two ranks take turns; with two they overlap.
"""

from dataclasses import replace

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.action_table import ActionTable, TableT, has_any
from shardwright.core.schedule.actions import TRANSFER
from shardwright.core.schedule.run import ScheduleRun
from shardwright.core.schedule.simulate import costs_by_slice


def bound_buffers(schedule: TableT, credits: int) -> TableT:
    """The schedule with `credits` buffers on each boundary between ranks. Do this before `insert_transfers`, which then
    posts no receive for which there is no buffer.

    Raises:
        ScheduleError: with so few buffers the schedule would not end; says how many it needs.
    """
    if has_any(schedule, TRANSFER):
        raise ScheduleError(
            f"{schedule.name} has sends and receives already: bound its buffers before they are inserted"
        )
    bounded = replace(schedule, credits=credits)
    if _ends(bounded):
        return bounded
    if not _ends(schedule):
        raise ScheduleError(f"{schedule.name} does not run to its end with any number of buffers")
    few, enough = credits, schedule.microbatches
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if _ends(replace(schedule, credits=middle)) else (middle, enough)
    raise ScheduleError(
        f"{schedule.name} cannot end with credits={credits}: it runs further ahead than that; the least is {enough}"
    )


def _ends(schedule: ActionTable) -> bool:
    return not ScheduleRun(schedule, costs_by_slice(schedule, None)).run()
