"""The comparison of the values that all processes of a training step must share.

They are compared before a step is compiled, and its batch in every step. Each process puts checksums on its devices,
and one small program, or where there are pipeline stages transfers, bring all of them to all. Before the first step of
a form every process waits for that; later comparisons are looked at when the next step begins.
"""

import hashlib
import sys
import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.backends.jax.machine.process_transfers import RowExchange
from shardwright.core.errors import PlanError

MOST_BYTES = 1 << 20
"""The most bytes of an array's contents that are summed up in every step, which takes 0.3 ms. In a larger array these
many are taken, evenly spread."""
COLUMNS = 16
"""The numbers in every row that goes by transfers. Rows of different calls have to be as long, to meet at all."""
FIX = "give all processes the same: the same script, plan, seed and global batch"


def text_sum(value: Any) -> int:
    """A checksum of a value whose text is the same in processes that agree."""
    return int.from_bytes(hashlib.sha256(str(value).encode()).digest()[:4], "little")


def array_sum(arrays: Sequence[Any]) -> int:
    """A checksum of the contents of arrays that this process has whole."""
    found = 0
    for array in arrays:
        if not getattr(array, "is_fully_addressable", True):
            if not array.is_fully_replicated:
                continue
            array = array.addressable_data(0)
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        held = np.ascontiguousarray(array).reshape(-1)
        if held.nbytes > MOST_BYTES:
            held = np.ascontiguousarray(held[:: -(-held.nbytes // MOST_BYTES)])
        found = zlib.crc32(held.view(np.uint8).data, found)
    return found


def versions() -> str:
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    return ", ".join(f"{name} {getattr(sys.modules.get(name), '__version__', '')}" for name in names)


class Agreement:
    """A comparison of checksums over the processes of a mesh. It does nothing at all where there is one process."""

    def __init__(self, devices: Sequence[jax.Device], *, by_transfers: bool = False) -> None:
        """by_transfers: the sums go from process to process as pipeline stages' arrays do, and not by a collective. On
        CPUs a collective holds a thread for every device until all processes have come to it, and what the others wait
        for may need that thread."""
        self.devices = list(devices)
        self.processes = [device.process_index for device in self.devices]
        self.alone = len(set(self.processes)) == 1
        self.pending: deque[tuple[tuple[str, ...], Any]] = deque()
        self.by_transfers = by_transfers and not self.alone
        self._exchange = RowExchange(self.devices) if self.by_transfers else None
        if self._exchange is not None:
            self.processes = list(self._exchange.processes)
        elif not self.alone:
            mesh = Mesh(np.array(self.devices), "all")
            self._own = NamedSharding(mesh, PartitionSpec("all"))
            self._gather = jax.jit(lambda sums: sums, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def compare(self, sums: Mapping[str, int], *, wait: bool) -> None:
        """Compare what this process has with all others. ``wait``: until they have come here too; otherwise what
        differs is an error of the next call, the same in all processes. Raises PlanError, naming what differs and the
        processes."""
        if self.alone:
            return
        numbers = [*sums.values(), *[0] * (COLUMNS - len(sums))] if self.by_transfers else list(sums.values())
        row = np.array([numbers], np.uint32).view(np.int32)
        if self._exchange is not None:
            self.pending.append((tuple(sums), self._exchange(row[0])))
            self.settle(0 if wait else 1)
            return
        shape = (len(self.devices), len(sums))
        own = jax.make_array_from_callback(shape, self._own, lambda index: row)
        self.pending.append((tuple(sums), self._gather(own)))
        self.settle(0 if wait else 1)

    def settle(self, left: int = 0) -> None:
        """Look at all comparisons but the last ``left``."""
        while len(self.pending) > left:
            names, found = self.pending.popleft()
            self._require(names, np.asarray(found.addressable_data(0)))

    def _require(self, names: Sequence[str], found: np.ndarray) -> None:
        for column, name in enumerate(names):
            by_process = dict(zip(self.processes, found[:, column].tolist(), strict=True))
            if len(set(by_process.values())) > 1:
                usual = Counter(by_process.values()).most_common(1)[0][0]
                others = sorted(process for process, value in by_process.items() if value != usual)
                self.pending.clear()
                raise PlanError(
                    f"the processes do not have the same {name}: of {len(by_process)}, process "
                    f"{', '.join(map(str, others))} differs from process "
                    f"{min(p for p, v in by_process.items() if v == usual)} (this is process {jax.process_index()}); "
                    f"{FIX}"
                )
