"""The times at which the actions of a step ran, measured without holding any of them up.

For every rank a thread waits for the rank's actions one after the other and notes when each was done. On a busy
machine the thread may come late to that. Then an action that read the results, or ran after, is seen to be done before,
and the earlier time counts. An action starts once it was handed out, its operands were there, and the one before it on
its rank was done.
"""

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import jax

from shardwright.backends.jax.program.cut import Cut
from shardwright.core.schedule.actions import Action, Kind
from shardwright.core.schedule.passes.slices_as_stages import StageNames
from shardwright.core.schedule.timeline import Span, Timeline

_Key = tuple[int, Kind, int | None]


def _key(action: Action) -> _Key:
    return action.stage, action.kind, action.microbatch


@dataclass(slots=True)
class _Done:
    """One action, with the times when it was handed out and when it was done, in seconds of the clock."""

    action: Action
    rank: int
    issued_s: float
    marker: Any
    ended_s: float = 0.0


@dataclass(slots=True)
class ActionTimer:
    """An observer of the actions of one step, which runs while it is entered. `timeline`, after that, waits for all."""

    cut: Cut
    names: StageNames
    ranks: int
    queues: list[queue.SimpleQueue[_Done | None]] = field(init=False)
    threads: list[threading.Thread] = field(init=False)
    seen: list[_Done] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queues = [queue.SimpleQueue() for _ in range(self.ranks)]
        self.threads = [threading.Thread(target=_wait, args=(q,), daemon=True) for q in self.queues]
        for thread in self.threads:
            thread.start()

    def __call__(self, action: Action, rank: int, marker: Any) -> None:
        done = _Done(action, rank, time.perf_counter(), marker)
        self.seen.append(done)
        self.queues[rank].put(done)

    def __enter__(self) -> "ActionTimer":
        return self

    def __exit__(self, *_: object) -> None:
        for waiting in self.queues:
            waiting.put(None)

    def timeline(self) -> Timeline:
        """The timeline of the step: when every action ran. Waits for all of them."""
        for thread in self.threads:
            thread.join()
        self._correct()
        ended = {_key(d.action): d.ended_s for d in self.seen}
        before = dict.fromkeys(range(self.ranks), 0.0)
        spans = []
        for done in self.seen:
            waited = (ended[key] for key in self._reads(done.action) if key in ended)
            start = min(done.ended_s, max(done.issued_s, before[done.rank], *waited))
            before[done.rank] = done.ended_s
            spans.append(Span(done.rank, self.names.action(done.action), start, done.ended_s))
        return Timeline.measured(spans, self.ranks)

    def _correct(self) -> None:
        """Move times earlier, so that no action is done after one that waited for it."""
        by_key = {_key(d.action): d for d in self.seen}
        after: dict[int, float] = {}
        for done in reversed(self.seen):
            done.ended_s = after[done.rank] = min(done.ended_s, after.get(done.rank, done.ended_s))
            for key in self._reads(done.action):
                if key in by_key:
                    by_key[key].ended_s = min(by_key[key].ended_s, done.ended_s)

    def _reads(self, action: Action) -> list[_Key]:
        stage, m = action.stage, action.microbatch
        part = self.cut.parts[stage]
        if action.kind is Kind.FORWARD:
            return [(a.source, Kind.FORWARD, m) for a in part.arrivals]
        if action.kind is Kind.WEIGHT_GRAD:
            return [(stage, Kind.INPUT_GRAD, m), (stage, Kind.FORWARD, m)]
        backward = [(user, kind, m) for user in self.cut.readers(stage) for kind in (Kind.BACKWARD, Kind.INPUT_GRAD)]
        return [(stage, Kind.FORWARD, m), *backward]


def _wait(waiting: "queue.SimpleQueue[_Done | None]") -> None:
    while (done := waiting.get()) is not None:
        jax.block_until_ready(done.marker)
        done.ended_s = time.perf_counter()
