"""The tensors of one job in memory that the processes of a host share: a file that each of them maps.

Where a tensor lies in the file follows from the order in which all were put and dropped. A journal tells that to the
other processes, which run passes of the job one at a time, never two at once.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwright.backends.torch.jobs.host_tensors import HostTensors
from shardwright.backends.torch.jobs.journal import Journal
from shardwright.backends.torch.machine.host_store import count_as_file
from shardwright.core.errors import ShardwrightError

SEGMENT_BYTES = 1 << 24
"""The least bytes by which the file grows, and that are mapped together."""
_ALIGNED = 64


class SharedTensors(HostTensors):
    """One process's view of a job's tensors.

    Args:
        file: the descriptor of the file, open for reading and writing.
        where: the directory that it was made in, for errors.
    """

    is_shared = True

    def __init__(self, file: int, journal: Journal, where: str) -> None:
        super().__init__()
        self._file, self._journal, self._where = file, journal, where
        self._segments: list[_Segment] = []
        self._size = self._begin = 0
        """The bytes of the file, and the first of those that nothing has had yet."""
        self._free: dict[int, list[int]] = {}
        """Freed blocks, by size."""
        self._places: dict[str, tuple[int, int]] = {}
        """The first byte and the size of each tensor's block."""
        self._untold: list[list[Any]] = []
        count_as_file(self)

    # As of one process -----------------------------------------------------------------------------------------------

    def put(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        held = self._held.get(key)
        if held is None or (held.shape, held.dtype, held.stride()) != (tensor.shape, tensor.dtype, _strides(tensor)):
            held = self._make(key, tensor.shape, _strides(tensor), tensor.dtype)
        if held.data_ptr() != tensor.data_ptr():
            held.copy_(tensor.detach())
        return held

    def add(self, key: str, flat: torch.Tensor) -> None:
        if key in self._held:
            self._held[key].add_(flat.to("cpu"))
        else:
            self.put(key, flat)

    def arrive(self) -> None:
        """Sums are made at once."""

    def drop(self, key: str) -> None:
        if key in self._held:
            self._forget(key)
            self._untold.append(["drop", key])

    def note(self, key: str, value: Any) -> None:
        if key not in self._noted or self._noted[key] != value:
            self._untold.append(["note", key, value])
        self._noted[key] = value

    # Other processes -------------------------------------------------------------------------------------------------

    def read(self) -> list[str]:
        found = []
        for kind, key, *rest in self._journal.read():
            found.append(key)
            if kind == "put":
                shape, strides, dtype = rest
                self._make(key, torch.Size(shape), tuple(strides), getattr(torch, dtype), told=True)
            elif kind == "drop":
                self._forget(key)
            else:
                self._noted[key] = rest[0]
        return found

    def tell(self) -> None:
        if self._untold:
            self._journal.append(*self._untold)
            self._untold = []

    def keep_apart(self) -> None:
        """From now on writes of this process are its own: nobody else sees them. The processes' memory stays one
        where nothing is written."""
        self._segments = [_Segment.of(self._file, old.begin, len(old.block), is_private=True) for old in self._segments]
        for key, tensor in self._held.items():
            self._held[key] = self._view(*self._places[key], tensor.shape, tensor.stride(), tensor.dtype)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is in the file."""
        return any(0 <= storage.data_ptr() - each.address < len(each.block) for each in self._segments)

    # Blocks ----------------------------------------------------------------------------------------------------------

    def _make(
        self, key: str, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, *, told: bool = False
    ) -> torch.Tensor:
        """A tensor under a key, in place of the one that it had."""
        if key in self._held:
            self._forget(key)
        size = -(-shape.numel() * dtype.itemsize // _ALIGNED) * _ALIGNED
        place = (self._block(size, is_new=not told), size)
        self._places[key] = place
        self._held[key] = self._view(*place, shape, strides, dtype)
        if not told:
            self._untold.append(["put", key, list(shape), list(strides), str(dtype).removeprefix("torch.")])
        return self._held[key]

    def _forget(self, key: str) -> None:
        begin, size = self._places.pop(key)
        del self._held[key]
        self._free.setdefault(size, []).append(begin)

    def _block(self, size: int, *, is_new: bool) -> int:
        if free := self._free.get(size):
            return free.pop()
        if self._begin + size > self._size:
            self._grow(size, is_new=is_new)
        self._begin += size
        return self._begin - size

    def _grow(self, size: int, *, is_new: bool) -> None:
        """Map a new segment. What was left of the last one is not used."""
        length = max(SEGMENT_BYTES, -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY)
        begin = self._size
        try:
            if is_new:  # the blocks are there before they are written to: a full disk is an error here
                os.posix_fallocate(self._file, begin, length)
            self._segments.append(_Segment.of(self._file, begin, length))
        except OSError as error:
            raise ShardwrightError(
                f"a job has {begin / 2**20:.0f} MiB in a file in {self._where} and found no room for "
                f"{length / 2**20:.0f} MiB more ({error.strerror}): set TMPDIR to a directory with more room, or run "
                f"fewer jobs at a time"
            ) from error
        self._begin, self._size = begin, begin + length

    def _view(
        self, begin: int, size: int, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        if not size:
            return torch.empty(shape, dtype=dtype)
        segment = next(each for each in reversed(self._segments) if each.begin <= begin)
        count, offset = shape.numel() * dtype.itemsize, begin - segment.begin
        array = np.frombuffer(segment.block, dtype=np.uint8, count=count, offset=offset)
        return torch.from_numpy(array).view(dtype).as_strided(shape, strides)


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of the file, mapped: its first byte there, and its address here."""

    begin: int
    block: mmap.mmap
    address: int

    @classmethod
    def of(cls, file: int, begin: int, length: int, *, is_private: bool = False) -> "_Segment":
        flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
        block = mmap.mmap(file, length, flags=flags, offset=begin)
        return cls(begin, block, ctypes.addressof(ctypes.c_char.from_buffer(block)))


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """How a tensor lies, if it fills its memory; else as a contiguous one."""
    dense = torch.empty_like(tensor, device="meta").stride()
    return dense if dense == tensor.stride() else torch.empty(tensor.shape, device="meta").stride()
