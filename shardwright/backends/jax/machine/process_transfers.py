"""Arrays on their way between the devices of several processes.

An array goes from a device of one process to a device of another by one of `carriers`: `jax.device_put`, which on CPUs
needs a socket that is named before the backend starts (`open_socket`, which `rendezvous.init` calls), or else a
compiled `ppermute`. Either way every process goes through all transfers in one order, whether it has an end of them or
not: what all of them do follows from shardings alone, which are the same in all.

An array without a shard in this process is *absent* here: it has a shape, a dtype and a sharding, and no data.
"""

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.backends.jax.machine.carriers import Carrier, by_device_put, by_ppermute, on
from shardwright.core.errors import MissingCapabilityError

Index = tuple[tuple[int, int], ...]
"""The part of an array that a device holds: the start and the end in every dim."""


class Way(NamedTuple):
    """The hops that bring an array from one sharding to another."""

    stays: tuple[jax.Device, ...]
    """The target's devices that hold their part already."""
    far: tuple[tuple[jax.Device, jax.Device], ...]
    """The (source, target) devices of different processes: all processes make these calls."""
    near: tuple[tuple[jax.Device, jax.Device], ...]
    """The (source, target) devices of one process. The source may be the target of a far hop."""
    shard_shape: tuple[int, ...]


def processes_of(devices: Sequence[jax.Device]) -> set[int]:
    """The processes that have a device of these."""
    return {device.process_index for device in devices}


def several_processes(devices: Sequence[jax.Device]) -> bool:
    """Whether devices belong to more than one process."""
    return len(processes_of(devices)) > 1


def require_threads(stage: int, devices: Sequence[jax.Device]) -> None:
    """Raise MissingCapabilityError for a stage on the CPU devices of several processes where JAX has too few threads. A
    collective holds a thread for every device of this process until the other processes have come to it, and what
    they wait for takes one more."""
    threads = os.environ.get("NPROC", "") or str(os.cpu_count() or 1)
    own = len(jax.local_devices())
    if devices[0].platform != "cpu" or not several_processes(devices) or not threads.isdigit() or int(threads) > own:
        return
    raise MissingCapabilityError(
        f"stage {stage} lies on CPU devices of {len(processes_of(devices))} processes, and JAX has {threads} threads "
        f"for the {own} devices of this one: where all of them wait in a collective, none is left for what other "
        f"processes wait for. Set the environment variable NPROC={own + 2} before JAX is first used, or give each "
        "stage the devices of one process, by the order of devices="
    )


@lru_cache(maxsize=4096)
def is_here(sharding: jax.sharding.Sharding) -> bool:
    """Whether this process has a device of a sharding."""
    return bool(sharding.addressable_devices)


def absent(aval: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array of which this process has no shard."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        inner = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        keys: jax.Array = jax.random.wrap_key_data(absent(inner, sharding), impl=jax.random.key_impl(aval))
        return keys
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, [], dtype=aval.dtype)


def placed(value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """A value that every process has whole, at a sharding. No process waits for another."""
    if sharding.is_fully_addressable:
        found: jax.Array = jax.device_put(value, sharding)
        return found
    held = np.asarray(value)
    return jax.make_array_from_callback(held.shape, sharding, lambda index: held[index], dtype=held.dtype)


def carrier() -> Carrier:
    """The way that arrays go between processes on this platform, as it was started."""
    return by_device_put if jax.default_backend() != "cpu" or _socket() else by_ppermute


def require_carrier(stage: int, devices: Sequence[jax.Device]) -> None:
    """Raise MissingCapabilityError for a stage on the devices of several processes where arrays go between these by
    collectives, which would meet with the stage's own in an order that differs from process to process; and for any
    stage where there are no collectives either."""
    begin = (
        "begin with sw.init(...) in place of jax.distributed.initialize, or set jax_cross_host_transfer_socket_address "
        "to this host's address and a free port, before JAX's devices are used"
    )
    if carrier() is by_device_put:
        return
    if not jax.config.values.get("jax_cpu_collectives_implementation"):
        raise MissingCapabilityError(
            "the plan's stages lie on the devices of several processes, and JAX on CPUs has neither a socket for "
            f"arrays between processes nor collectives (jax_cpu_collectives_implementation): {begin}"
        )
    if several_processes(devices):
        raise MissingCapabilityError(
            f"stage {stage} lies on the devices of {len(processes_of(devices))} processes, and without a socket arrays "
            f"go between processes by collectives, which would get in the way of the stage's own: {begin}; or give "
            "each stage the devices of one process, by the order of devices=; or, where stages are alike, run them as "
            "one program (one_program=True)"
        )


def open_socket(host: str, port: int) -> None:
    """Name the socket for arrays between processes, before the backend starts, where the platform may be CPUs and the
    user has named none. Connections are made at ``host`` alone."""
    platforms = jax.config.values.get("jax_platforms") or "cpu"
    if "cpu" not in platforms.split(",") or _socket():
        return
    at = f"[{host}]" if ":" in host else host
    jax.config.update("jax_cross_host_transfer_socket_address", f"{at}:{port}")
    jax.config.update("jax_cross_host_transport_addresses", ",".join([f"{at}:0"] * 4))


def _socket() -> str:
    found: str = jax.config.values.get("jax_cross_host_transfer_socket_address") or ""
    return found


# --- moving


def across(
    arrays: Sequence[jax.Array], targets: Sequence[NamedSharding], *, from_state: bool = False
) -> list[jax.Array]:
    """Arrays at other shardings, whichever processes have them. Every process calls it with the same arrays in the same
    order; those that are absent here give results that are, unless the target is here.

    from_state: the arrays may be donated or deleted after the call. Copies of them are sent then, as JAX reads what it
    carries to another process when that asks for it, and does not keep it from being donated until then."""
    if not arrays:
        return []
    found: list[Any] = [None] * len(arrays)
    moved: list[tuple[int, jax.Array, Way, dict[jax.Device, Any]]] = []
    for position, (array, target) in enumerate(zip(arrays, targets, strict=True)):
        if array.sharding == target:
            found[position] = array
            continue
        data = jax.random.key_data(array) if _is_key(array) else array
        way = way_of(data.shape, data.sharding, target)
        if way is None:
            data = _resharded(data, target)
            way = way_of(data.shape, data.sharding, target)
            assert way is not None
        held = {shard.device: shard.data for shard in data.addressable_shards}
        moved.append((position, data, way, held))
    _hop_far(moved, copies=from_state)
    _hop_near(moved)
    for position, data, _, held in moved:
        target = targets[position]
        own = [held[device] for device in target.addressable_devices]
        made: jax.Array = jax.make_array_from_single_device_arrays(data.shape, target, own, dtype=data.dtype)
        given = arrays[position]
        found[position] = jax.random.wrap_key_data(made, impl=jax.random.key_impl(given)) if _is_key(given) else made
    return found


def _hop_far(moved: Sequence[tuple[int, jax.Array, Way, dict[jax.Device, Any]]], *, copies: bool) -> None:
    """Make the hops of all arrays between processes, those between the same two devices by one call. Every process goes
    through all of them: JAX sorts what one `device_put` carries by devices, in an order that differs between processes.
    """
    carry = carrier()
    pairs: dict[tuple[jax.Device, jax.Device], list[tuple[dict[jax.Device, Any], jax.Array]]] = {}
    for _, data, way, held in moved:
        for source, target in way.far:
            piece = held.get(source)
            if piece is None:
                piece = _absent_piece(way.shard_shape, data.dtype, source)
            elif copies and carry is by_device_put:  # the other waits until all is read
                piece = jnp.copy(piece)
            pairs.setdefault((source, target), []).append((held, piece))
    for (source, target), pieces in pairs.items():
        arrays = carry([piece for _, piece in pieces], source, target)
        if target.process_index == jax.process_index():
            for (held, _), array in zip(pieces, arrays, strict=True):
                held[target] = array


def _hop_near(moved: Sequence[tuple[int, jax.Array, Way, dict[jax.Device, Any]]]) -> None:
    """Make the hops of all arrays within this process, by one call."""
    landed = [
        (held, source, target)
        for _, _, way, held in moved
        for source, target in way.near
        if target.process_index == jax.process_index()
    ]
    given = [held[source] for held, source, _ in landed]
    arrays = jax.device_put(given, [on(target) for _, _, target in landed]) if landed else []
    for (held, _, target), array in zip(landed, arrays, strict=True):
        held[target] = array


@lru_cache(maxsize=4096)
def _absent_piece(shape: tuple[int, ...], dtype: Any, device: jax.Device) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, on(device), [], dtype=dtype)


@lru_cache(maxsize=65536)
def way_of(shape: tuple[int, ...], source: jax.sharding.Sharding, target: jax.sharding.Sharding) -> Way | None:
    """The hops from one sharding to another; None where a device of the target wants a part that no device of the
    source holds as such. A part goes to a process once."""
    holders: dict[Index, list[jax.Device]] = {}
    held_at: Mapping[Any, Any] = source.devices_indices_map(shape)
    for holder, held_slices in held_at.items():
        holders.setdefault(_index(held_slices, shape), []).append(holder)
    stays: list[jax.Device] = []
    far: list[tuple[jax.Device, jax.Device]] = []
    near: list[tuple[jax.Device, jax.Device]] = []
    arrived: dict[tuple[Index, int], jax.Device] = {}
    turn: dict[Index, int] = {}
    placed_at: Mapping[Any, Any] = target.devices_indices_map(shape)
    for device, slices in placed_at.items():
        index = _index(slices, shape)
        held = holders.get(index)
        if held is None:
            return None
        local = [other for other in held if other.process_index == device.process_index]
        if device in held:
            stays.append(device)
        elif local:
            near.append((local[0], device))
        elif (index, device.process_index) in arrived:
            near.append((arrived[index, device.process_index], device))
        else:
            turn[index] = turn.get(index, -1) + 1
            far.append((held[turn[index] % len(held)], device))
            arrived[index, device.process_index] = device
    return Way(tuple(stays), tuple(far), tuple(near), source.shard_shape(shape))


def _index(slices: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(each.indices(size)[:2] for each, size in zip(slices, shape, strict=True))


def _is_key(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _resharded(array: jax.Array, target: NamedSharding) -> jax.Array:
    """An array split on its own devices as the target splits it, or whole where their meshes differ."""
    source = array.sharding
    assert isinstance(source, NamedSharding)
    same = source.mesh.axis_names == target.mesh.axis_names and source.mesh.axis_sizes == target.mesh.axis_sizes
    at = NamedSharding(source.mesh, target.spec if same else PartitionSpec())
    return _reshard(at)(array) if is_here(at) else absent(array, at)


@lru_cache(maxsize=1024)
def _reshard(at: NamedSharding) -> Any:
    return jax.jit(lambda array: array, out_shardings=at)


def on_own_device(tree: Any, devices: Sequence[jax.Device]) -> Any:
    """The arrays of a tree whole on the first of this process's ``devices``, whichever processes have them. Every
    process calls it, and gets all of them."""
    at = NamedSharding(jax.sharding.Mesh(first_devices(devices), "process"), PartitionSpec())
    leaves, structure = jax.tree.flatten(tree)
    moved = across(leaves, [at] * len(leaves), from_state=True)
    return jax.tree.unflatten(structure, [array.addressable_data(0) for array in moved])


class RowExchange:
    """The exchange of a row of numbers between processes: the rows of all of them go to the first, and from it to all.
    No process waits for another until it looks at what it got."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        """devices: of all processes; the first one of each takes part."""
        first = first_devices(devices)
        self.processes = [device.process_index for device in first]
        """The processes, in the order of their rows."""
        self._ends = [NamedSharding(jax.sharding.Mesh([device], "process"), PartitionSpec()) for device in first]
        self._all = NamedSharding(jax.sharding.Mesh(first, "process"), PartitionSpec())
        self._stack = jax.jit(_stacked, out_shardings=self._ends[0])

    def __call__(self, row: np.ndarray) -> jax.Array:
        """The rows of all processes, [process, number], on a device of this process."""
        rows = [placed(row, at) if is_here(at) else absent(row, at) for at in self._ends]
        home = self._ends[0]
        gathered = across(rows, [home] * len(rows))
        shape = jax.ShapeDtypeStruct((len(rows), *row.shape), row.dtype)
        found = self._stack(gathered) if is_here(home) else absent(shape, home)
        (everywhere,) = across([found], [self._all])
        own: jax.Array = everywhere.addressable_data(0)
        return own


def _stacked(rows: list[jax.Array]) -> jax.Array:
    return jnp.stack(rows)


def first_devices(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """The first device of every process, in the order of the processes."""
    found: dict[int, jax.Device] = {}
    for device in devices:
        found.setdefault(device.process_index, device)
    return [found[process] for process in sorted(found)]
