"""Insert the sends and receives that a schedule of compute actions needs."""

from dataclasses import replace

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.action_table import ActionTable, TableT, has_any, without
from shardwright.core.schedule.actions import TRANSFER, Action, F, Kind, W
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.simulate import Costs, costs_by_slice, simulate_schedule


def insert_transfers(schedule: TableT, costs: Costs | None = None, *, blocking: bool = False) -> TableT:
    """Insert a send behind each action whose result another rank needs, and the receive on that rank.

    All actions are put down in one global order, that of a simulated run, a send and its receive at the same moment. So
    the two ends of every link agree on their order, and of the transfers that are left the earliest can always proceed:
    the result cannot deadlock, whether transfers block or not.

    Args:
        schedule: compute actions only.
        costs: the costs to simulate with; default all alike. They set where receives fall, not whether they are right.
        blocking: for runtimes in which a receive holds its rank until the tensor is there: put it behind what its rank
            is running when the tensor is sent, not ahead of it. Default: ahead, where it is posted in time and the
            tensor never waits for it.

    Raises:
        ScheduleError: the schedule has transfers already, or does not run to its end.
    """
    if has_any(schedule, TRANSFER):
        raise ScheduleError(f"{schedule.name} has sends and receives already: remove them with strip_transfers first")
    timeline = simulate_schedule(schedule, tuple(map(_positive, costs_by_slice(schedule, costs))))
    events: list[tuple[float, int, int, int]] = []
    for rank, (starts, ends) in enumerate(zip(timeline.start_s, timeline.end_s, strict=True)):
        for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            # Blocking: at the same instant what ends is sent before what starts is put down. Otherwise an action is
            # put down when it ends: after the receives of all that was sent while it ran, and before its own sends.
            events.append((start, 1, rank, index) if blocking else (end, 0, rank, index))
            events.append((end, 0, rank, -1 - index) if blocking else (end, 1, rank, -1 - index))
    table: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for _, _, rank, index in sorted(events):
        if index >= 0:
            table[rank].append(schedule.table[rank][index])
            continue
        for send, receive in transfers_of(schedule, schedule.table[rank][-1 - index]):
            table[rank].append(send)
            table[schedule.placement[receive.stage]].append(receive)
    return replace(schedule, table=tuple(tuple(order) for order in table))


def _positive(costs: StageCosts) -> StageCosts:
    """The same costs, nothing free: an action that takes no time would start and end in no particular order."""
    least = 1e-6 * (max(max(costs.forward_s), max(costs.backward_s)) or 1.0)
    return replace(
        costs,
        forward_s=tuple(max(time, least) for time in costs.forward_s),
        input_grad_s=tuple(max(time, least) for time in costs.input_grad_s),
        weight_grad_s=tuple(max(time, least) for time in costs.weight_grad_s),
        whole_backward_s=costs.whole_backward_s and tuple(max(time, least) for time in costs.whole_backward_s),
    )


def transfers_of(schedule: ActionTable, action: Action) -> list[tuple[Action, Action]]:
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
            pairs.append((part.as_kind(send), part.as_kind(receive, to)))
    return pairs


def strip_transfers(schedule: TableT) -> TableT:
    """The schedule without its sends and receives."""
    return without(schedule, TRANSFER)
