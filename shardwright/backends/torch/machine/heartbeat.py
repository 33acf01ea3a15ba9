"""Signs of life between the ranks of a run, and the word that one of them has failed.

Each rank writes every second, to the store that all share, that it lives and what it does. A rank that waits for long
reads what the others wrote: a rank that computes, compiles or saves is waited for, a rank that has been silent for
``timeout_s`` is not. A failure on one rank is written down there too, so that all end soon and say why.

Two threads do this, of which one may be stuck in the store when its host is stopped. They wake a rank that is blocked
in a collective by breaking its connections: a receive that runs out of time closes all those of its group in Gloo.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwright.backends.torch.compat import Store
from shardwright.backends.torch.machine.host_processes import birth_of, host_name, is_at_work, state_of
from shardwright.backends.torch.machine.watchdog import Fault, Watchdog, report

BEAT_S = 1.0
STILL_S = 2.0
"""The time in seconds that a rank does one thing before it looks at what the others do."""
GRACE_S = 2.0
"""The time in seconds that a wait goes on after the reason for its end is known: the failed call may report it
itself."""
LAST_S = 20.0
"""The time in seconds after that when a process that cannot be woken ends."""
LEAVE_S = 5.0
"""The time in seconds that a wait for a rank that has left goes on: its last messages may be on their way."""
INQUEST_S = 4.5
"""The time in seconds of the search for the cause of a broken connection: a rank that died misses beats meanwhile."""
LATE_BEATS = 4
"""The number of beats after which the knowledge about the others is old."""
LOOK_S = 0.02
"""The interval in seconds at which an answer in the store is looked for."""
IDLE_SHARE = 0.02
"""The share of a core that a rank uses which only waits, beside what the threads here need."""
_LOG, _COUNT, _HEARD = "faults", "fault count", "heard"


@dataclass(frozen=True, slots=True)
class Beat:
    """The state of a rank, as it tells the others."""

    number: int
    moves: int
    """A number that changes with whatever the rank does, and while bytes flow."""
    waits: bool
    said: str
    host: str
    process: int
    born: str
    """The time when the process started: the number of a process may come again."""


@dataclass(slots=True)
class _Peer:
    beat: Beat
    heard: float
    """The time when the rank was last known to live, by this rank's clock."""
    told: float
    """The time when its last new beat came."""
    moved: float
    """The time when it last did something, or began to wait."""


@dataclass
class Pulse:
    """One rank's part of the heartbeat.

    Args:
        store: the store that all ranks share; this rank talks to it over a connection of its own.
        host: the host of the store, as messages name it, and ``host_rank`` its rank, if it is one.
        groups: the process groups on which this rank may be blocked; more may be added.
    """

    store: Store
    rank: int
    size: int
    watchdog: Watchdog
    host: str
    host_rank: int | None
    groups: list[ProcessGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        store: Any = self.store  # whose annotation leaves that out
        self._own: Any = store.clone()
        self._own.set_timeout(timedelta(days=1))  # whose host is stopped is for the other thread to say
        self._host, self._born = host_name(), birth_of(os.getpid())
        self._peers: dict[int, _Peer] = {}
        self._faults: list[Fault] = []
        self._untold: deque[Fault] = deque()
        self._left: dict[int, float] = {}
        self._known = 0
        self._beats = 0
        self._moves = 0
        self._cpu = (time.monotonic(), time.process_time())
        self._asked_since: float | None = None
        """The time when the request to the store that is under way began."""
        self._is_store_lost = False
        """Whether the store has closed the connection."""
        self._looked = -math.inf
        """The time when the others were last looked at."""
        self._curious = False
        """Whether the others are looked at in every beat."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        """A lock that is held while this rank talks to the store."""
        self._wake, self._stop = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._beat_on, name="shardwright-pulse", daemon=True),
            threading.Thread(target=self._judge_on, name="shardwright-judge", daemon=True),
        ]

    def start(self) -> None:
        """Begin to write and to read beats. Every rank calls this at the start of a run."""
        self._beat()
        for thread in self._threads:
            thread.start()

    def stop(self, farewell: Fault | None) -> None:
        """Tell the others that this rank leaves, or why it ends. The store's host waits a little for the others."""
        if self._stop.is_set() or os.getpid() != self._process:  # a fork ends without a word
            return
        if farewell is not None:
            self.tell(farewell)
        if self.host_rank == self.rank and farewell is not None:
            begun = time.monotonic()
            patience_s = LEAVE_S if farewell.kind == "left" else 2 * BEAT_S
            while time.monotonic() - begun < patience_s and not self._is_store_lost and not self._may_go(farewell):
                self._wake.set()
                time.sleep(LOOK_S)
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(BEAT_S)
        self.groups.clear()

    def _may_go(self, farewell: Fault) -> bool:
        """Whether the others need the store no more: they have left, or have heard every fault."""
        if farewell.kind == "left" and not self._faults:
            return len(self._left) == self.size
        try:
            with self._talking():
                return bool(self._own.add(_HEARD, 0) >= self.size * self._own.add(_COUNT, 0))
        except RuntimeError:
            return True

    # What is told ------------------------------------------------------------------------------------------------

    def tell(self, fault: Fault) -> None:
        """Write a fault down for the others, and wait a little until it is there. Nothing happens when the store is
        gone. No thread is started for it: there may be no memory for one."""
        self._untold.append(fault)
        begun = time.monotonic()
        while fault in self._untold and time.monotonic() - begun < 2 * BEAT_S and not self._is_store_lost:
            self._wake.set()
            if threading.current_thread() is self._threads[0]:
                break
            time.sleep(LOOK_S)

    def look_now(self, seconds: float) -> None:
        """Wait until the store has been asked once more, but no longer than ``seconds``."""
        before = self._beats
        begun = time.monotonic()
        self._wake.set()
        while self._beats <= before and time.monotonic() - begun < seconds and not self._is_store_lost:
            time.sleep(LOOK_S)

    # The thread that talks to the store --------------------------------------------------------------------------

    def _beat_on(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(BEAT_S)
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self._beat()
            except Exception:  # whatever the store throws when its host has ended
                self._is_store_lost = True
                return

    def _beat(self) -> None:
        with self._talking():
            self._own.set(f"beat {self.rank}", json.dumps(asdict(self._mine())))
            while self._untold:
                self._own.append(_LOG, json.dumps(asdict(self._untold[0])) + "\n")
                self._own.add(_COUNT, 1)
                self._untold.popleft()
            if self._own.add(_COUNT, 0) > self._known:
                self._read_faults()
            others = self.size - 1
            unseen = len(self._peers) + len(self._left) < others
            now_and_then = self._beats % (1 + others // 64) == 0  # what all ask for is asked for less often
            if self._curious or (now_and_then and (unseen or self.watchdog.still_s() > STILL_S)):
                self._read_peers()
            self._beats += 1

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        with self._lock:
            self._asked_since = time.monotonic()
            try:
                yield
            finally:
                self._asked_since = None

    def _mine(self) -> Beat:
        now, used = time.monotonic(), time.process_time()
        before, used_before = self._cpu
        if used - used_before > IDLE_SHARE * (now - before):
            self._moves += 1  # bytes flow, or it computes
        self._cpu = now, used
        watchdog = self.watchdog
        return Beat(
            self._beats, self._moves + watchdog.moves, watchdog.is_waiting, watchdog.describe(), self._host,
            os.getpid(), self._born,
        )  # fmt: skip

    def _read_faults(self) -> None:
        found = [Fault(**json.loads(line)) for line in self._own.get(_LOG).decode().splitlines()]
        for fault in found[self._known :]:
            if fault.kind == "left":
                self._left[fault.rank] = time.monotonic()
            elif fault.rank != self.rank:
                self._faults.append(fault)
        self._own.add(_HEARD, len(found) - self._known)
        self._known = len(found)

    def _read_peers(self) -> None:
        others = [r for r in range(self.size) if r != self.rank and r not in self._left]
        known = [r for r in others if r in self._peers or self._own.check([f"beat {r}"])]
        if not known:
            return
        now = time.monotonic()
        if not self._is_looking():
            for peer in self._peers.values():  # nobody looked meanwhile
                peer.heard = peer.moved = now
        self._looked = now
        for rank, text in zip(known, self._own.multi_get([f"beat {r}" for r in known]), strict=True):
            beat = Beat(**json.loads(text))
            before = self._peers.get(rank)
            if before is None:
                self._peers[rank] = _Peer(beat, now, now, now)
                continue
            if beat.number != before.beat.number:
                before.heard = before.told = now
            if beat.moves != before.beat.moves or not beat.waits:
                before.moved = now
            before.beat = beat

    def _is_looking(self) -> bool:
        """Whether the knowledge about the others is new."""
        return time.monotonic() - self._looked < LATE_BEATS * BEAT_S * (1 + self.size // 64)

    # The thread that judges --------------------------------------------------------------------------------------

    def _judge_on(self) -> None:
        known: float | None = None
        place = -1
        while not self._stop.wait(BEAT_S / 2):
            watchdog = self.watchdog
            if watchdog.moves != place:
                place, known = watchdog.moves, None
            fault = self.fault()
            if fault is None:
                continue
            watchdog.hear(fault)
            if not watchdog.is_waiting and not watchdog.is_on_accelerator:
                continue
            known = known or time.monotonic()
            if time.monotonic() - known > GRACE_S:
                self._break()
            if time.monotonic() - known > GRACE_S + LAST_S:
                report(f"{watchdog.describe()}; {fault.text}. The process could not be woken, and ends")
                os._exit(1)

    def fault(self) -> Fault | None:
        """The reason why the step of this rank cannot go on, as far as it is known now; None where none is known."""
        if (told := self.told()) is not None:
            return told
        watchdog, now = self.watchdog, time.monotonic()
        if not watchdog.is_waiting and not watchdog.is_on_accelerator:
            return None
        still_s, limit_s = watchdog.still_s(), watchdog.timeout_s
        if still_s < STILL_S:
            return None
        asked = self._asked_since
        if self._is_store_lost:
            said = f"{self.host}, which holds the store of the run, is gone"
            return self._lost(said) if still_s > LEAVE_S else None
        if asked is not None and now - asked > limit_s:
            said = f"{self.host}, which holds the store of the run, has given no sign of life for {now - asked:.0f} s"
            return self._lost(said)
        waited_for = watchdog.waits_for(self.size)
        left = [r for r, when in self._left.items() if r in waited_for and now - when > LEAVE_S]
        if left and still_s > LEAVE_S:
            return self._lost(f"{_ranks(left)} left the run: the script ended there, or called sw.shutdown()")
        if not self._is_looking():
            return None
        silent = self.silent(limit_s)
        if silent:
            return self._lost(self._of_silent(silent))
        return self._stuck(limit_s)

    def told(self) -> Fault | None:
        """The first fault that is known; nothing is looked for."""
        return next(iter(self._faults), None)

    def _lost(self, text: str) -> Fault:
        fault = Fault(self.rank, "lost", text)
        self._faults.append(fault)
        self.tell(fault)
        return fault

    def silent(self, seconds: float) -> list[int]:
        """The ranks that have given no sign of life for ``seconds``, and whose process is not known to be at work."""
        now = time.monotonic()
        found = []
        for rank, peer in tuple(self._peers.items()):
            if rank in self._left or now - peer.heard < seconds:
                continue
            if peer.beat.host == self._host and is_at_work(peer.beat.process, peer.beat.born):
                peer.heard = now  # it holds the interpreter, and cannot tell
                continue
            found.append(rank)
        return sorted(found)

    def dead(self) -> list[int]:
        """The ranks on this host whose process has ended."""
        return sorted(
            rank
            for rank, peer in tuple(self._peers.items())
            if peer.beat.host == self._host and state_of(peer.beat.process, peer.beat.born) in ("", "Z", "X")
        )

    def _of_silent(self, ranks: Iterable[int]) -> str:
        now = time.monotonic()
        said = [
            f"rank {rank} has given no sign of life for {now - self._peers[rank].heard:.0f} s; the last was "
            f"'{self._peers[rank].beat.said}'"
            for rank in ranks
        ]
        return "; ".join(said)

    def _stuck(self, limit_s: float) -> Fault | None:
        """The fault that every rank waits while no bytes flow; None where that is not so."""
        now = time.monotonic()
        others = [self._peers.get(r) for r in range(self.size) if r != self.rank and r not in self._left]
        if self.watchdog.still_s() < limit_s or not self.watchdog.is_waiting:
            return None
        fresh_s = LATE_BEATS * BEAT_S  # what a rank said before it fell silent is no evidence
        if any(
            peer is None or not peer.beat.waits or peer.told - peer.moved < limit_s or now - peer.told > fresh_s
            for peer in others
        ):
            return None
        said = "; ".join(peer.beat.said for peer in others if peer is not None)
        return self._lost(
            f"all ranks wait for each other, and nothing moved for {limit_s:g} s ({said}): all ranks call the same "
            f"steps and functions, in the same order"
        )

    def inquest(self) -> Fault | None:
        """The cause of a broken connection of this rank: a fault that another one told, or the death of one; None where
        none is found."""
        begun = time.monotonic()
        before: dict[int, int] = {}
        self._curious = True
        while time.monotonic() - begun < INQUEST_S:
            if (told := self.told()) is not None:
                return told
            looked_for_s = time.monotonic() - begun
            # What a rank told before it ended is in the store by then.
            dead = [r for r in self.dead() if r not in self._left] if looked_for_s > BEAT_S / 2 else []
            if dead:
                said = "; ".join(f"the last of rank {r} was '{self._peers[r].beat.said}'" for r in dead)
                return self._lost(f"{_ranks(dead)} ended without a word, killed or out of memory; {said}")
            if self._is_store_lost and looked_for_s > BEAT_S:
                return self._lost(f"{self.host}, which holds the store of the run, is gone too")
            for rank, peer in tuple(self._peers.items()):
                before.setdefault(rank, peer.beat.number)
            self._wake.set()
            time.sleep(5 * LOOK_S)
        silent = [r for r, n in before.items() if self._peers[r].beat.number == n and r not in self._left]
        if silent:
            return self._lost(f"{self._of_silent(silent)}: killed, stopped, or its host is gone")
        if self._left:
            return self._lost(f"{_ranks(self._left)} left the run: the script ended there")
        return None

    def _break(self) -> None:
        """Wake the main thread from whatever collective it is blocked in."""
        for group in self.groups:
            _break_group(group)


def _break_group(group: ProcessGroup) -> None:
    if group.size() < 2:
        return
    for kind in ("cpu", "cuda"):
        try:
            backend: Any = group._get_backend(torch.device(kind))
        except RuntimeError:
            continue
        if backend.name() == "gloo":
            with contextlib.suppress(RuntimeError):  # the end of its time, which closes the connections
                other = 1 if group.rank() == 0 else 0
                backend.recv([torch.empty(1)], other, 2**20).wait(timedelta(milliseconds=1))
        elif hasattr(backend, "abort"):
            with contextlib.suppress(RuntimeError):
                backend.abort()


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
