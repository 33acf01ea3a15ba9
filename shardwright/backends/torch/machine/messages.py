"""Objects that ranks send each other, over the store of the run: devices and their groups take no part.

An object travels as data: tensors, numbers, texts and their lists, tuples, sets and dicts. What arrives is read by
``torch.load(weights_only=True)``, which runs nothing of it, whoever sent it.
"""

import io
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from shardwright.backends.torch.compat import HashStore, PrefixStore, default_store
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.core.checkpoint.content import encoded
from shardwright.core.errors import CheckpointError, ShardwrightError

POLL_S = (0.0005, 0.02)
"""The seconds between two looks for a message: at first, and at most."""
LARGEST_BYTES = 2**30
"""The most bytes of a message: they pass through the memory of the process that serves the store."""


class Messages:
    """One rank's messages to and from the others. Every rank of a run makes one."""

    def __init__(self, bound: BoundMesh, watchdog: Watchdog) -> None:
        self._rank, self._watchdog = bound.rank, watchdog
        self._store: Any = HashStore()
        if bound.mesh.size > 1:
            store: Any = default_store()
            epoch = store.add(f"shardwright/messages/{bound.rank}", 1)
            self._store = PrefixStore(f"shardwright/messages/{epoch}", store)
        self._counts = Counter[object]()
        """How many messages there were between two ranks in a direction, and within a group of ranks."""
        self._left: dict[object, str] = {}
        """The last message of this rank to a group, which others may have to read yet."""

    def send(self, value: Any, rank: int) -> None:
        """Send an object to a rank, and wait for nothing. Raises ShardwrightError for one that is no data."""
        self._store.set(self._next(self._rank, rank), as_bytes(value))

    def receive(self, rank: int) -> Any:
        """The next object that a rank has sent to this one. Raises PeerError where that rank is gone."""
        key = self._next(rank, self._rank)
        found = self._wait(key, rank)
        self._store.delete_key(key)
        return as_object(found)

    def gather(self, value: Any, ranks: Sequence[int]) -> list[Any]:
        """The objects of all ranks of a group, in their order; all of them call this. Raises as `send` and `receive`
        do."""
        group = tuple(ranks)
        self._counts[group] += 1
        prefix = f"{','.join(map(str, group))}/{self._counts[group]}"
        data = as_bytes(value)
        self._store.set(f"{prefix}/{self._rank}", data)
        found = [as_object(data if rank == self._rank else self._wait(f"{prefix}/{rank}", rank)) for rank in group]
        before = self._left.pop(group, None)
        if before is not None:  # all have come here, so that all have read it
            self._store.delete_key(before)
        self._left[group] = f"{prefix}/{self._rank}"
        return found

    def _next(self, source: int, target: int) -> str:
        way = source, target
        self._counts[way] += 1
        return f"{source}/to/{target}/{self._counts[way]}"

    def _wait(self, key: str, rank: int) -> bytes:
        pause, longest = POLL_S
        with self._watchdog.waiting(f"a message of rank {rank}", (rank,)):
            while not self._store.check([key]):
                self._watchdog.require_peers()
                time.sleep(pause)
                pause = min(1.5 * pause, longest)
            return bytes(self._store.get(key))


def as_bytes(value: Any) -> bytes:
    """An object as it travels. Raises ShardwrightError for one that holds something that only a pickle would, and for
    more than `LARGEST_BYTES`."""
    try:
        encoded(value, lambda held, _: "tensor" if isinstance(held, torch.Tensor) else None, "the object")
    except CheckpointError as refused:
        raise ShardwrightError(str(refused)) from None
    buffer = io.BytesIO()
    torch.save(value, buffer)
    if buffer.tell() > LARGEST_BYTES:
        raise ShardwrightError(
            f"the object has {buffer.tell():,} bytes, and messages at most {LARGEST_BYTES:,}: send large tensors by "
            f"torch.distributed over the group of the ranks, as get_mp_process_group()"
        )
    return buffer.getvalue()


def as_object(data: bytes) -> Any:
    """An object that arrived; its tensors are on the CPU. Raises ShardwrightError for what `as_bytes` does not
    write."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as failed:  # of any class, where bytes are none of torch's
        raise ShardwrightError(f"a message cannot be read: {str(failed).partition(chr(10))[0][:200]}") from failed
