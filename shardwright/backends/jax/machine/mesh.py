"""The JAX mesh of a `core.layout.mesh.Mesh`."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from shardwright.core.errors import ClusterError, PlanError
from shardwright.core.layout.mesh import Mesh
from shardwright.core.plan.plan import Plan

NO_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())
GROUPS = "dp_groups"
"""The outer part of the data axis where groups of replicas share state: it counts the groups, and "dp" the replicas of
one group, which are neighbours (MiCS, arXiv 2205.00119)."""
DataAxes = str | tuple[str, str]
"""The mesh axes of all replicas, as an entry of a PartitionSpec."""


def data_axes(names: Collection[str]) -> DataAxes:
    """The axes of all replicas on a mesh with axes of these names."""
    return (GROUPS, "dp") if GROUPS in names else "dp"


def mesh_of(plan: Plan) -> Mesh:
    """The mesh of a plan, whose data axis is two axes where a part of the replicas shares state."""
    decision = plan.decision
    group = decision.shard_group
    if not decision.shard or group in (None, decision.dp):
        return plan.mesh
    names: list[str] = []
    sizes: list[int] = []
    for name, size in zip(plan.mesh.names, plan.mesh.sizes, strict=True):
        names += [GROUPS, name] if name == "dp" else [name]
        sizes += [size // group, group] if name == "dp" else [size]
    return Mesh(tuple(names), tuple(sizes))


def bind(mesh: Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Lay a mesh over ``devices`` (default: all of ``jax.devices()``) in rank order.

    Raises ClusterError when their number is not the mesh's.
    """
    given = require_devices(devices)
    if len(given) != mesh.size:
        axes = " × ".join(f"{name} {size}" for name, size in zip(mesh.names, mesh.sizes, strict=True))
        fix = (
            f"give {mesh.size} of them with devices=jax.devices()[:{mesh.size}]"
            if len(given) > mesh.size
            else "plan for fewer, or on CPU set XLA_FLAGS=--xla_force_host_platform_device_count"
            f"={mesh.size} before JAX is first used"
        )
        raise ClusterError(f"the plan is for {mesh.size} devices ({axes}), and there are {len(given)}: {fix}")
    return jax.sharding.Mesh(np.array(given, dtype=object).reshape(mesh.sizes), mesh.names)


def require_devices(devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """The devices given, or all of them. Raises ClusterError for anything but a list of JAX's devices."""
    if devices is None:
        return list(jax.devices())
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise ClusterError(f"devices is {devices!r:.80}: give a list of JAX's devices, as jax.devices() is")
    given = list(devices)
    for device in given:
        if not isinstance(device, jax.Device):
            raise ClusterError(f"devices holds {device!r:.80}: give JAX's devices, as jax.devices() lists them")
    return given


def require_own_device(devices: Sequence[jax.Device]) -> None:
    """Raise ClusterError where none of a plan's devices is this process's."""
    own = jax.process_index()
    if all(device.process_index != own for device in devices):
        raise ClusterError(
            f"none of the plan's {len(devices)} devices is of this process, {own} of {jax.process_count()}: give "
            "devices= with as many of each process, or jax.local_devices() where each trains by itself"
        )


def require_equal_shares(devices: Sequence[jax.Device]) -> None:
    """Raise ClusterError unless every process of the run has as many of a plan's devices."""
    counts = dict.fromkeys(range(jax.process_count()), 0)
    for device in devices:
        counts[device.process_index] += 1
    if len(set(counts.values())) == 1:
        return
    said = ", ".join(f"process {process} has {count}" for process, count in counts.items())
    share, rest = divmod(len(devices), len(counts))
    fix = (
        f"give devices= with {share} of each process, in the order of the processes"
        if not rest
        else f"plan for a number of devices that {len(counts)} processes divide"
    )
    raise ClusterError(
        f"the plan's {len(devices)} devices are not divided equally over the {len(counts)} processes of the run: "
        f"{said}; {fix}"
    )


def no_mesh() -> AbstractContextManager[Any]:
    """A context without a mesh. A plan has meshes of its own; one that the caller has set, of whatever axis types, is
    theirs alone."""
    try:
        return jax.set_mesh(NO_MESH)
    except ValueError as error:  # the only one: a program is being traced
        raise PlanError(
            "a training step was called inside jax.jit, jax.lax.scan or the like: it compiles itself; call it "
            "outside of them, in a Python loop"
        ) from error


def stages_of_process(plan: Plan, devices: Sequence[jax.Device]) -> list[int]:
    """The stages of a plan on this process's devices, where ``devices`` are those that the plan's mesh is laid over."""
    grid = np.array(devices).reshape(plan.mesh.sizes)
    along = plan.mesh.names.index("pp") if "pp" in plan.mesh.names else 0
    own = np.vectorize(lambda device: device.process_index == jax.process_index())(grid)
    ranks = {int(where[along]) for where in np.argwhere(own)}
    return [stage for stage, rank in enumerate(plan.build_schedule().placement) if rank in ranks]
