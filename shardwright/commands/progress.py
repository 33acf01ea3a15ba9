"""A progress bar on stderr for work that takes over two seconds. Faster work shows nothing."""

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

DELAY_S = 2.0


class DelayedProgress:
    """A bar that appears after ``delay_s`` seconds, on a terminal only, and leaves nothing behind.

    ``with DelayedProgress() as bar: bar.stage("searching"); bar.update(done, total)``
    """

    def __init__(self, delay_s: float = DELAY_S, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            # Models print while they are loaded: under --json that must not reach stdout through the bar.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=None)
        self._timer = threading.Timer(delay_s, self._appear)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._over = False

    def __enter__(self) -> "DelayedProgress":
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            self._bar.stop()

    def stage(self, text: str) -> None:
        """Show what is being done now. How far it is stays unknown until `update`."""
        self._bar.update(self._task, description=text, total=None, completed=0)

    def update(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` are done. This can be handed to the planner."""
        self._bar.update(self._task, completed=done, total=total)

    def _appear(self) -> None:
        with self._lock:
            if not self._over:
                self._bar.start()
