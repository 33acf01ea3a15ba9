"""Measured timelines: the times of each action of a step on each pipeline rank, on one clock."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.core.schedule.actions import Action
from shardwright.core.schedule.timeline import Span, Timeline

ROUNDS = 16
"""The number of round trips to a peer to compare clocks; the shortest counts."""


class Recorder:
    """A recorder of the times when the actions of one step start, their inputs being there, and when they end.

    On a CUDA device these are times of the device: events on its stream, which cost nothing until they are read.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._actions: list[Action] = []
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        if self._cuda:
            torch.cuda.synchronize(device)
            self._zero_s = time.perf_counter()
            self._event()

    def start(self, action: Action) -> None:
        self._actions.append(action)
        self._mark()

    def end(self) -> None:
        self._mark()

    def _mark(self) -> None:
        if self._cuda:
            self._event()
        else:
            self._marks.append(time.perf_counter())

    def _event(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def times(self) -> tuple[list[Action], list[float]]:
        """The actions, and the start and end of each in turn, in seconds of this process's clock."""
        if self._cuda:
            self._events[-1].synchronize()
            first = self._events[0]
            self._marks = [self._zero_s + first.elapsed_time(event) / 1e3 for event in self._events[1:]]
        return self._actions, self._marks


def clock_offset_s(bound: BoundMesh, watchdog: Watchdog) -> tuple[float, float]:
    """The offset to add to this process's clock for that of the peer at pp coordinate 0, and the largest error of the
    offset, in seconds. All pp peers call this.

    Each asks the first in turn; half of the shortest round trip is taken for the way there (Cristian, Distributed
    Computing 3, 1989).
    """
    me, size = bound.coordinate("pp"), bound.size("pp")
    first = bound.peer("pp", 0)
    offset, error = 0.0, 0.0
    device = bound.device
    watchdog.doing("comparing clocks")
    with watchdog.waiting("pp peers, to compare clocks"):
        for other in range(1, size):
            if me == 0:
                peer = bound.peer("pp", other)
                said = torch.zeros(1, dtype=torch.float64, device=device)
                for _ in range(ROUNDS):
                    dist.recv(said, peer)
                    dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64, device=device), peer)
            elif me == other:
                answer = torch.zeros(1, dtype=torch.float64, device=device)
                shortest = float("inf")
                for _ in range(ROUNDS):
                    begun = time.perf_counter()
                    dist.send(answer, first)
                    dist.recv(answer, first)
                    there = float(answer)
                    ended = time.perf_counter()
                    if ended - begun < shortest:
                        shortest, offset = ended - begun, there - (begun + ended) / 2
                error = shortest / 2
    watchdog.doing("between steps")
    return offset, error


def gather(recorders: Sequence[Recorder], ranks: int, bound: BoundMesh, watchdog: Watchdog) -> tuple[Timeline, ...]:
    """One timeline for each recorded step, the same on all pp peers, which call this together."""
    offset, _ = clock_offset_s(bound, watchdog)
    own = []
    for recorder in recorders:
        actions, marks = recorder.times()
        own.append(([action.text for action in actions], [mark + offset for mark in marks]))
    every: list[list[tuple[list[str], list[float]]]] = [own]
    if ranks > 1:
        every = [[] for _ in range(ranks)]
        with watchdog.waiting(f"pp peers, ranks {list(bound.groups['pp'])}, to gather timelines"):
            dist.all_gather_object(every, own, group=bound.handles["pp"])
    found = []
    for number in range(len(recorders)):
        spans = []
        for rank, rows in enumerate(every):
            texts, marks = rows[number]
            spans += [Span(rank, Action.parse(text), marks[2 * i], marks[2 * i + 1]) for i, text in enumerate(texts)]
        found.append(Timeline.measured(spans, ranks))
    return tuple(found)
