"""What this rank is doing and whom it waits for, said at once when a wait fails or the process is told to stop.

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
from types import FrameType

from shardwright.core.errors import ShardwrightError

GRACE_S = 2.0
"""How long the main thread may take to act on SIGTERM after the report, before the process ends without it."""


class PeerError(ShardwrightError, RuntimeError):
    """A peer did not send, receive or take part: it died, or was slower than the timeout."""


class Watch:
    """The current action and wait of one rank. Written by the main thread, read by the reporting thread.

    Args:
        who: the rank, as messages name it.
        timeout_s: how long a wait may take before it fails.
    """

    def __init__(self, who: str, timeout_s: float) -> None:
        self.who, self.timeout_s = who, timeout_s
        self._doing = "between steps"
        self._waiting: tuple[object, float] | None = None

    def doing(self, what: str) -> None:
        """Note what the rank does now: ``stage 1, action 1F3``."""
        self._doing = what

    def waiting(self, what: object) -> "Watch":
        """Note a wait, and turn its failure into a PeerError that says who waited for what: ``with watch.waiting(…)``.

        ``what`` is made text when it is said.
        """
        self._waiting = (what, time.monotonic())
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        said = "" if error is None else self.describe()
        self._waiting = None
        if isinstance(error, RuntimeError) and not isinstance(error, ShardwrightError):
            report(said)
            raise PeerError(
                f"{said}; the wait failed: {_first_line(error)}. A peer died, was slower than wait_timeout_s, or runs "
                f"another step than this rank: all peers call the same steps, with batches of the same shapes"
            ) from error

    def describe(self) -> str:
        """``rank 1 (pp 1): stage 1, action 1F3: waited 2.1 s for …``"""
        waiting = self._waiting
        if waiting is None:
            return f"{self.who}: {self._doing}: not waiting for a peer"
        what, since = waiting
        return f"{self.who}: {self._doing}: waited {time.monotonic() - since:.1f} s for {what}"


def report(text: str) -> None:
    """Write one line to standard error at once, in one piece, from whatever thread."""
    with contextlib.suppress(OSError):
        os.write(2, f"[shardwright] {text}\n".encode())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_reporter: "_StopReporter | None" = None


def watch_for_stop(watch: Watch) -> bool:
    """Print what the watch says when SIGTERM arrives, even while the main thread is blocked in C++.

    There is one SIGTERM per process, so the latest watch is the one that speaks. Returns False outside the main thread,
    where Python allows no handler.
    """
    global _reporter
    if _reporter is not None:
        _reporter.watch = watch
        return True
    reporter = _StopReporter(watch)
    if not reporter.start():
        return False
    _reporter = reporter
    return True


class _StopReporter:
    def __init__(self, watch: Watch) -> None:
        self.watch = watch
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

    def _read(self) -> None:
        while data := self._reader.recv(64):
            if signal.SIGTERM in data:
                report(f"{self.watch.describe()} when it was told to stop")
                self._said.set()
                if not self._handled.wait(GRACE_S):
                    sys.stderr.flush()
                    os._exit(128 + signal.SIGTERM)
