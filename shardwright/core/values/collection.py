"""A pause of Python's full garbage collections, for work that makes many objects and next to no cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

NEVER = 1 << 30
"""A number of collections that is never reached."""


class _Pauses:
    """The contexts that are open in any thread: thresholds belong to the process."""

    def __init__(self) -> None:
        self._lock, self._open, self._old = Lock(), 0, NEVER

    def begin(self) -> None:
        with self._lock:
            if not self._open:
                young, middle, self._old = gc.get_threshold()
                gc.set_threshold(young, middle, NEVER)
            self._open += 1

    def end(self) -> None:
        with self._lock:
            self._open -= 1
            young, middle, old = gc.get_threshold()
            if not self._open and old == NEVER:  # else what runs inside has set thresholds of its own, which stay
                gc.set_threshold(young, middle, self._old)


_pauses = _Pauses()


@contextmanager
def without_full_collections() -> Iterator[None]:
    """A context without collections of the oldest objects, each of which goes through all objects of the process: those
    of a large model's graph, and a framework's own. Young objects are collected as ever. The last context that ends, of
    several threads or one inside another, restores the threshold, unless it was set meanwhile."""
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()
