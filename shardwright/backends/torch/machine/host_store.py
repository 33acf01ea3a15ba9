"""The host's memory as a place for storages of the device: pinned buffers and copy streams where a device has memory of
its own, a mapped file on CPUs.

On a CPU device and host are one memory, and what lies in another tensor is as much in the way as before. A mapped file
is not: the system writes its pages out when it needs room, and no count of tensors has them.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np
import torch

from shardwright.core.errors import ShardwrightError

T = TypeVar("T")
MOST_ARRIVING = 4
"""The number of gradients on their way to the host that are waited for at the latest when another is sent."""


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

    def send(self, tensor: torch.Tensor) -> Away:
        """Copy the storage of a tensor to the host. Its memory is free when its last user lets go of it and the copy is
        done."""

    def settle(self, under_way: int) -> None:
        """Let what follows on the device wait until no more than so many bytes are on their way to the host."""

    def tensor(self, entries: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of zeros on the host."""

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values on the host: the tensor itself where it is there already."""

    def beside(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Issue work that copies from the host, beside what the device computes from now on; the second result lets
        what follows on the device wait for it."""

    def collect(self, total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
        """Begin to add a flat tensor of the device to a sum on the host; None: the sum is made. It may be read after
        `arrive`."""

    def arrive(self) -> None:
        """Wait until all sums are there."""


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
        self._addresses: set[int] = set()
        _FILES.add(self)

    def send(self, tensor: torch.Tensor) -> "_InFile":
        storage = tensor.untyped_storage()
        block = self._block(storage.nbytes())
        ctypes.memmove(_address(block), storage.data_ptr(), storage.nbytes())
        return _InFile(block, storage.nbytes(), self._free.setdefault(len(block), []).append)

    def settle(self, under_way: int) -> None:
        """Nothing is ever on its way."""

    def tensor(self, entries: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = entries * dtype.itemsize
        if not nbytes:
            return torch.zeros(entries, dtype=dtype)
        block = self._block(nbytes)
        array = np.frombuffer(block, dtype=np.uint8, count=nbytes)
        array.fill(0)
        # The tensor holds the array, and the array the block.
        weakref.finalize(array, self._free.setdefault(len(block), []).append, block).atexit = False
        return torch.from_numpy(array).view(dtype)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.holds(tensor.untyped_storage()) or not tensor.numel():
            return tensor
        flat = self.tensor(tensor.numel(), tensor.dtype)
        is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        return flat.as_strided(tensor.shape, tensor.stride() if is_dense else _contiguous(tensor.shape)).copy_(tensor)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is in the file."""
        return storage.data_ptr() in self._addresses

    def beside(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        return work(), _nothing

    def collect(self, total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
        return self.tensor(part.numel(), part.dtype).copy_(part) if total is None else total.add_(part)

    def arrive(self) -> None:
        """Sums are made at once."""

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
                f"plan with less on the host"
            ) from error
        self._size += size
        self._addresses.add(_address(block))
        return block


class _Holder(Protocol):
    """A file with storages in it."""

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is in the file."""


_FILES: weakref.WeakSet[_Holder] = weakref.WeakSet()


def count_as_file(holder: _Holder) -> None:
    """Let storages of a file of another kind stand for storages on a host too."""
    _FILES.add(holder)


def is_in_file(storage: torch.UntypedStorage) -> bool:
    """Whether a storage of the CPU stands for one on a host: a count of the device's memory leaves it out."""
    return any(file.holds(storage) for file in _FILES)


def _nothing() -> None:
    pass


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


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
        self._leaving: list[_Leaving] = []
        """The storages on their way to the host, oldest first: their memory is not used again before they are there."""
        self._arriving: list[tuple[torch.Event, torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        """What is on its way into sums, oldest first: when it is there, the sum, what is to be added to it then (None
        where it is copied into the sum itself), and the tensor of the device."""

    def send(self, tensor: torch.Tensor) -> "_Pinned":
        on_device = _bytes_of(tensor.untyped_storage(), self._device)
        buffer = torch.empty(on_device.nbytes, dtype=torch.uint8, pin_memory=True)
        self._out.wait_stream(torch.accelerator.current_stream(self._device))
        with self._out:
            buffer.copy_(on_device, non_blocking=True)
        leaving = _Leaving(tensor.detach(), self._out.record_event())
        self._leaving = [other for other in self._leaving if other.sent is not None]
        self._leaving.append(leaving)
        return _Pinned(buffer, leaving, self._in, self._device)

    def settle(self, under_way: int) -> None:
        left = sum(leaving.nbytes for leaving in self._leaving)
        while self._leaving and (left > under_way or self._leaving[0].there.query()):
            leaving = self._leaving.pop(0)
            left -= leaving.nbytes
            leaving.let_go(self._device)

    def tensor(self, entries: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(entries, dtype=dtype, pin_memory=True)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == "cpu" else tensor.cpu()

    def beside(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        # The memory may have been another tensor's, which the compute stream still reads.
        self._in.wait_stream(torch.accelerator.current_stream(self._device))
        with self._in:
            found = work()
            there = self._in.record_event()
        return found, lambda: torch.accelerator.current_stream(self._device).wait_event(there)

    def collect(self, total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
        while len(self._arriving) >= MOST_ARRIVING:
            self._arrive_first()
        buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        self._out.wait_stream(torch.accelerator.current_stream(self._device))
        with self._out:
            buffer.copy_(part, non_blocking=True)
            there = self._out.record_event()
        is_first = total is None
        total = buffer if total is None else total
        self._arriving.append((there, total, None if is_first else buffer, part))
        return total

    def arrive(self) -> None:
        while self._arriving:
            self._arrive_first()

    def _arrive_first(self) -> None:
        there, total, more, _ = self._arriving.pop(0)
        there.synchronize()
        if more is not None:
            total.add_(more)


class _Leaving:
    """A storage on its way to the host, until its memory may be another's."""

    def __init__(self, sent: torch.Tensor, there: torch.Event) -> None:
        self.sent: torch.Tensor | None = sent
        self.there, self._version = there, sent._version

    @property
    def nbytes(self) -> int:
        return 0 if self.sent is None else self.sent.untyped_storage().nbytes()

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage as it was sent, if it is on the device still and nothing has written to it."""
        if self.sent is None or self.sent._version != self._version:
            return None
        return self.sent.untyped_storage()

    def let_go(self, device: torch.device) -> None:
        """Free the memory for what follows on the device, which waits for the copy."""
        if self.sent is not None:
            torch.accelerator.current_stream(device).wait_event(self.there)
            self.sent = None


class _Pinned:
    def __init__(self, buffer: torch.Tensor, leaving: _Leaving, stream: torch.Stream, device: torch.device) -> None:
        self.nbytes, self._buffer, self._leaving = buffer.nbytes, buffer, leaving
        self._stream, self._device = stream, device
        self._back: torch.UntypedStorage | None = None
        self._arrives: torch.Event | None = None
        """When a copy back is there, until what follows on the device waits for it."""

    def begin(self) -> None:
        if self._back is not None:
            return
        self._back = self._leaving.storage
        if self._back is not None:
            return
        storage = torch.UntypedStorage(self.nbytes, device=self._device)
        self._stream.wait_event(self._leaving.there)
        # The memory may have been another tensor's, which the compute stream still reads.
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            _bytes_of(storage, self._device).copy_(self._buffer, non_blocking=True)
        self._back, self._arrives = storage, self._stream.record_event()

    def fetch(self) -> torch.UntypedStorage:
        self.begin()
        assert self._back is not None
        self._wait()
        return self._back

    def drop(self) -> None:
        self._wait()
        self._leaving.let_go(self._device)
        self._back = None

    def _wait(self) -> None:
        if self._arrives is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._arrives)
            self._arrives = None

    def __del__(self) -> None:
        self._wait()  # a copy that nothing asked for would write into what has its memory next


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
