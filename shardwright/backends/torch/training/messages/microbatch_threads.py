"""Fibers: one thread of control for each microbatch on each rank, of which one runs at a time.

A microbatch is a single program, whose calls pass from rank to rank; on each rank the part of it that is under way
there is a stack on one thread. A fiber that waits for a message lets another one run. The schedule chooses it: among
the fibers that have a message, a backward comes before a forward (or the other way round), then the earliest microbatch
comes first. Autograd runs a backward pass on the thread that asks for it, so that it may wait inside, too.
"""

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from shardwright.backends.torch.training.messages.transport import Envelope, Kind

JOIN_S = 5.0
"""The time in seconds that `Threads.close` waits for a thread that does not end."""


class StoppedError(BaseException):
    """An exception that unwinds a fiber whose step has failed. It is no Exception, so that a model's own handlers do
    not catch it."""


class Fiber:
    """The state that one rank keeps of one microbatch."""

    def __init__(self, microbatch: int) -> None:
        self.microbatch = microbatch
        self.inbox: deque[Envelope] = deque()
        self.turn = threading.Semaphore(0)
        self.waiting = False
        self.waits_for: tuple[str, int, float] | None = None
        """The thing that this fiber waits for, the peer's pp coordinate, and the time when the wait began."""
        self.backward_depth = 0
        self.calls_made = 0
        self.served: dict[tuple[int, int], Any] = {}
        """The outputs and gradients that the backward pass of a call served here needs, by (caller, call)."""
        self.fetched: dict[tuple[str, bool], torch.Tensor] = {}
        self.batch: dict[int, torch.Tensor] = {}
        self.frames: list[list[Any]] = []
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.losses: list[tuple[torch.Tensor, torch.Tensor | float | None]] = []
        self.reductions: list[str | None] = []
        """The reduction that the body states for each loss; None where it states none."""


class Turns:
    """The turns of this rank's fibers: one fiber runs at a time."""

    def __init__(self, backward_first: bool) -> None:
        self.backward_first = backward_first
        self.failed = False
        self._lock = threading.Lock()
        self._running: Fiber | None = None
        self._ready: list[Fiber] = []
        self._alive: set[Fiber] = set()
        self._progress = 0
        self._changed = threading.Condition(self._lock)

    def begin(self) -> None:
        """Begin a step."""
        self.failed = False
        self._running, self._ready, self._alive = None, [], set()

    def add(self, fiber: Fiber, work: Callable[[Fiber], None], threads: "Threads") -> None:
        """Add a fiber that is ready to run ``work``."""
        with self._lock:
            self._alive.add(fiber)
            self._ready.append(fiber)
        threads.run(lambda: self._live(fiber, work), lambda: self._leave(fiber))
        with self._lock:
            self._next()

    def deliver(self, fiber: Fiber, envelope: Envelope) -> None:
        """Give a fiber a message."""
        with self._lock:
            self._progress += 1
            fiber.inbox.append(envelope)
            if fiber.waiting:
                fiber.waiting = False
                self._ready.append(fiber)
                self._next()

    def take(self, fiber: Fiber) -> Envelope:
        """The next message of the running fiber; others run while it waits."""
        with self._lock:
            if fiber.inbox:
                self._ready.append(fiber)
            else:
                fiber.waiting = True
            self._running = None
            self._next()
        self._resume(fiber)
        return fiber.inbox.popleft()

    def rest(self, fiber: Fiber) -> None:
        """Let fibers that come first run before this one goes on."""
        with self._lock:
            self._ready.append(fiber)
            self._running = None
            self._next()
        self._resume(fiber)

    def fail(self) -> None:
        """End every fiber at its next wait."""
        with self._lock:
            self.failed = True
            for fiber in self._alive:
                fiber.turn.release()
            self._changed.notify_all()

    def ended(self, timeout_s: float) -> bool:
        """Wait until no fiber is left. False when one is left after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._alive, timeout_s)

    def progress(self) -> int | None:
        """A number that grows as messages come; None while a fiber of this rank runs."""
        with self._lock:
            return None if self._running is not None or self._ready else self._progress

    def waits(self) -> list[tuple[int, str, int, float]]:
        """The (microbatch, what, peer, seconds) of every fiber that waits for an answer. No lock is taken, since this
        reports on trouble."""
        now = time.monotonic()
        found = [(s.microbatch, s.waits_for) for s in sorted(self._alive, key=_number)]
        return [(m, waits[0], waits[1], now - waits[2]) for m, waits in found if waits is not None]

    def _resume(self, fiber: Fiber) -> None:
        if not self.failed:
            fiber.turn.acquire()
        if self.failed:
            raise StoppedError

    def _next(self) -> None:
        if self._running is None and self._ready and not self.failed:
            best = min(self._ready, key=self._rank)
            self._ready.remove(best)
            self._running = best
            best.turn.release()

    def _rank(self, fiber: Fiber) -> tuple[bool, int]:
        backward = fiber.backward_depth > 0 or (bool(fiber.inbox) and fiber.inbox[0].kind is Kind.GRADIENT)
        return backward != self.backward_first, fiber.microbatch

    def _live(self, fiber: Fiber, work: Callable[[Fiber], None]) -> None:
        try:
            self._resume(fiber)
            _current.fiber = fiber
            work(fiber)
        except StoppedError:
            pass
        finally:
            _current.fiber = None

    def _leave(self, fiber: Fiber) -> None:
        with self._changed:
            self._alive.discard(fiber)
            if self._running is fiber:
                self._running = None
                self._next()
            self._changed.notify_all()


def _number(fiber: Fiber) -> int:
    return fiber.microbatch


class _Current(threading.local):
    fiber: Fiber | None = None


_current = _Current()


def current_fiber() -> Fiber | None:
    """The fiber that runs on this thread."""
    return _current.fiber


class Threads:
    """Threads that are kept from step to step, as many as ran at once."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        self._all: list[_Thread] = []
        self._lock = threading.Lock()

    def run(self, work: Callable[[], None], finish: Callable[[], None]) -> None:
        """Run ``work``, and ``finish`` once the thread counts as idle again."""
        with self._lock:
            thread = self._idle.pop() if self._idle else None
        if thread is None:
            thread = _Thread(self._rest)
            self._all.append(thread)
        thread.give((work, finish))

    def close(self) -> None:
        """End all threads; a thread that still runs something ends after it."""
        for thread in self._all:
            thread.give(None)
        for thread in self._all:
            thread.join()
        self._all.clear()
        self._idle.clear()

    def _rest(self, thread: "_Thread") -> None:
        with self._lock:
            self._idle.append(thread)


_Work = tuple[Callable[[], None], Callable[[], None]]


class _Thread:
    def __init__(self, rest: Callable[["_Thread"], None]) -> None:
        self._given: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._rest = rest
        self._thread = threading.Thread(target=self._loop, name="shardwright-fiber", daemon=True)
        self._thread.start()

    def give(self, work: _Work | None) -> None:
        self._given.put(work)

    def join(self) -> None:
        self._thread.join(JOIN_S)

    def _loop(self) -> None:
        while (given := self._given.get()) is not None:
            work, finish = given
            work()
            self._rest(self)
            finish()
            del given, work, finish
