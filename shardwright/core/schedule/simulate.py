"""The event engine: a schedule and its costs give a timeline.

Ranks and links are resources. A rank runs its actions in their order, each as soon as what it needs has arrived. Every
ordered pair of ranks has a link of its own (full duplex) that carries one tensor at a time, first in, first out, while
the ranks go on computing. What a link carries is made by one rank in the order of that rank's actions, so every time
follows from earlier ones: the engine advances each rank as far as it gets, and a rank that must wait is taken up again
when what it waits for has a time. Each action is looked at once or twice, whatever the sizes. For ranks that share a
machine (`StageCosts.idle_lent`), these times are then read by another clock (`lent_clock`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.action_table import ActionTable, has_any
from shardwright.core.schedule.actions import TRANSFER, Action, B, F, I, Kind, W
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.idle_share import lent_clock
from shardwright.core.schedule.legality import report
from shardwright.core.schedule.peak_memory import SliceBytes
from shardwright.core.schedule.timeline import Timeline, TransferLog, TransferRow

Mode = Literal["asynchronous", "blocking"]
_NEVER = float("inf")


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
    engine = Engine(schedule, costs_by_slice(schedule, costs), transfers)
    stuck = engine.run()
    if stuck:
        raise ScheduleError(explain_stop(schedule, stuck))
    return engine.timeline()


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


def bytes_of(costs: StageCosts) -> SliceBytes:
    """What a slice of these costs holds."""
    return SliceBytes(costs.activation_bytes, costs.freed_by_input_grad_bytes or (0,) * costs.stages)


def explain_stop(schedule: ActionTable, stuck: Sequence[tuple[int, int]]) -> str:
    """The reason why a schedule did not run to its end, for each (rank, position) at which it stopped, and the grid."""
    lines = [f"rank {rank} waits at step {at} with {schedule.table[rank][at]}" for rank, at in stuck]
    what = "the schedule stops before its end (deadlock): " + "; ".join(lines)
    if schedule.credits is not None:
        what += f"; it is bound to {schedule.credits} tensors on each boundary"
    return report(schedule.name, schedule.table, what, *stuck[0])


def _seconds(costs: StageCosts, kind: Kind) -> tuple[float, ...]:
    by_kind = {F: costs.forward_s, I: costs.input_grad_s, W: costs.weight_grad_s, B: costs.backward_s}
    return by_kind[kind]


@dataclass(slots=True)
class _Link:
    """The tensors from one rank to another. `sends` and `recvs` wait for their match (tables with transfers only)."""

    free_s: float = 0.0
    last: int = -1
    sends: deque[tuple[float, Action, int]] = field(default_factory=deque)
    recvs: deque[tuple[float, Action, int]] = field(default_factory=deque)


class Engine:
    """One run of one schedule. Times are in seconds; nodes are numbered as `Timeline.cause` numbers them."""

    def __init__(self, schedule: ActionTable, costs: Sequence[StageCosts], transfers: Mode) -> None:
        self.schedule, self.costs, self.by_slice = schedule, costs[0], costs
        self.explicit = has_any(schedule, TRANSFER)
        self.blocking = transfers == "blocking"
        if self.blocking and not self.explicit and schedule.ranks > 1:
            raise ScheduleError("blocking transfers need sends and receives in the schedule: use insert_transfers")
        stages, m, ranks = schedule.stages, schedule.passes, schedule.ranks
        self.passes, self.slices = m, schedule.slices
        self.transfer_s = [one.transfer_s for one in costs]
        self.offset = [0]
        for order in schedule.table:
            self.offset.append(self.offset[-1] + len(order))
        self.start = [0.0] * self.offset[-1]
        self.end = [0.0] * self.offset[-1]
        self.cause = [-1] * self.offset[-1]
        self.clock = [0.0] * ranks
        self.position = [0] * ranks
        self.in_halves = all(one.whole_backward_s is None for one in costs)
        self.seconds = {kind: [_seconds(one, kind) for one in costs] for kind in (F, I, W, B)}
        # By stage * m + pass (of a microbatch, or of one of its slices): the time at which the input of its forward or
        # backward is there (-1.0: not known), what brought it, and whether its forward and its input gradient have run.
        self.forward_in, self.backward_in = [-1.0] * (stages * m), [-1.0] * (stages * m)
        self.forward_by, self.backward_by = [-1] * (stages * m), [-1] * (stages * m)
        self.forward_in[:m] = [0.0] * m
        self.forward_done, self.input_done = bytearray(stages * m), bytearray(stages * m)
        self.links: dict[tuple[int, int], _Link] = {}
        self.transfers: list[TransferRow] = []
        self.transfer_cause: list[int] = []
        self.waiting: dict[object, list[int]] = {}
        self.ready: deque[int] = deque(range(ranks))
        self.used: dict[tuple[bool, int], list[tuple[float, int]]] = {}
        self.made: dict[tuple[bool, int], int] = {}

    def run(self) -> list[tuple[int, int]]:
        """Advance every rank as far as it gets; returns (rank, position) of each that did not reach its end."""
        while self.ready:
            self._advance(self.ready.popleft())
        table = self.schedule.table
        return [(rank, at) for rank, at in enumerate(self.position) if at < len(table[rank])]

    def timeline(self) -> Timeline:
        rows = [slice(a, b) for a, b in pairwise(self.offset)]
        start = [np.array(self.start[row], dtype=np.float64) for row in rows]
        end = [np.array(self.end[row], dtype=np.float64) for row in rows]
        transfers = self.transfers
        if self.costs.idle_lent and self.offset[-1]:
            clock = lent_clock(start, end, self.costs.idle_lent)
            start, end = [clock(times) for times in start], [clock(times) for times in end]
            moved = clock(np.array([row[5:] for row in transfers], dtype=np.float64).reshape(-1, 2)).tolist()
            transfers = [(*row[:5], *times) for row, times in zip(transfers, moved, strict=True)]
        return Timeline(
            self.schedule.table,
            tuple(start),
            tuple(end),
            TransferLog(transfers, self.schedule.slices),
            self.costs.activation_bytes,
            tuple(np.array(self.cause[row], dtype=np.int64) for row in rows),
            np.array(self.transfer_cause, dtype=np.int64),
            self.costs.freed_by_input_grad_bytes,
            tuple(map(bytes_of, self.by_slice)) if self.schedule.slices > 1 else (),
        )

    def _advance(self, rank: int) -> None:
        order, offset, last_stage = self.schedule.table[rank], self.offset[rank], self.schedule.stages - 1
        m, credits, slices = self.passes, self.schedule.credits, self.slices
        forward_in, backward_in, seconds_of = self.forward_in, self.backward_in, self.seconds
        in_halves, explicit, starts, ends, causes = self.in_halves, self.explicit, self.start, self.end, self.cause
        position, count = self.position[rank], len(order)
        while position < count:
            node = offset + position
            action = order[position]
            if explicit and action.kind in TRANSFER:
                if not self._post(rank, action, node):
                    return
                position += 1
                self.position[rank] = position
                continue
            clock = start = self.clock[rank]
            by = node - 1 if position else -1
            seconds, shorter = 0.0, _NEVER
            parts = action.parts or (action,)
            for part in parts:
                stage, kind = part.stage, part.kind
                rows = seconds_of.get(kind)
                if rows is None:
                    continue  # Gathering and freeing parameters takes no time here.
                piece = part.slice or 0
                at = stage * m + (part.microbatch or 0) * slices + piece
                length = rows[piece][stage]
                seconds += length
                if length < shorter:
                    shorter = length
                if kind is F:
                    arrival, bringer = forward_in[at], self.forward_by[at]
                elif kind is W:
                    if not self.input_done[at]:
                        return  # Out of order: it never runs.
                    continue
                elif not self.forward_done[at]:
                    return
                elif stage == last_stage:
                    arrival, bringer = clock, by
                else:
                    arrival, bringer = backward_in[at], self.backward_by[at]
                if arrival < 0:
                    self.waiting.setdefault((kind is F, at), []).append(rank)
                    return
                if arrival > start:
                    start, by = arrival, bringer
                if credits is not None:
                    freed = self._credit(rank, part, credits)
                    if freed is None:
                        return
                    if freed[0] > start:
                        start, by = freed
            if len(parts) > 1:
                seconds -= self.costs.overlap * shorter
            starts[node], causes[node] = start, by
            end = start + seconds
            if in_halves and action.kind is B:
                # In the order of its halves, so that a whole backward ends to the last bit when a split one would.
                end = start + seconds_of[I][piece][stage] + seconds_of[W][piece][stage]
            ends[node] = self.clock[rank] = end
            for part in parts:
                if part.kind is not W and part.kind in seconds_of:
                    self._hand_on(rank, part, node)
            position += 1
            self.position[rank] = position

    def _edge(self, part: Action) -> tuple[bool, int] | None:
        """The boundary between ranks that a result crosses, as (whether forward, the stage it leaves), or None."""
        to = part.stage + 1 if part.kind is F else part.stage - 1
        if part.kind is W or not 0 <= to < self.schedule.stages:
            return None
        placement = self.schedule.placement
        return (part.kind is F, part.stage) if placement[to] != placement[part.stage] else None

    def _credit(self, rank: int, part: Action, credits: int) -> tuple[float, int] | None:
        """The time from which there is a buffer for what an action makes, and the node that freed it; None when that is
        not yet known."""
        edge = self._edge(part)
        owed = -1 if edge is None else self.made.get(edge, 0) - credits
        if edge is None or owed < 0:
            return 0.0, -1
        used = self.used.get(edge, [])
        if owed < len(used):
            return used[owed]
        self.waiting.setdefault(("credit", edge), []).append(rank)
        return None

    def _hand_on(self, rank: int, part: Action, node: int) -> None:
        """Record what a forward or an input gradient has made: hand it to the next stage, and give back the credit of
        what it used."""
        schedule, stage, forward = self.schedule, part.stage, part.kind is F
        m = self.passes
        mb = (part.microbatch or 0) * self.slices + (part.slice or 0)
        (self.forward_done if forward else self.input_done)[stage * m + mb] = 1
        if schedule.credits is not None:
            source = (forward, stage - 1 if forward else stage + 1)
            self.used.setdefault(source, []).append((self.end[node], node))
            self._wake(("credit", source))
            edge = self._edge(part)
            if edge is not None:
                self.made[edge] = self.made.get(edge, 0) + 1
        to = stage + 1 if forward else stage - 1
        if not 0 <= to < schedule.stages:
            return
        target = schedule.placement[to]
        if target == rank:
            self._arrive(forward, to * m + mb, self.end[node], node)
        elif not self.explicit:
            self._carry(rank, target, forward, stage, mb, self.end[node], node)

    def _arrive(self, forward: bool, at: int, time: float, by: int) -> None:
        if forward:
            self.forward_in[at], self.forward_by[at] = time, by
        else:
            self.backward_in[at], self.backward_by[at] = time, by
        self._wake((forward, at))

    def _wake(self, event: object) -> None:
        waiting = self.waiting.pop(event, None)
        if waiting:
            self.ready.extend(waiting)

    def _carry(self, source: int, target: int, forward: bool, stage: int, mb: int, ready: float, node: int) -> float:
        """Put a tensor on its link, ready at a time; returns when it is across."""
        link = self.links.get((source, target))
        if link is None:
            link = self.links[(source, target)] = _Link()
        start, cause = (ready, node) if ready >= link.free_s else (link.free_s, link.last)
        end = start + self.transfer_s[mb % self.slices][stage if forward else stage - 1]
        link.free_s, link.last = end, -2 - len(self.transfers)
        if self.costs.sender_waits:
            self.clock[source] = max(self.clock[source], end)
        self.transfers.append((forward, stage, mb, source, target, start, end))
        self.transfer_cause.append(cause)
        self._arrive(forward, (stage + 1 if forward else stage - 1) * self.passes + mb, end, link.last)
        return end

    def _post(self, rank: int, action: Action, node: int) -> bool:
        """Post a send or a receive; returns whether the rank may go on."""
        sends = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        peer_stage = action.stage + (1 if forward == sends else -1)
        if not 0 <= peer_stage < self.schedule.stages:
            return False
        made = self.forward_done if forward else self.input_done
        if sends and not made[action.stage * self.passes + self.schedule.pass_of(action)]:
            return False
        peer = self.schedule.placement[peer_stage]
        source, target = (rank, peer) if sends else (peer, rank)
        link = self.links.setdefault((source, target), _Link())
        cause = node - 1 if self.position[rank] else -1
        # A blocking transfer holds both ranks, so it waits for what each of them did before.
        (link.sends if sends else link.recvs).append((self.clock[rank], action, cause if self.blocking else node))
        if not self.blocking:
            self.start[node] = self.end[node] = self.clock[rank]
            self.cause[node] = cause
        moved = False
        while link.sends and link.recvs:
            (sent_s, send, send_by), (posted_s, recv, recv_by) = link.sends[0], link.recvs[0]
            expected = send.stage + 1 if send.kind is Kind.SEND_FORWARD else send.stage - 1
            same_way = (send.kind is Kind.SEND_FORWARD) == (recv.kind is Kind.RECV_FORWARD)
            of_send, of_recv = self.schedule.pass_of(send), self.schedule.pass_of(recv)
            if recv.stage != expected or of_recv != of_send or not same_way:
                break  # The two ends disagree on the order: neither gets what it waits for.
            link.sends.popleft()
            link.recvs.popleft()
            ready, by = (sent_s, send_by) if sent_s >= posted_s else (posted_s, recv_by)
            carried = send.kind is Kind.SEND_FORWARD
            end = self._carry(source, target, carried, send.stage, of_send, ready, by)
            moved = True
            if self.blocking:
                self._hold((rank, peer), ready, end)
        return moved or not self.blocking

    def _hold(self, pair: tuple[int, int], start: float, end: float) -> None:
        """Hold both ranks for a blocking transfer. The second, which waited for the first, goes on."""
        for rank in pair:
            node = self.offset[rank] + self.position[rank]
            self.start[node], self.end[node] = start, end
            self.cause[node] = -1 - len(self.transfers)
            self.clock[rank] = end
        self.position[pair[1]] += 1
        self.ready.append(pair[1])
