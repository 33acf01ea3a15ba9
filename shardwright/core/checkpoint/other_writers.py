"""Other runs that write checkpoints to the same folder: found, so that neither removes what the other has written."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardwright.core.checkpoint.index import Marker
from shardwright.core.errors import CheckpointError

try:
    import fcntl
except ImportError:  # not there on Windows
    fcntl = None  # type: ignore[assignment]

KnownSaves = dict[Path, set[str]]
"""For each folder to which a run has written, the names of the saves that were there before and of its own."""
POLL_S = 0.02


def require_alone(path: Path, found: Sequence[tuple[str, Marker]], known: KnownSaves) -> set[str]:
    """The names of the saves of a folder that a run knows, to which it adds its own; ``found`` are the complete ones
    there. Raises CheckpointError where another run has written one since this one began to."""
    names = known.setdefault(path.resolve(), {marker.save for _, marker in found})
    others = [tag for tag, marker in found if marker.save not in names]
    if others:
        raise CheckpointError(
            f"another run has written checkpoint {others[0]!r} to {path} since this one began to save there: the "
            f"newest would be of either, and each would remove what the other keeps. Nothing was written; give each "
            f"run a folder of its own"
        )
    return names


@contextmanager
def publishing_alone(path: Path, timeout_s: float) -> Iterator[None]:
    """A context in which no other process publishes to a folder, where its file system has locks: what one run
    publishes is not removed by another that publishes just then. A process that ends gives its lock back.

    Raises CheckpointError where another process holds the lock for ``timeout_s``.
    """
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError:  # a file system that opens no folders
        yield
        return
    try:
        _lock(number, path, timeout_s)
        yield
    finally:
        os.close(number)


def _lock(number: int, path: Path, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while fcntl is not None:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise CheckpointError(
                    f"another run publishes a checkpoint to {path}, for {timeout_s:.0f} s by now: give each run a "
                    f"folder of its own"
                ) from None
            time.sleep(POLL_S)
        except OSError:  # a file system without locks
            return
        else:
            return
