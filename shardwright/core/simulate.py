"""The event engine: a schedule and its costs give a timeline.

Ranks and links are resources. A rank runs its actions in their order, each as soon as what it needs has arrived. Every
ordered pair of ranks has a link of its own (full duplex) that carries one tensor at a time, first in, first out, while
the ranks go on computing. What a link carries is made by one rank in the order of that rank's actions, so every time
follows from earlier ones: the engine advances each rank as far as it gets, and a rank that must wait is taken up again
when what it waits for has a time. Each action is looked at once or twice, whatever the sizes.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import TRANSFER, Action, B, F, I, Kind, W
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.schedule import Schedule
from shardwright.core.timeline import Timeline, Transfer

Mode = Literal["asynchronous", "blocking"]


def simulate(schedule: Schedule, costs: StageCosts | None = None) -> Timeline:
    """When each action of a schedule runs; see `simulate_schedule`."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"simulate takes a schedule, not a {type(schedule).__name__}")
    return simulate_schedule(schedule, costs)


def simulate_schedule(
    schedule: Schedule, costs: StageCosts | None = None, *, transfers: Mode = "asynchronous"
) -> Timeline:
    """When each action of a schedule runs.

    Args:
        schedule: compute actions only, or with sends and receives (then these are what moves tensors).
        costs: default: 1 s for every action and none for transfers.
        transfers: `asynchronous`: a link works beside the ranks; `blocking`: a send and its receive start together and
            hold both ranks until the tensor is across (the schedule must contain them: `insert_transfers`).

    Raises:
        ScheduleError: the costs are of another number of stages, or the schedule does not run to its end; the message
            prints the grid with the action where it stops.
    """
    costs = costs or StageCosts.uniform(schedule.stages)
    costs.require_stages(schedule.stages)
    engine = Engine(schedule, costs, transfers)
    stuck = engine.run()
    if stuck:
        from shardwright.core.schedule.checks import explain_stop

        raise ScheduleError(explain_stop(schedule, stuck))
    return engine.timeline()


@dataclass(slots=True)
class _Link:
    """Tensors from one rank to another. `sends` and `recvs` wait for their match (tables with transfers only)."""

    free_s: float = 0.0
    last: int = -1
    sends: deque[tuple[float, Action, int]] = field(default_factory=deque)
    recvs: deque[tuple[float, Action, int]] = field(default_factory=deque)


class Engine:
    """One run of one schedule. Times in seconds; nodes are numbered as `Timeline.cause` numbers them."""

    def __init__(self, schedule: Schedule, costs: StageCosts, transfers: Mode) -> None:
        self.schedule, self.costs = schedule, costs
        self.explicit = any(action.kind in TRANSFER for order in schedule.table for action in order)
        self.blocking = transfers == "blocking"
        if self.blocking and not self.explicit and schedule.ranks > 1:
            raise ScheduleError("blocking transfers need sends and receives in the schedule: call insert_transfers")
        stages, m, ranks = schedule.stages, schedule.microbatches, schedule.ranks
        self.offset = [0]
        for order in schedule.table:
            self.offset.append(self.offset[-1] + len(order))
        self.start = [0.0] * self.offset[-1]
        self.end = [0.0] * self.offset[-1]
        self.cause = [-1] * self.offset[-1]
        self.clock = [0.0] * ranks
        self.position = [0] * ranks
        # When the input of a forward or of a backward is on its stage, and what brought it; -1.0: not yet known.
        self.input_s = {F: [-1.0] * (stages * m), B: [-1.0] * (stages * m)}
        self.input_from = {F: [-1] * (stages * m), B: [-1] * (stages * m)}
        self.input_s[F][:m] = [0.0] * m
        self.done: set[tuple[int, str, int]] = set()
        self.links: dict[tuple[int, int], _Link] = {}
        self.transfers: list[Transfer] = []
        self.transfer_cause: list[int] = []
        self.waiting: dict[object, list[int]] = {}
        self.ready: deque[int] = deque(range(ranks))
        self.used: dict[tuple[Kind, int], list[tuple[float, int]]] = {}
        self.made: dict[tuple[Kind, int], int] = {}

    def run(self) -> list[tuple[int, int]]:
        """Advance every rank as far as it gets; returns (rank, position) of each that did not reach its end."""
        while self.ready:
            self._advance(self.ready.popleft())
        table = self.schedule.table
        return [(rank, at) for rank, at in enumerate(self.position) if at < len(table[rank])]

    def timeline(self) -> Timeline:
        rows = [slice(a, b) for a, b in zip(self.offset, self.offset[1:], strict=False)]
        return Timeline(
            self.schedule.table,
            tuple(np.array(self.start[row], dtype=np.float64) for row in rows),
            tuple(np.array(self.end[row], dtype=np.float64) for row in rows),
            tuple(self.transfers),
            self.costs.activation_bytes,
            tuple(np.array(self.cause[row], dtype=np.int64) for row in rows),
            np.array(self.transfer_cause, dtype=np.int64),
        )

    def _advance(self, rank: int) -> None:
        order = self.schedule.table[rank]
        while self.position[rank] < len(order):
            action = order[self.position[rank]]
            node = self.offset[rank] + self.position[rank]
            if action.kind in TRANSFER:
                if not self._post(rank, action, node):
                    return
            elif action.kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD):
                self._place(rank, node, self.clock[rank], 0.0, -1)
            else:
                wait = self._compute(rank, action, node)
                if wait is not None:
                    self.waiting.setdefault(wait, []).append(rank)
                    return
            self.position[rank] += 1

    def _place(self, rank: int, node: int, start: float, seconds: float, cause: int) -> None:
        """Put an action on the timeline; with no other cause, it waited for the one before it on its rank."""
        self.start[node], self.end[node] = start, start + seconds
        self.cause[node] = cause if cause != -1 else (node - 1 if self.position[rank] else -1)
        self.clock[rank] = start + seconds

    def _compute(self, rank: int, action: Action, node: int) -> object | None:
        """Run one compute action; returns what it must wait for, or None when it ran."""
        m, stages = self.schedule.microbatches, self.schedule.stages
        start, cause = self.clock[rank], -1
        parts = action.parts or (action,)
        for part in parts:
            stage, kind, mb = part.stage, part.kind, part.microbatch or 0
            if kind is W:
                if (stage, "I", mb) not in self.done:
                    return ("never", node)
                continue
            if kind is not F:
                if (stage, "F", mb) not in self.done:
                    return ("never", node)
                if stage == stages - 1:
                    continue
            need = F if kind is F else B
            arrival = self.input_s[need][stage * m + mb]
            if arrival < 0:
                return (need, stage, mb)
            if arrival > start:
                start, cause = arrival, self.input_from[need][stage * m + mb]
            if self.schedule.credits is not None:
                edge = self._edge(part)
                if edge is not None:
                    owed = self.made.get(edge, 0) - self.schedule.credits
                    if owed >= 0:
                        used = self.used.get(edge, [])
                        if owed >= len(used):
                            return ("credit", edge)
                        if used[owed][0] > start:
                            start, cause = used[owed]
        self._place(rank, node, start, self._seconds(parts), cause)
        for part in parts:
            self._finish(rank, part, node)
        return None

    def _seconds(self, parts: tuple[Action, ...]) -> float:
        costs = self.costs
        seconds = []
        for part in parts:
            stage = part.stage
            if part.kind is F:
                seconds.append(costs.forward_s[stage])
            elif part.kind is I:
                seconds.append(costs.input_grad_s[stage])
            elif part.kind is W:
                seconds.append(costs.weight_grad_s[stage])
            else:
                seconds.append(costs.input_grad_s[stage] + costs.weight_grad_s[stage])
        return sum(seconds) - (costs.overlap * min(seconds) if len(seconds) > 1 else 0.0)

    def _edge(self, part: Action) -> tuple[Kind, int] | None:
        """The boundary between ranks that takes what this action makes: its direction and the stage it leaves."""
        to = part.stage + 1 if part.kind is F else part.stage - 1
        if part.kind is W or not 0 <= to < self.schedule.stages:
            return None
        placement = self.schedule.placement
        return (F if part.kind is F else B, part.stage) if placement[to] != placement[part.stage] else None

    def _finish(self, rank: int, part: Action, node: int) -> None:
        """Record what an action has made: hand it to the next stage, and give back the credit of what it used."""
        stage, kind, mb = part.stage, part.kind, part.microbatch or 0
        self.done.add((stage, "I" if kind is B else kind.value, mb))
        if kind is W:
            return
        direction = F if kind is F else B
        end = self.end[node]
        if self.schedule.credits is not None:
            source = (direction, stage - 1 if kind is F else stage + 1)
            self.used.setdefault(source, []).append((end, node))
            self._wake(("credit", source))
            edge = self._edge(part)
            if edge is not None:
                self.made[edge] = self.made.get(edge, 0) + 1
        to = stage + 1 if kind is F else stage - 1
        if not 0 <= to < self.schedule.stages:
            return
        target = self.schedule.placement[to]
        if target == rank:
            self._arrive(direction, to, mb, end, node)
        elif not self.explicit:
            self._carry(rank, target, direction, stage, mb, end, node)

    def _arrive(self, direction: Kind, stage: int, mb: int, time: float, cause: int) -> None:
        at = stage * self.schedule.microbatches + mb
        self.input_s[direction][at], self.input_from[direction][at] = time, cause
        self._wake((direction, stage, mb))

    def _wake(self, event: object) -> None:
        waiting = self.waiting.pop(event, None)
        if waiting:
            self.ready.extend(waiting)

    def _carry(self, source: int, target: int, direction: Kind, stage: int, mb: int, ready: float, node: int) -> float:
        """Put a tensor on its link, ready at a time; returns when it is across."""
        link = self.links.setdefault((source, target), _Link())
        forward = direction is F
        start, cause = (ready, node) if ready >= link.free_s else (link.free_s, link.last)
        end = start + self.costs.transfer_s[stage if forward else stage - 1]
        link.free_s, link.last = end, -2 - len(self.transfers)
        send = Action(stage, Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD, mb)
        self.transfers.append(Transfer(send, source, target, start, end))
        self.transfer_cause.append(cause)
        self._arrive(direction, stage + 1 if forward else stage - 1, mb, end, link.last)
        return end

    def _post(self, rank: int, action: Action, node: int) -> bool:
        """Post a send or a receive; returns whether the rank may go on."""
        sends = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        peer_stage = action.stage + (1 if forward == sends else -1)
        mb = action.microbatch or 0
        if not 0 <= peer_stage < self.schedule.stages:
            self.waiting.setdefault(("never", node), []).append(rank)
            return False
        made = (action.stage if sends else peer_stage, "F" if forward else "I", mb)
        if sends and made not in self.done:
            self.waiting.setdefault(("never", node), []).append(rank)
            return False
        peer = self.schedule.placement[peer_stage]
        source, target = (rank, peer) if sends else (peer, rank)
        link = self.links.setdefault((source, target), _Link())
        cause = node - 1 if self.position[rank] else -1
        # A blocking transfer holds both ranks, so it waits for what each of them did before.
        (link.sends if sends else link.recvs).append((self.clock[rank], action, cause if self.blocking else node))
        if not self.blocking:
            self._place(rank, node, self.clock[rank], 0.0, cause)
        moved = False
        while link.sends and link.recvs:
            (sent_s, send, send_by), (posted_s, recv, recv_by) = link.sends[0], link.recvs[0]
            expected = send.stage + 1 if send.kind is Kind.SEND_FORWARD else send.stage - 1
            same_way = (send.kind is Kind.SEND_FORWARD) == (recv.kind is Kind.RECV_FORWARD)
            if recv.stage != expected or recv.microbatch != send.microbatch or not same_way:
                break  # The two ends disagree on the order: neither gets what it waits for.
            link.sends.popleft()
            link.recvs.popleft()
            ready, by = (sent_s, send_by) if sent_s >= posted_s else (posted_s, recv_by)
            direction = F if send.kind is Kind.SEND_FORWARD else B
            end = self._carry(source, target, direction, send.stage, send.microbatch or 0, ready, by)
            moved = True
            if self.blocking:
                self._hold((rank, peer), ready, end)
        return moved or not self.blocking

    def _hold(self, pair: tuple[int, int], start: float, end: float) -> None:
        """Both ranks are held by a blocking transfer; the second, which waited for the first, goes on."""
        for rank in pair:
            node = self.offset[rank] + self.position[rank]
            self.start[node], self.end[node] = start, end
            self.cause[node] = -1 - len(self.transfers)
            self.clock[rank] = end
        self.position[pair[1]] += 1
        self.ready.append(pair[1])
