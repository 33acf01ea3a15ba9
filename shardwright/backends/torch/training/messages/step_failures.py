"""Failures of steps by messages, of this rank or told by another, and waits that end when a peer fails or is gone."""

import contextlib
import threading
import time
from collections.abc import Callable

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import PeerError, Watchdog, report
from shardwright.backends.torch.training.messages.microbatch_threads import Turns
from shardwright.backends.torch.training.messages.remote_errors import Failure, StepFailedError
from shardwright.backends.torch.training.messages.transport import Kind, Wire
from shardwright.core.errors import ShardwrightError

LOOK_S = 1.0
"""The interval in seconds at which a waiting rank looks whether its peers still answer."""

IDLE_S = 5.0
"""The time in seconds that a rank waits longer if it waits for calls and for no answer."""

UNWIND_S = 30.0
"""The time in seconds that a failed step may take to unwind on this rank and to be heard of on the others."""


class StepFailures:
    """The failures of one rank.

    Attributes:
        wire: the connection over which peers are told; set once it is there.
        done: set when the work of the step is over, or has failed.
    """

    wire: Wire

    def __init__(self, bound: BoundMesh, watchdog: Watchdog, turns: Turns) -> None:
        self.bound, self.watchdog, self.turns = bound, watchdog, turns
        self.done = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._failure: Failure | None = None
        self._broken: str | None = None
        """The reason why no step can be run any more; None while steps can be run."""

    def begin(self) -> None:
        """Begin a step."""
        self._error = self._failure = None
        self.done.clear()

    def require_peers(self) -> None:
        """Raise PeerError when an earlier step has lost a peer."""
        if self._broken is not None:
            raise PeerError(f"an earlier step has lost a peer, and none can be run: {self._broken}")

    # What fails --------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException, failure: Failure | None = None) -> None:
        """Note that the step has failed here, or was told to have failed elsewhere: the first reason stands."""
        with self._lock:
            if self._error is None:
                text = f"{self.bound.describe()}: {type(error).__name__}: {error}"
                self._error, self._failure = error, failure or Failure(text)
            failure = self._failure
        self.turns.fail()
        with contextlib.suppress(RuntimeError):  # a peer that is gone needs no telling
            self.wire.say_last(Kind.ABORT, failure)
        self.done.set()

    def hear(self, failure: Failure, source: int) -> None:
        """Note the failure that the peer at pp coordinate ``source`` has told."""
        if failure.lost:
            self._give_up(f"{self.watchdog.describe()}; told by rank {self.bound.peer('pp', source)}", failure)
        else:
            self.fail(StepFailedError(failure.text), failure)

    def lose(self, peer: int, error: Exception) -> None:
        """Note that the connection with a peer is broken."""
        pulse = self.watchdog.pulse
        fault = self.watchdog.told or (None if pulse is None else pulse.inquest())
        cause = (str(error).splitlines() or [""])[0] if fault is None else fault.text
        self._give_up(
            f"{self.watchdog.describe()}; the connection with rank {self.bound.peer('pp', peer)} is lost: {cause}"
        )

    def _give_up(self, said: str, told: Failure | None = None) -> None:
        """Fail the step because a peer is gone: no later one can be run either."""
        if told is not None:
            said = f"{said}: {told.text}"
        with self._lock:
            if self._broken is not None:
                return
            self._broken = said
        report(said)
        self.fail(PeerError(said), told or Failure(said, lost=True))

    def raise_if_failed(self) -> None:
        """Raise the failure of the step, if there is one; an error of the model's as StepFailedError."""
        error = self._error
        if error is None:
            return
        if isinstance(error, ShardwrightError) and not hasattr(error, "_shardwright_text"):
            raise error
        assert self._failure is not None
        raise StepFailedError(self._failure.text) from error

    def unwind(self) -> None:
        """Wait until nothing of a failed step is under way, so that the next may be run. Messages are waited for first,
        since a late one begins a fiber."""
        if self._broken is None and not (self.wire.quiet(UNWIND_S) and self.turns.ended(UNWIND_S)):
            self._broken = f"{self.bound.describe()}: a failed step did not end on every rank"
        if self._broken is not None:
            self.wire.abandon()

    # Waits -------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for the end of the step's work, or until nothing has come from any peer for too long.

        Raises the failure of the step; PeerError for a peer that is gone.
        """
        waited_s, seen = 0.0, None
        while not self.done.wait(LOOK_S):
            now = self.turns.progress()
            waited_s = waited_s + LOOK_S if now is not None and now == seen else 0.0
            seen = now
            self._look()
            # A rank that waits for an answer knows more than one that only serves, and speaks first.
            limit_s = self.watchdog.longest_s if self.turns.waits() else self.watchdog.longest_s + IDLE_S
            if waited_s >= limit_s:
                self._give_up(f"{self.watchdog.describe()}; nothing came for {limit_s:.0f} s")
        self.raise_if_failed()

    def comes(self, is_there: Callable[[float], bool]) -> bool:
        """Wait for the end of something, as long as peers live: False when it takes too long. Raises the failure of the
        step, and PeerError when a peer is gone."""
        begun = time.monotonic()
        while not is_there(LOOK_S):
            self._look()
            self.raise_if_failed()
            if time.monotonic() - begun > self.watchdog.longest_s:
                return False
        return True

    def _look(self) -> None:
        """Give up once it is known that a peer has failed or is gone."""
        fault = self.watchdog.told
        if fault is not None and self._broken is None:
            self._give_up(f"{self.watchdog.describe()}; {fault.text}")
