"""The host's memory as a place for storages of the device: pinned buffers and copy streams where a device has memory of
its own, a mapped file on CPUs.

On a CPU device and host are one memory, and what lies in another tensor is as much in the way as before. A mapped file
is not: the system writes its pages out when it needs room, and no count of tensors has them.
"""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Protocol

import torch

from shardwright.core.errors import ShardwrightError


class Away(Protocol):
    """A storage's bytes on the host. They are freed with this object."""

    nbytes: int

    def begin(self) -> None:
        """Begin to copy them back, if nothing has yet."""

    def fetch(self) -> torch.UntypedStorage:
        """The bytes in a storage on the device: of this call alone, or of all calls until `drop`."""

    def drop(self) -> None:
        """Forget the storage on the device. What is begun anew fetches again."""


class HostStore(Protocol):
    """A place for storages."""

    copies_beside: bool
    """Whether copies run beside what the device computes, so that it helps to begin them ahead."""

    def send(self, storage: torch.UntypedStorage) -> Away:
        """Copy a storage to the host. Its memory is free when its last user lets go of it and the copy is done."""

    def settle(self, under_way: int) -> None:
        """Let what follows on the device wait until no more than so many bytes are on their way to the host."""


def store_of(device: torch.device) -> HostStore:
    """The host store of a device."""
    return MappedFile() if device.type == "cpu" else PinnedMemory(device)


# A mapped file -------------------------------------------------------------------------------------------------------


class MappedFile:
    """A file without a name in the directory for temporary files (``TMPDIR``), of which blocks are mapped.

    Blocks are used again: a training step sends storages of the same sizes every time.
    """

    copies_beside = False

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 — it lives as long as its blocks
        self._size = 0
        self._free: dict[int, list[mmap.mmap]] = {}

    def send(self, storage: torch.UntypedStorage) -> "_InFile":
        block = self._block(storage.nbytes())
        ctypes.memmove(_address(block), storage.data_ptr(), storage.nbytes())
        return _InFile(block, storage.nbytes(), self._free.setdefault(len(block), []).append)

    def settle(self, under_way: int) -> None:
        """Nothing is ever on its way."""

    def _block(self, nbytes: int) -> mmap.mmap:
        size = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if free := self._free.get(size):
            return free.pop()
        begin = self._size
        try:
            # The blocks are there before they are written to: a full disk is an error here, and a signal later.
            _allocate(self._file.fileno(), begin, size)
            block = mmap.mmap(self._file.fileno(), size, offset=begin)
        except OSError as error:
            raise ShardwrightError(
                f"the host store has {begin / 2**20:.0f} MiB in a file in {tempfile.gettempdir()} and found no room "
                f"for {size / 2**20:.1f} MiB more ({error.strerror}): set TMPDIR to a directory with more room, or "
                f"plan with fewer offloaded units"
            ) from error
        self._size += size
        return block


class _InFile:
    def __init__(self, block: mmap.mmap, nbytes: int, give_back: Callable[[mmap.mmap], None]) -> None:
        self.nbytes, self._block, self._give_back = nbytes, block, give_back
        self._storage: torch.UntypedStorage | None = None

    def begin(self) -> None:
        """Copies take the device's own time, whenever they are made: later is better."""

    def fetch(self) -> torch.UntypedStorage:
        if self._storage is None:
            self._storage = torch.UntypedStorage(self.nbytes)
            ctypes.memmove(self._storage.data_ptr(), _address(self._block), self.nbytes)
        return self._storage

    def drop(self) -> None:
        self._storage = None

    def __del__(self) -> None:
        self._give_back(self._block)


def _allocate(file: int, begin: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, begin, size)
    else:
        os.ftruncate(file, begin + size)


def _address(block: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


# Pinned memory -------------------------------------------------------------------------------------------------------


class PinnedMemory:
    """Pinned buffers of torch's own pool, and a copy stream in each direction."""

    copies_beside = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = (torch.Stream(device) for _ in range(2))
        self._leaving: list[tuple[torch.Event, torch.Tensor]] = []
        """The storages on their way to the host, oldest first: their memory is not used again before they are there."""

    def send(self, storage: torch.UntypedStorage) -> "_Pinned":
        on_device = _bytes_of(storage, self._device)
        buffer = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self._out.wait_stream(torch.accelerator.current_stream(self._device))
        with self._out:
            buffer.copy_(on_device, non_blocking=True)
        there = self._out.record_event()
        self._leaving.append((there, on_device))
        return _Pinned(buffer, there, self._in, self._device)

    def settle(self, under_way: int) -> None:
        left = sum(tensor.nbytes for _, tensor in self._leaving)
        now = torch.accelerator.current_stream(self._device)
        while self._leaving and (left > under_way or self._leaving[0][0].query()):
            there, tensor = self._leaving.pop(0)
            now.wait_event(there)
            left -= tensor.nbytes


class _Pinned:
    def __init__(self, buffer: torch.Tensor, there: torch.Event, stream: torch.Stream, device: torch.device) -> None:
        self.nbytes, self._buffer, self._there = buffer.nbytes, buffer, there
        self._stream, self._device = stream, device
        self._back: tuple[torch.UntypedStorage, torch.Event] | None = None

    def begin(self) -> None:
        if self._back is not None:
            return
        storage = torch.UntypedStorage(self.nbytes, device=self._device)
        self._stream.wait_event(self._there)
        # The memory may have been another tensor's, which the compute stream still reads.
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            _bytes_of(storage, self._device).copy_(self._buffer, non_blocking=True)
        self._back = storage, self._stream.record_event()

    def fetch(self) -> torch.UntypedStorage:
        self.begin()
        assert self._back is not None
        storage, there = self._back
        torch.accelerator.current_stream(self._device).wait_event(there)
        return storage

    def drop(self) -> None:
        self._back = None


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
