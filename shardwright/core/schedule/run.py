"""One run of a schedule in the event engine: the policy that is always the next action in a rank's list.

Ranks and links are resources. A rank runs its actions in their order, each as soon as what it needs has arrived. Every
ordered pair of ranks has a link of its own (full duplex) that carries one tensor at a time, first in, first out, while
the ranks go on computing. What a link carries is made by one rank in the order of that rank's actions, so every time
follows from earlier ones: each rank is advanced as far as it gets, and one that must wait is taken up again when what
it waits for has a time. Each action is looked at once or twice, whatever the sizes. For ranks that share a machine
(`StageCosts.idle_lent`), these times are then read by another clock (`lent_clock`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from shardwright.core.errors import ScheduleError
from shardwright.core.events import NOTHING, Engine, Log, Resource
from shardwright.core.schedule.action_table import ActionTable, has_any
from shardwright.core.schedule.actions import TRANSFER, Action, B, F, I, Kind, W
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.idle_share import lent_clock
from shardwright.core.schedule.peak_memory import bytes_of
from shardwright.core.schedule.routes import Route, routes_of
from shardwright.core.schedule.timeline import Timeline, TransferLog, TransferRow

Mode = Literal["asynchronous", "blocking"]
_NEVER = float("inf")
_UNKNOWN = -1.0


def _seconds(costs: StageCosts, kind: Kind) -> tuple[float, ...]:
    by_kind = {F: costs.forward_s, I: costs.input_grad_s, W: costs.weight_grad_s, B: costs.backward_s}
    return by_kind[kind]


@dataclass(slots=True)
class _Posted:
    """Sends and receives of one link that wait for their match: (ready at, action, because of)."""

    sends: deque[tuple[float, Action, int]] = field(default_factory=deque)
    recvs: deque[tuple[float, Action, int]] = field(default_factory=deque)


class ScheduleRun:
    """One run of one schedule. Times are in seconds; nodes are numbered as `Timeline.cause` numbers them."""

    def __init__(self, schedule: ActionTable, costs: Sequence[StageCosts], transfers: Mode = "asynchronous") -> None:
        self.schedule, self.costs, self.by_slice = schedule, costs[0], costs
        self.explicit = has_any(schedule, TRANSFER)
        self.blocking = transfers == "blocking"
        if self.blocking and not self.explicit and schedule.ranks > 1:
            raise ScheduleError("blocking transfers need sends and receives in the schedule: use insert_transfers")
        stages, m, ranks = schedule.stages, schedule.passes, schedule.ranks
        self.passes, self.slices = m, schedule.slices
        self.stages, self.credits, self.sender_waits = stages, schedule.credits, self.costs.sender_waits
        self.engine, self.log = Engine(), Log.of_lists(len(order) for order in schedule.table)
        self.offset, self.start, self.end = self.log.offset, self.log.start_s, self.log.end_s
        self.cause, self.awaited = self.log.cause, self.engine.awaited
        self.devices = [Resource() for _ in range(ranks)]
        self.forward_route, self.backward_route = routes_of(schedule, costs)
        self.posted: dict[tuple[int, int], _Posted] = {}
        self.transfers: list[TransferRow] = []
        self.transfer_cause: list[int] = []
        self.position = [0] * ranks
        self.in_halves = all(one.whole_backward_s is None for one in costs)
        self.seconds = {kind: [_seconds(one, kind) for one in costs] for kind in (F, I, W, B)}
        # By stage * m + pass (of a microbatch, or of one of its slices): the time at which the input of its forward or
        # backward is there, what brought it, and whether its forward and its input gradient have run.
        self.forward_in, self.backward_in = [_UNKNOWN] * (stages * m), [_UNKNOWN] * (stages * m)
        self.forward_by, self.backward_by = [NOTHING] * (stages * m), [NOTHING] * (stages * m)
        self.forward_in[:m] = [0.0] * m
        self.forward_done, self.input_done = bytearray(stages * m), bytearray(stages * m)
        self.used: dict[tuple[bool, int], list[tuple[float, int]]] = {}
        self.made: dict[tuple[bool, int], int] = {}

    def run(self) -> list[tuple[int, int]]:
        """Advance every rank as far as it gets; returns (rank, position) of each that did not reach its end."""
        for rank in range(self.schedule.ranks):
            self.engine.ask(rank)
        self.engine.run(self)
        table = self.schedule.table
        return [(rank, at) for rank, at in enumerate(self.position) if at < len(table[rank])]

    def timeline(self) -> Timeline:
        times = self.log.by_lane(self.schedule.ranks)
        start, end, transfers = times.start_s, times.end_s, self.transfers
        if self.costs.idle_lent and self.offset[-1]:
            clock = lent_clock(start, end, self.costs.idle_lent)
            start, end = [clock(each) for each in start], [clock(each) for each in end]
            moved = clock(np.array([row[5:] for row in transfers], dtype=np.float64).reshape(-1, 2)).tolist()
            transfers = [(*row[:5], *each) for row, each in zip(transfers, moved, strict=True)]
        return Timeline(
            self.schedule.table,
            tuple(start),
            tuple(end),
            TransferLog(transfers, self.schedule.slices),
            self.costs.activation_bytes,
            tuple(times.cause),
            np.array(self.transfer_cause, dtype=np.int64),
            self.costs.freed_by_input_grad_bytes,
            tuple(map(bytes_of, self.by_slice)) if self.schedule.slices > 1 else (),
        )

    def advance(self, rank: int) -> None:
        """Run the actions of a rank until one of them waits for what has no time yet."""
        order, offset, last_stage = self.schedule.table[rank], self.offset[rank], self.stages - 1
        m, credits, slices = self.passes, self.credits, self.slices
        forward_in, backward_in, seconds_of = self.forward_in, self.backward_in, self.seconds
        in_halves, explicit, starts, ends, causes = self.in_halves, self.explicit, self.start, self.end, self.cause
        position, count, device = self.position[rank], len(order), self.devices[rank]
        while position < count:
            node = offset + position
            action = order[position]
            if explicit and action.kind in TRANSFER:
                if not self._post(rank, action, node):
                    return
                position += 1
                self.position[rank] = position
                continue
            clock = start = device.free_s
            by = node - 1 if position else NOTHING
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
                    self.engine.wait(at if kind is F else ~at, rank)
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
            ends[node] = device.free_s = end
            for part in parts:
                if part.kind is not W and part.kind in seconds_of:
                    self._hand_on(part, node, end)
            position += 1
            self.position[rank] = position

    def _edge(self, part: Action) -> tuple[bool, int] | None:
        """The boundary between ranks that a result crosses, as (whether forward, the stage it leaves), or None."""
        if part.kind is W:
            return None
        route = (self.forward_route if part.kind is F else self.backward_route)[part.stage]
        return None if route is None or route.is_local else (part.kind is F, part.stage)

    def _credit(self, rank: int, part: Action, credits: int) -> tuple[float, int] | None:
        """The time from which there is a buffer for what an action makes, and the node that freed it; None when that is
        not yet known."""
        edge = self._edge(part)
        owed = -1 if edge is None else self.made.get(edge, 0) - credits
        if edge is None or owed < 0:
            return 0.0, NOTHING
        used = self.used.get(edge, [])
        if owed < len(used):
            return used[owed]
        self.engine.wait(("credit", edge), rank)
        return None

    def _hand_on(self, part: Action, node: int, end: float) -> None:
        """Record what a forward or an input gradient has made: hand it to the next stage, and give back the credit of
        what it used."""
        stage, forward = part.stage, part.kind is F
        mb = (part.microbatch or 0) * self.slices + (part.slice or 0)
        if forward:
            self.forward_done[stage * self.passes + mb] = 1
            route = self.forward_route[stage]
        else:
            self.input_done[stage * self.passes + mb] = 1
            route = self.backward_route[stage]
        if self.credits is not None:
            source = (forward, stage - 1 if forward else stage + 1)
            self.used.setdefault(source, []).append((end, node))
            self.engine.announce(("credit", source))
            edge = self._edge(part)
            if edge is not None:
                self.made[edge] = self.made.get(edge, 0) + 1
        if route is None:
            return
        if route.source == route.target:
            self._arrive(forward, route.first + mb, end, node)
        elif not self.explicit:
            self._carry(route, forward, stage, mb, end, node)

    def _arrive(self, forward: bool, at: int, time: float, by: int) -> None:
        if forward:
            self.forward_in[at], self.forward_by[at] = time, by
        else:
            self.backward_in[at], self.backward_by[at] = time, by
            at = ~at
        if at in self.awaited:
            self.engine.announce(at)

    def _carry(self, route: Route, forward: bool, stage: int, mb: int, ready: float, node: int) -> float:
        """Put a tensor on its link, ready at a time; returns when it is across."""
        number = -2 - len(self.transfers)
        start, end, cause = route.link.take(ready, node, route.seconds[mb % self.slices], number)
        if self.sender_waits:
            self.devices[route.source].free_s = max(self.devices[route.source].free_s, end)
        self.transfers.append((forward, stage, mb, route.source, route.target, start, end))
        self.transfer_cause.append(cause)
        self._arrive(forward, route.first + mb, end, number)
        return end

    def _post(self, rank: int, action: Action, node: int) -> bool:
        """Post a send or a receive; returns whether the rank may go on."""
        sends = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        peer_stage = action.stage + (1 if forward == sends else -1)
        if not 0 <= peer_stage < self.stages:
            return False
        made = self.forward_done if forward else self.input_done
        if sends and not made[action.stage * self.passes + self.schedule.pass_of(action)]:
            return False
        peer = self.schedule.placement[peer_stage]
        source, target = (rank, peer) if sends else (peer, rank)
        posted = self.posted.setdefault((source, target), _Posted())
        cause, now = node - 1 if self.position[rank] else NOTHING, self.devices[rank].free_s
        # A blocking transfer holds both ranks, so it waits for what each of them did before.
        (posted.sends if sends else posted.recvs).append((now, action, cause if self.blocking else node))
        if not self.blocking:
            self.start[node] = self.end[node] = now
            self.cause[node] = cause
        moved = False
        while posted.sends and posted.recvs:
            (sent_s, send, send_by), (posted_s, recv, recv_by) = posted.sends[0], posted.recvs[0]
            carried = send.kind is Kind.SEND_FORWARD
            expected = send.stage + 1 if carried else send.stage - 1
            same_way = carried == (recv.kind is Kind.RECV_FORWARD)
            of_send, of_recv = self.schedule.pass_of(send), self.schedule.pass_of(recv)
            route = (self.forward_route if carried else self.backward_route)[send.stage]
            if route is None or recv.stage != expected or of_recv != of_send or not same_way:
                break  # The two ends disagree on the order: neither gets what it waits for.
            posted.sends.popleft()
            posted.recvs.popleft()
            ready, by = (sent_s, send_by) if sent_s >= posted_s else (posted_s, recv_by)
            end = self._carry(route, carried, send.stage, of_send, ready, by)
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
            self.devices[rank].free_s = end
        self.position[pair[1]] += 1
        self.engine.ask(pair[1])
