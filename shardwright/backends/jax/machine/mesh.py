"""`core.layout.mesh.Mesh` over JAX devices."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from shardwright.core.errors import ClusterError
from shardwright.core.layout.mesh import Mesh


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
    """Those given, or all. Raises ClusterError for what is no list of JAX's devices."""
    if devices is None:
        return list(jax.devices())
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise ClusterError(f"devices is {devices!r:.80}: give a list of JAX's devices, as jax.devices() is")
    given = list(devices)
    for device in given:
        if not isinstance(device, jax.Device):
            raise ClusterError(f"devices holds {device!r:.80}: give JAX's devices, as jax.devices() lists them")
    return given
