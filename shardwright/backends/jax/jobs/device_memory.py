"""What one device holds of jobs: the arrays that are put there, those that programs make, and what programs take for a
while, all counted, and never more than the budget."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.core.errors import PlanError
from shardwright.core.events.resources import Memory
from shardwright.core.values.amounts import bytes_text

Host = np.ndarray[Any, Any] | jax.Array
"""An array on the host; random keys, which NumPy has no dtype for, are JAX's own."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedProgram:
    """A compiled program on one device."""

    run: jax.stages.Compiled
    donates: tuple[int, ...]
    beside_bytes: int
    """Bytes that it takes beside its operands: results that take no operand's memory, and temporary values."""


class DeviceMemory:
    """The arrays of jobs on one device. One thread uses it.

    Args:
        budget_bytes: the most that the device may hold of jobs.
    """

    def __init__(self, device: jax.Device, budget_bytes: int) -> None:
        self.device, self.budget_bytes = device, budget_bytes
        self.use = Memory(budget_bytes)
        self.peak_bytes = 0
        self.job = -1
        """The job whose pass runs."""
        self._held: dict[int, tuple[int, int, jax.Array]] = {}
        """The job, the bytes and the array, by the array's identity."""

    @cached_property
    def at(self) -> NamedSharding:
        """The sharding of arrays on the device."""
        return sharding_of(self.device)

    def put(self, arrays: Sequence[Host]) -> list[jax.Array]:
        """Copies of arrays on the device. Raises PlanError where the budget has no room for them."""
        if not arrays:
            return []
        self._require(sum(map(size_bytes, arrays)))
        placed: list[jax.Array] = jax.device_put(list(arrays), self.at, may_alias=False)
        for array in placed:
            self._hold(array)
        return placed

    def run(self, program: LoadedProgram, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of a program, once they are there. What it donates is gone. Raises PlanError where the budget has
        no room for what it makes."""
        self._require(program.beside_bytes)
        made = list(program.run(*operands))
        jax.block_until_ready(made)
        self._note(program.beside_bytes)
        self.free([operands[index] for index in program.donates])
        for array in made:
            self._hold(array)
        return made

    def fetch(self, arrays: Sequence[jax.Array]) -> list[Host]:
        """Copies of arrays on the host."""
        return [on_host(array) for array in arrays]

    def take(self, arrays: Sequence[jax.Array]) -> list[Host]:
        """Copies of arrays on the host; the device holds them no longer."""
        found = self.fetch(arrays)
        self.free(arrays)
        return found

    def free(self, arrays: Iterable[jax.Array]) -> None:
        """Hold arrays no longer."""
        for array in arrays:
            held = self._held.pop(id(array), None)
            if held is not None:
                self.use.take(time.perf_counter(), -held[1])
            if not array.is_deleted():
                array.delete()

    def release(self, job: int) -> None:
        """Hold nothing of a job any longer."""
        self.free([array for owner, _, array in self._held.values() if owner == job])

    def _hold(self, array: jax.Array) -> None:
        size = size_bytes(array)
        self._held[id(array)] = self.job, size, array
        self.use.take(time.perf_counter(), size)
        self.peak_bytes = max(self.peak_bytes, self.use.used_bytes)

    def _note(self, more_bytes: int) -> None:
        """Note what a program took for a while."""
        self.peak_bytes = max(self.peak_bytes, self.use.used_bytes + more_bytes)
        now = time.perf_counter()
        self.use.take(now, more_bytes)
        self.use.take(time.perf_counter(), -more_bytes)

    def _require(self, more_bytes: int) -> None:
        over = self.use.used_bytes + more_bytes - self.budget_bytes
        if over > 0:
            raise PlanError(
                f"the device would hold {bytes_text(self.use.used_bytes + more_bytes)}, {bytes_text(over)} more than "
                f"the budget of {bytes_text(self.budget_bytes)}: plan the jobs with a larger budget_bytes, or "
                f"with smaller microbatches"
            )


def sharding_of(device: jax.Device) -> NamedSharding:
    """The sharding of arrays on one device."""
    return NamedSharding(jax.sharding.Mesh(np.array([device], dtype=object), ("one",)), PartitionSpec())


def size_bytes(array: Any) -> int:
    """Bytes of an array's entries."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype) if isinstance(array, np.ndarray) else array.dtype
    return int(array.size) * int(getattr(dtype, "itemsize", 8))


def on_host(array: Any) -> Host:
    """A copy of an array in the host's memory."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.extended):
        kept: jax.Array = jax.device_put(jnp.array(array, copy=True), jax.local_devices(backend="cpu")[0])
        return kept
    return np.array(array, copy=True)
