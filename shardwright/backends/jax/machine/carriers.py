"""The two ways that arrays go from a device of one process to a device of another.

*By device_put*: JAX carries them itself, on GPUs and TPUs, and on CPUs where a socket was named before the backend
started. It pairs these transfers by their number, so every process makes every call. No call waits for another process,
and no thread that computes is taken.

*By ppermute*: on CPUs without that socket, as after a plain `jax.distributed.initialize`. The processes of both ends
enter one compiled program over the two devices, and others take no part. It holds a thread of those that run programs
until both have come, and what both processes enter has to be entered in one order: so each call waits until its program
has ended. A process has then one transfer under way, all processes go through the transfers in one order, and
`core.schedule.process_order` proves that schedules end even so.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

Carrier = Callable[[Sequence[jax.Array], jax.Device, jax.Device], Sequence[jax.Array]]
"""A function that brings arrays of one device to another, both of different processes. Elsewhere than at the source the
arrays have no data, and elsewhere than at the target the results are of no use."""


def by_device_put(arrays: Sequence[jax.Array], source: jax.Device, target: jax.Device) -> Sequence[jax.Array]:
    """Arrays at the target. Every process makes the call."""
    del source
    found: list[jax.Array] = jax.device_put(list(arrays), [on(target)] * len(arrays))
    return found


def by_ppermute(arrays: Sequence[jax.Array], source: jax.Device, target: jax.Device) -> Sequence[jax.Array]:
    """Arrays at the target, once they are there. A process without either device does nothing."""
    own = jax.process_index()
    if own not in (source.process_index, target.process_index):
        return arrays
    here = source if own == source.process_index else target
    ends = NamedSharding(jax.sharding.Mesh([source, target], "end"), PartitionSpec("end"))
    joined = []
    for array in arrays:
        rows, *rest = array.shape or (1,)  # the two ends are joined along the first dim
        if here is source:
            part = array if array.shape else array.reshape(1)
        else:
            part = jax.device_put(np.zeros((rows, *rest), array.dtype), on(target))
        joined.append(jax.make_array_from_single_device_arrays((2 * rows, *rest), ends, [part]))
    moved = jax.block_until_ready(_first_to_second(ends)(joined))
    parts = [each.addressable_shards[0].data for each in moved]
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


@lru_cache(maxsize=1024)
def _first_to_second(ends: NamedSharding) -> Any:
    """The program that hands the first end's part of each array to the second end."""
    hand_on = partial(jax.lax.ppermute, axis_name="end", perm=[(0, 1)])

    def run(arrays: list[jax.Array]) -> list[jax.Array]:
        return [hand_on(array) for array in arrays]

    return jax.jit(jax.shard_map(run, mesh=ends.mesh, in_specs=ends.spec, out_specs=ends.spec))


@cache
def on(device: jax.Device) -> SingleDeviceSharding:
    """The sharding of one device."""
    return SingleDeviceSharding(device)
