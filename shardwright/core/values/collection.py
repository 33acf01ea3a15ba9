"""A pause of Python's full garbage collections, for work that makes many objects and next to no cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30
"""A number of collections that is never reached."""


@contextmanager
def without_full_collections() -> Iterator[None]:
    """A context without collections of the oldest objects, each of which goes through all objects of the process: those
    of a large model's graph, and a framework's own. Young objects are collected as ever."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
