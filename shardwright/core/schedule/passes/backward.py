"""Merge a split backward, or split a whole one."""

from collections import deque
from collections.abc import Collection
from dataclasses import replace

from shardwright.core.schedule.action_table import TableT
from shardwright.core.schedule.actions import Action, B, I, W


def merge_backward(schedule: TableT, stages: Collection[int] | None = None) -> TableT:
    """Make one B of an I and the W of the same stage and microbatch right behind it; of all stages, or of those given.

    Together they are cheaper than apart wherever the two share work, and take the same time at worst. What waits for
    the input gradient then waits for the weight gradient too, so a timeline may grow; the order stays legal.
    """
    table = []
    for order in schedule.table:
        merged: list[Action] = []
        for action in order:
            before = merged[-1] if merged else None
            wanted = stages is None or action.stage in stages
            if wanted and action.kind is W and before == action.as_kind(I):
                merged[-1] = action.as_kind(B)
            else:
                merged.append(action)
        table.append(tuple(merged))
    return replace(schedule, table=tuple(table))


def split_backward(schedule: TableT, microbatches: Collection[int] | None = None, *, delay: int = 0) -> TableT:
    """Make an I and a W of every B that stands alone, or of those of some microbatches; those in overlapped pairs stay
    whole.

    Training under a schedule with backwards of both kinds shows what each of them costs: `measured_costs`.

    Args:
        delay: the number of its rank's actions between an I and its W, as in schedules that fill bubbles with Ws.
    """
    table = []
    for order in schedule.table:
        split: list[Action] = []
        late: deque[tuple[int, Action]] = deque()  # each W, and the number of other actions that it comes behind
        for done, action in enumerate(order, 1):
            if action.kind is B and (microbatches is None or action.microbatch in microbatches):
                split.append(action.as_kind(I))
                late.append((done + delay, action.as_kind(W)))
            else:
                split.append(action)
            while late and late[0][0] <= done:
                split.append(late.popleft()[1])
        table.append((*split, *(action for _, action in late)))
    return replace(schedule, table=tuple(table))
