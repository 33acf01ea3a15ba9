"""A checkpoint that is being written beside training."""

import threading
from collections.abc import Callable, Sequence


class PendingCheckpoint:
    """A checkpoint that is being written. `wait` ends when it is complete."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._is_told = False

    @property
    def is_done(self) -> bool:
        """Whether this rank has written its part; on rank 0, whether the checkpoint is complete."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until this rank has written its part; on rank 0 until the checkpoint is complete. Raises CheckpointError
        where that has failed."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            self._is_told = True
            raise self._failure

    def settle(self) -> None:
        """As `wait`, but that a failure which was told is not told again."""
        if not self._is_told:
            self.wait()

    def _run(self, work: Sequence[Callable[[], None]], on_failure: Callable[[Exception], None]) -> None:
        try:
            for each in work:
                each()
        except Exception as error:
            self._failure = error
            on_failure(error)

    def start(self, work: Sequence[Callable[[], None]], on_failure: Callable[[Exception], None]) -> None:
        """Do the work, one after the other, on a thread of its own."""
        self._thread = threading.Thread(target=self._run, args=(work, on_failure), name="checkpoint", daemon=False)
        self._thread.start()
