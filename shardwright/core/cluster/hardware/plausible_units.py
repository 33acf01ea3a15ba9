"""Numbers of hand-written files that cannot be in the unit that their names state."""

from shardwright.core.errors import ClusterError

_BYTES, _SECONDS, _SHARE = "bytes", "seconds", "a share of 1 (0.9 for 90%)"
_BYTES_PER_SECOND, _FLOPS_PER_SECOND = "bytes per second", "FLOPs per second"

_PLAUSIBLE: dict[str, tuple[float, float, str]] = {
    "memory_bytes": (1e8, 1e14, _BYTES),
    "reserved_memory_bytes": (0.0, 1e12, _BYTES),
    "peak_flops_per_s": (1e8, 1e17, _FLOPS_PER_SECOND),
    "flops_per_s": (1e3, 1e17, _FLOPS_PER_SECOND),
    "memory_bandwidth_bytes_per_s": (1e7, 1e15, _BYTES_PER_SECOND),
    "host_link_bandwidth_bytes_per_s": (1e6, 1e14, _BYTES_PER_SECOND),
    "bandwidth_bytes_per_s": (1e5, 1e14, _BYTES_PER_SECOND),
    "kernel_launch_s": (0.0, 0.1, _SECONDS),
    "dispatch_s": (0.0, 0.1, _SECONDS),
    "latency_s": (0.0, 1.0, _SECONDS),
    "forward_s": (0.0, 1e4, _SECONDS),
    "backward_s": (0.0, 1e4, _SECONDS),
    "step_s": (0.0, 1e4, _SECONDS),
    "matmul_efficiency": (1e-3, 1.0, _SHARE),
    "memory_efficiency": (1e-3, 1.0, _SHARE),
    "vector_efficiency": (1e-3, 1.0, _SHARE),
    "optimizer_efficiency": (1e-3, 1.0, _SHARE),
    "efficiency": (1e-3, 1.0, _SHARE),
    "compute_units": (1.0, 1e5, "multiprocessors"),
    "tile_depth": (0.0, 4096.0, "contracted entries"),
    "price_usd_per_hour": (0.0, 1e4, "US dollars for one device and hour"),
}
"""The range of each constant outside which it is almost surely in another unit (80 for 80 GB, 400 for 400 Gb/s,
5 for 5 µs), and its unit."""


def check_plausible(source: str, path: str, value: object) -> None:
    """Raise ClusterError when ``value`` cannot be in the unit that its name, somewhere in ``path``, states."""
    name = next((part for part in reversed(path.split(".")) if part in _PLAUSIBLE), None)
    if name is None or not isinstance(value, int | float):
        return
    low, high, unit = _PLAUSIBLE[name]
    if not low <= value <= high:
        raise ClusterError(
            f"{source}: {path}: {value:g} is not plausible, expected {low:g} to {high:g}; the unit is {unit}"
        )
