"""Insert the sends and receives that a schedule of compute actions needs."""

from dataclasses import replace

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import TRANSFER, Action, F, Kind, W
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.schedule import Schedule
from shardwright.core.simulate import simulate_schedule


def insert_transfers(schedule: Schedule, costs: StageCosts | None = None) -> Schedule:
    """Insert a send behind each action whose result another rank needs, and the receive on that rank.

    Both are put down at the same moment of one global order, that of a simulated run. So the two ends of every link
    agree on their order, and at any time the earliest transfer left can proceed: the result cannot deadlock, whether
    transfers block or not. A receive stands where the tensor is made, which lets it run ahead of its use.

    Args:
        schedule: compute actions only.
        costs: the costs to simulate with; default all alike. They set where receives fall, not whether they are right.

    Raises:
        ScheduleError: the schedule has transfers already, or does not run to its end.
    """
    if any(action.kind in TRANSFER for order in schedule.table for action in order):
        raise ScheduleError(f"{schedule.name} has sends and receives already: remove them with strip_transfers first")
    timeline = simulate_schedule(schedule, costs)
    events: list[tuple[float, int, int, int]] = []
    for rank, (starts, ends) in enumerate(zip(timeline.start_s, timeline.end_s, strict=True)):
        for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            events.append((start, 1, rank, index))
            events.append((end, 0, rank, index))
    table: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    begun = [0] * schedule.ranks
    finished = [0] * schedule.ranks

    def start_until(rank: int, count: int) -> None:
        while begun[rank] < count:
            table[rank].append(schedule.table[rank][begun[rank]])
            begun[rank] += 1

    # At one instant ends come before starts, so that a receive stands before the action that uses it. Actions that take
    # no time start and end at once: their start is put down with their end.
    for _, phase, rank, index in sorted(events):
        if phase:
            start_until(rank, index + 1)
            continue
        while finished[rank] <= index:
            start_until(rank, finished[rank] + 1)
            for send, receive in transfers_of(schedule, schedule.table[rank][finished[rank]]):
                table[rank].append(send)
                table[schedule.placement[receive.stage]].append(receive)
            finished[rank] += 1
    return replace(schedule, table=tuple(tuple(order) for order in table))


def transfers_of(schedule: Schedule, action: Action) -> list[tuple[Action, Action]]:
    """The (send, receive) pairs that carry what an action makes to other ranks."""
    pairs = []
    for part in action.flat:
        if part.kind is W or not part.kind.is_compute:
            continue
        forward = part.kind is F
        to = part.stage + (1 if forward else -1)
        if 0 <= to < schedule.stages and schedule.placement[to] != schedule.placement[part.stage]:
            send = Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD
            receive = Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD
            pairs.append((Action(part.stage, send, part.microbatch), Action(to, receive, part.microbatch)))
    return pairs


def strip_transfers(schedule: Schedule) -> Schedule:
    """The schedule without its sends and receives."""
    table = tuple(tuple(action for action in order if action.kind not in TRANSFER) for order in schedule.table)
    return replace(schedule, table=table)
