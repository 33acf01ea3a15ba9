"""The current action of this rank and the peers that it waits for, reported at once when a wait fails or the process is
told to stop.

A Python signal handler runs only between bytecodes of the main thread, and a rank that waits for a dead peer sits in
C++. The handler that C installs still writes the signal's number to the wakeup descriptor; a thread reads it there and
prints. torchrun sends SIGTERM to the survivors within a second, so that thread must not wait for the main one.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Protocol

from shardwright.core.errors import PeerError as PeerError
from shardwright.core.errors import ShardwrightError

GRACE_S = 2.0
"""The time in seconds that the main thread may take to act on SIGTERM after the report, before the process ends without
it."""
LOOK_S = 0.3
"""The time in seconds that a rank that is told to stop looks for the reason: launchers kill soon."""
LONGEST_WAIT_S = 1800.0
"""The time in seconds that a wait may take for peers that live, and that may compute, compile or save: torch's own
timeout."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why the ranks of a run cannot go on, as one of them tells the others.

    Attributes:
        rank: the rank that tells it.
        kind: "failed": a step failed while its messages were under way; "ended": the script ended with an error;
            "lost": a peer is gone, or no rank can go on; "left": the rank is done, which is a fault only for a rank
            that waits for it.
    """

    rank: int
    kind: Literal["failed", "ended", "lost", "left"]
    text: str


class SignsOfLife(Protocol):
    """The heartbeat of a run, as a rank asks it: `heartbeat.Pulse`."""

    rank: int
    groups: list[Any]
    """The process groups whose connections are broken when this rank must be woken."""

    def tell(self, fault: Fault) -> None:
        """Write a fault of this rank down for all others."""

    def told(self) -> Fault | None:
        """The fault that another rank has told, where there is one."""

    def inquest(self) -> Fault | None:
        """The cause of a broken connection of this rank."""

    def fault(self) -> Fault | None:
        """The reason why this rank cannot go on, by all that is known."""

    def look_now(self, seconds: float) -> None:
        """Ask the store at once, and wait at most ``seconds`` for its answer."""

    def stop(self, farewell: Fault | None) -> None:
        """End the threads, with a last word to the others."""


class Watchdog:
    """The current action and wait of one rank. Written by the main thread, read by others.

    Args:
        who: the rank, as messages name it.
        timeout_s: the time that a peer may give no sign of life before a wait for it fails.
        is_on_accelerator: whether the main thread can be blocked by a peer in any call, and not in waits alone.

    Attributes:
        pulse: the signs of life of the others; None in a world of one.
        told: the fault for which this rank cannot go on; None while none is known.
        action: the current action in words: ``stage 1, action 1F3, microbatch 3``.
        moves: a number that changes whenever the rank begins something else.
        longest_s: the longest time that a wait may take, whatever the signs of life.
    """

    def __init__(self, who: str, timeout_s: float, is_on_accelerator: bool = False) -> None:
        self.who, self.timeout_s, self.is_on_accelerator = who, timeout_s, is_on_accelerator
        self.longest_s = max(LONGEST_WAIT_S, timeout_s)
        self.pulse: SignsOfLife | None = None
        self.moves = 0
        self._under_way = False
        self.told: Fault | None = None
        self.action = "between steps"
        self._waiting: tuple[object, float, Sequence[int]] | None = None
        self._since = time.monotonic()

    # What the main thread does -----------------------------------------------------------------------------------

    def doing(self, what: str) -> None:
        """Note the rank's current action: ``stage 1, action 1F3``."""
        self.action = what
        self.moves += 1
        self._since = time.monotonic()

    def waiting(self, what: object, ranks: Sequence[int] = ()) -> "Watchdog":
        """Note a wait, and turn its failure into a PeerError with the rank and what it waited for: ``with
        self.waiting(…)``.

        ``what`` is made text when it is said. ``ranks`` are those that are waited for; by default all.
        """
        self.moves += 1
        self._since = time.monotonic()
        self._waiting = (what, self._since, ranks)
        return self

    def __enter__(self) -> None:
        if self.told is not None:
            self.require_peers()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self._waiting = None
            return
        said = self.describe()
        if not isinstance(error, RuntimeError) or isinstance(error, ShardwrightError):
            self._waiting = None
            return
        fault = self.told
        if fault is None and self.pulse is not None:
            fault = self.pulse.inquest()
        self._waiting = None
        cause = fault.text if fault is not None else f"the wait failed: {_first_line(error)}. {_GUESS}"
        report(f"{said}; {cause}")
        self.told = fault or Fault(-1, "lost", cause)
        raise PeerError(f"{said}; {cause}") from error

    def require_peers(self) -> None:
        """Raise PeerError once it is known that a peer has failed or is gone. Waits that can look call this."""
        fault = self.told
        if fault is not None:
            said, self._waiting = self.describe(), None
            report(f"{said}; {fault.text}")
            raise PeerError(f"{said}; {fault.text}")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context for one step of the user's. An error in it is told to the peers, with its place."""
        self._under_way = False
        self._begin()
        try:
            yield
        except BaseException as error:
            self.note(error)
            self._failed(error)
            raise
        finally:
            if self.action != "between steps":
                self.doing("between steps")

    def under_way(self) -> None:
        """Note that messages of this step travel from now on: if the step fails, no later one can be run."""
        self._under_way = True

    def note(self, error: BaseException, where: str = "") -> None:
        """Write the place where an error happened to the error; only the first time counts."""
        if not hasattr(error, "_shardwright_at"):
            at = f"{self.who}: {self.action}" + (f", {where}" if where else "")
            with contextlib.suppress(AttributeError):  # of errors that take no attribute
                error._shardwright_at = at  # type: ignore[attr-defined]
            if not isinstance(error, PeerError):
                error.add_note(f"[shardwright] {at}")

    def _begin(self) -> None:
        fault = self.told
        if fault is None and self.pulse is not None:
            fault = self.pulse.told()
        if fault is not None:
            raise PeerError(
                f"{self.who}: no step can be run any more, since the ranks are out of step: {fault.text}. Mend that, "
                f"and start all ranks again"
            )

    def _failed(self, error: BaseException) -> None:
        """Tell the peers of an error in a step. Before its messages are under way the ranks agree on the failure."""
        if self.pulse is None or not self._under_way or isinstance(error, PeerError):
            return
        at = getattr(error, "_shardwright_at", self.who)
        fault = Fault(self.pulse.rank, "failed", f"{at}: failed: {_summary(error)}")
        self.pulse.tell(fault)
        self.told = self.told or fault

    def fault_of(self, error: BaseException) -> Fault:
        """The fault to tell of an error that ends this rank."""
        at = getattr(error, "_shardwright_at", f"{self.who}: {self.action}")
        rank = self.pulse.rank if self.pulse is not None else 0
        return Fault(rank, "ended", f"{at}: failed: {_summary(error)}")

    # What others read --------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        return self._waiting is not None

    def still_s(self) -> float:
        """The time in seconds for which the rank has done one thing."""
        return time.monotonic() - self._since

    def waits_for(self, size: int) -> Sequence[int]:
        """The ranks that this rank waits for, of ``size``."""
        waiting = self._waiting
        return range(size) if waiting is None or not waiting[2] else waiting[2]

    def hear(self, fault: Fault) -> None:
        """Note a fault; on any thread. Waits that can look end."""
        if self.told is None:
            self.told = fault

    def describe(self) -> str:
        """The action and wait in words: ``rank 1 (pp 1): stage 1, action 1F3: waited 2.1 s for …``."""
        waiting = self._waiting
        if waiting is None:
            return f"{self.who}: {self.action}: not waiting for a peer"
        what, since, _ = waiting
        return f"{self.who}: {self.action}: waited {time.monotonic() - since:.1f} s for {what}"


_GUESS = (
    "A peer died, or runs another step than this rank: all peers call the same steps, with batches of the same shapes"
)


def _summary(error: BaseException) -> str:
    """An error in a few lines at most: ``KeyError: 'x' (model.py:33 in forward)``."""
    text = "".join(traceback.format_exception_only(error)[:1]).strip()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/shardwright/" not in frame.filename]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return text[:2000] + place


def report(text: str) -> None:
    """Write one line to standard error at once, in one piece, from any thread."""
    with contextlib.suppress(OSError):
        os.write(2, f"[shardwright] {text}\n".encode())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_reporter: "_StopReporter | None" = None


def watch_for_stop(watchdog: Watchdog) -> bool:
    """Print the watchdog's description when SIGTERM arrives, even while the main thread is blocked in C++.

    There is one SIGTERM per process, so the latest watchdog is the one that speaks. Returns False outside the main
    thread, where Python allows no handler.
    """
    global _reporter
    if _reporter is not None:
        _reporter.watchdog = watchdog
        return True
    reporter = _StopReporter(watchdog)
    if not reporter.start():
        return False
    _reporter = reporter
    return True


class _StopReporter:
    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog
        self._handled = threading.Event()
        self._said = threading.Event()
        self._previous: signal.Handlers | object = None
        self._reader, self._writer = socket.socketpair()

    def start(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return False
        self._writer.setblocking(False)
        self._previous = signal.signal(signal.SIGTERM, self._on_main_thread)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._read, name="shardwright-stop-reporter", daemon=True).start()
        return True

    def _on_main_thread(self, number: int, frame: FrameType | None) -> None:
        self._handled.set()
        self._said.wait(GRACE_S)  # the reporting thread needs the interpreter, which this one holds until it waits
        if callable(self._previous):
            self._previous(number, frame)
            return
        if self._previous is signal.SIG_IGN:
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _why(self) -> str:
        """The reason that another rank told before this one was stopped; empty where none did."""
        pulse = self.watchdog.pulse
        if pulse is None:
            return ""
        pulse.look_now(LOOK_S)
        fault = pulse.fault()
        return "" if fault is None else f"; {fault.text}"

    def _read(self) -> None:
        while data := self._reader.recv(64):
            if signal.SIGTERM in data:
                report(f"{self.watchdog.describe()} when it was told to stop{self._why()}")
                self._said.set()
                if not self._handled.wait(GRACE_S):
                    sys.stderr.flush()
                    os._exit(128 + signal.SIGTERM)
