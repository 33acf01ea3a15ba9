"""The heartbeat between the processes of a run.

A thread tells the run's hub every second what this process does, and hears which others failed, left, or fell
silent. This news is printed at once and raised by the next step; a process that is blocked in a collective, which
nothing in Python can wake, ends a little later. The reasons that JAX gives are those of the connections that broke.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from shardwright.backends.rendezvous_store import BEAT_S
from shardwright.core.errors import PeerError, ShardwrightError

LEAST_S = 0.05
"""The least time between two messages to the hub."""
INQUEST_S = 5.0
"""The time for which the cause of an error is looked for that a peer may have caused."""
GRACE_S = 3.0
"""The time that a process goes on after it knows that the run cannot, when it does not move."""
STILL_S = 6.0
"""The time at the same place after which the main thread is taken for blocked, where the run has failed."""


class Pulse:
    """One process's part of the heartbeat, over its connection to the hub.

    Args:
        place: the address of the hub, for messages.
        timeout_s: the time that the hub may be silent, and that this process may wait for one that left.
    """

    def __init__(self, connection: socket.socket, process: int, place: str, timeout_s: float) -> None:
        self.connection, self.process, self.place, self.timeout_s = connection, process, place, timeout_s
        self.fault: str | None = None
        """The reason why the run cannot go on; None while it can."""
        self._said = "starting"
        self._left: list[int] = []
        self._known = self._heard = self._moved = time.monotonic()
        self._frame: tuple[int, int] | None = None
        self._is_over, self._news = threading.Event(), threading.Event()
        self._told = self._has_left = False
        self._sending = threading.Lock()
        self._main = threading.main_thread()
        self._process = os.getpid()
        self._hook = sys.excepthook
        self._threads = [threading.Thread(target=target, daemon=True, name="shardwright-pulse")
                         for target in (self._listen_on, self._beat_on)]  # fmt: skip

    def start(self) -> None:
        """Begin to tell the hub and to hear from it."""
        sys.excepthook = self._uncaught
        for thread in self._threads:
            thread.start()

    def say(self, text: str) -> None:
        """Tell the hub what this process does from now on."""
        self._said = text
        self._news.set()

    def require(self) -> None:
        """Raise PeerError when the run cannot go on."""
        if self.fault is not None:
            raise PeerError(f"process {self.process}, {self._said}: {self.fault}")

    @contextlib.contextmanager
    def explained(self, text: str) -> Iterator[None]:
        """A context in which the process does ``text``. Errors of a peer are raised as PeerError, naming it."""
        self.say(text)
        self.require()
        try:
            yield
        except ShardwrightError:
            raise
        except Exception as error:
            if _may_be_a_peers(error) and self._inquest():
                raise PeerError(f"process {self.process}, {text}: {self.fault}") from error
            raise
        self.say(f"after {text}")

    @property
    def has_failed(self) -> bool:
        """Whether this process or another one has failed."""
        return self.fault is not None or self._told

    def leave(self) -> None:
        """Tell the others that this process needs them no more. Their fate is heard until `close`."""
        if not self.has_failed and not self._has_left:
            self._has_left = True
            self._send({"left": True})

    def close(self) -> None:
        """Stop telling and hearing."""
        self._is_over.set()
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    @property
    def is_own(self) -> bool:
        """Whether this process made the pulse, and not one that this process is a fork of."""
        return os.getpid() == self._process

    # ---------------------------------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), self._sending:
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def _beat_on(self) -> None:
        while not self._is_over.wait(LEAST_S):
            self._news.wait(BEAT_S)
            self._news.clear()
            if not self._has_left and not self._told:
                self._send({"said": self._said[:1000]})
            self._judge()

    def _listen_on(self) -> None:
        try:
            with self.connection.makefile("rb") as lines:
                for line in lines:
                    self._hear(json.loads(line))
        except (OSError, ValueError):
            pass
        if not self._is_over.is_set():
            self._fail(f"the hub of the run at {self.place}, beside process 0, is gone: its host is, or it was ended")

    def _hear(self, told: Any) -> None:
        self._heard = time.monotonic()
        for fault in told["faults"]:
            if fault["process"] != self.process:
                self._fail(fault["text"])
            elif not self._told:
                self._fail(f"the others took this process for gone: {fault['text']}")
        self._left = [process for process in told["left"] if process != self.process]

    def _fail(self, text: str) -> None:
        if self.fault is None and not self._is_over.is_set():
            self._known, self.fault = time.monotonic(), text
            _report(f"process {self.process}, {self._said}: {text}")

    def _judge(self) -> None:
        """End a process that is blocked for good, and note as a fault that the hub or a process that left was silent
        too long."""
        now = time.monotonic()
        if now - self._heard > self.timeout_s:
            self._fail(f"the hub of the run at {self.place}, beside process 0, has given no sign of life for "
                       f"{now - self._heard:.0f} s")  # fmt: skip
        frame: FrameType | None = sys._current_frames().get(self._main.ident or 0)
        place = None if frame is None else (id(frame), frame.f_lasti)
        if place != self._frame:
            self._frame, self._moved = place, now
        if self._left and now - self._moved > self.timeout_s:
            self._fail(f"process {self._left[0]} left the run: its script ended, or called sw.shutdown()")
        if self.fault is not None and min(now - self._known, now - self._moved + GRACE_S - STILL_S) > GRACE_S:
            _report(f"process {self.process}, {self._said}: {self.fault}. The process could not be woken, and ends")
            os._exit(1)

    def _inquest(self) -> bool:
        """Wait a little for the word that a peer failed."""
        begun = time.monotonic()
        while self.fault is None and time.monotonic() - begun < INQUEST_S:
            time.sleep(0.02)
        return self.fault is not None

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tell the others what ends this process, or report which of them ended it."""
        if self.fault is None and not (_may_be_a_peers(error) and self._inquest()):
            self._told = True
            self._send({"fault": f"failed, {self._said}: {kind.__name__}: {str(error)[:1000]}"})
        self._hook(kind, error, trace)
        if self.fault is not None:
            _report(f"process {self.process}, {self._said}: {self.fault}")


def _may_be_a_peers(error: BaseException) -> bool:
    """Whether an error came out of a running program, where a peer may have caused it."""
    of_a_program = any(base.__name__ in ("JaxRuntimeError", "XlaRuntimeError") for base in type(error).__mro__)
    return of_a_program or (isinstance(error, ValueError) and "Gloo" in str(error))


def _report(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"[shardwright] {text}", file=sys.stderr, flush=True)
