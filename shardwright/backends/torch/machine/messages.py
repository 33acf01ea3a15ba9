"""Objects that ranks send each other, over the store of the run: devices and their groups take no part.

An object travels as data: tensors, numbers, texts and their lists, tuples, sets and dicts. What arrives is JSON, and
tensors that ``torch.load(weights_only=True)`` reads: nothing of it is run, whoever sent it.
"""

import io
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from shardwright.backends.torch.compat import HashStore, PrefixStore, default_store
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.core.checkpoint.content import decoded, encoded
from shardwright.core.errors import CheckpointError, DisagreementError, ShardwrightError

POLL_S = (0.0005, 0.02)
"""The seconds between two looks for a message: at first, and at most."""
PART_BYTES = 4 * 2**20
"""The most bytes of one value of the store, which takes 8 MiB."""
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
        """Send an object to a rank, and wait for nothing. Raises ShardwrightError for one that is no data: then nothing
        is sent."""
        data = as_bytes(value)
        self._write(self._next(self._rank, rank), data)

    def receive(self, rank: int) -> Any:
        """The next object that a rank has sent to this one. Raises PeerError where that rank is gone."""
        key = self._next(rank, self._rank)
        found = self._read(key, rank)
        self._drop(key)
        return as_object(found)

    def gather(self, value: Any, ranks: Sequence[int]) -> list[Any]:
        """The objects of all ranks of a group, in their order; all of them call this. Raises as `send` and `receive`
        do, and DisagreementError on the other ranks where one has an object that is no data."""
        group = tuple(ranks)
        failure: ShardwrightError | None = None
        try:
            data = as_bytes(value)
        except ShardwrightError as error:
            failure, data = error, b""
        self._counts[group] += 1
        prefix = f"{digest_of(group) & 0xFFFFFFFFFFFF:012x}/{self._counts[group]}"
        self._write(f"{prefix}/{self._rank}", data)
        found = [data if rank == self._rank else self._read(f"{prefix}/{rank}", rank) for rank in group]
        before = self._left.pop(group, None)
        if before is not None:  # all have come here, so that all have read it
            self._drop(before)
        self._left[group] = f"{prefix}/{self._rank}"
        if failure is not None:
            raise failure
        for rank, held in zip(group, found, strict=True):
            if not held:
                raise DisagreementError(f"rank {rank} gave allgather an object that is no data: its own output says so")
        return [as_object(held) for held in found]

    def _next(self, source: int, target: int) -> str:
        way = source, target
        self._counts[way] += 1
        return f"{source}/to/{target}/{self._counts[way]}"

    def _write(self, key: str, data: bytes) -> None:
        parts = [data[first : first + PART_BYTES] for first in range(0, len(data), PART_BYTES)]
        for number, part in enumerate(parts):
            self._store.set(f"{key}/{number}", part)
        self._store.set(key, f"{len(parts)}")  # last: what is there can be read

    def _drop(self, key: str) -> None:
        for number in range(int(self._store.get(key))):
            self._store.delete_key(f"{key}/{number}")
        self._store.delete_key(key)

    def _read(self, key: str, rank: int) -> bytes:
        pause, longest = POLL_S
        with self._watchdog.waiting(f"a message of rank {rank}", (rank,)):
            while not self._store.check([key]):
                self._watchdog.require_peers()
                time.sleep(pause)
                pause = min(1.5 * pause, longest)
            return b"".join(bytes(self._store.get(f"{key}/{n}")) for n in range(int(self._store.get(key))))


def as_bytes(value: Any) -> bytes:
    """An object as it travels. Raises ShardwrightError for one that holds something that only a pickle would, and for
    more than `LARGEST_BYTES`."""
    tensors: list[torch.Tensor] = []

    def tensor(held: Any, _: str) -> str | None:
        if not isinstance(held, torch.Tensor):
            return None
        tensors.append(held.detach().cpu().contiguous().clone())  # a view would bring all that it is a view of
        return str(len(tensors) - 1)

    try:
        text = json.dumps(encoded(value, tensor, "the object"))
    except CheckpointError as refused:
        raise ShardwrightError(str(refused)) from None
    buffer = io.BytesIO()
    torch.save([text, tensors], buffer)
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
        text, tensors = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return decoded(json.loads(text), lambda name: tensors[int(name)])
    except Exception as failed:  # of any class, where bytes are none of torch's
        raise ShardwrightError(f"a message cannot be read: {str(failed).partition(chr(10))[0][:200]}") from failed
