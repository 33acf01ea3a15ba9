"""A journal: lines of JSON in a file that several processes of one host read and append to, one process at a time."""

import json
import os
from typing import Any


class Journal:
    """One process's view of a journal. Whoever appends has read all that others appended before, and holds what keeps
    them away meanwhile.

    Args:
        file: the descriptor of an open file, which may have no name any more.
    """

    def __init__(self, file: int) -> None:
        self._file, self._at = file, 0

    @property
    def has_news(self) -> bool:
        """Whether another process has appended something that was not read here."""
        return os.fstat(self._file).st_size > self._at

    def read(self) -> list[Any]:
        """What other processes have appended since the last call. A line that is not whole is left for the next."""
        size = os.fstat(self._file).st_size - self._at
        if size <= 0:
            return []
        data = os.pread(self._file, size, self._at)
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def append(self, *entries: Any) -> None:
        """Append entries."""
        data = b"".join(json.dumps(entry, separators=(",", ":")).encode() + b"\n" for entry in entries)
        while data:
            written = os.pwrite(self._file, data, self._at)
            self._at += written
            data = data[written:]
