"""Numbers of hand-written files that cannot be in the unit that their names state."""

from collections.abc import Mapping

_BYTES, _SECONDS, _SHARE = "bytes", "seconds", "a share of 1 (0.9 for 90%)"
_BYTES_PER_SECOND, _FLOPS_PER_SECOND = "bytes per second", "FLOPs per second"

_PLAUSIBLE: dict[str, tuple[float, float, str]] = {
    "memory_bytes": (1e8, 1e14, _BYTES),
    "reserved_memory_bytes": (0.0, 1e12, _BYTES),
    "host_memory_bytes": (0.0, 1e14, _BYTES),
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
    "attention_efficiency": (1e-3, 1.0, _SHARE),
    "efficiency": (1e-3, 1.0, _SHARE),
    "compute_units": (1.0, 1e5, "multiprocessors"),
    "tile_depth": (0.0, 4096.0, "contracted entries"),
    "price_usd_per_hour": (0.0, 1e4, "US dollars for one device and hour"),
}
"""The range of each constant outside which it is almost surely in another unit (80 for 80 GB, 400 for 400 Gb/s,
5 for 5 µs), and its unit."""


_MEANT: dict[str, tuple[tuple[float, str], ...]] = {
    _BYTES: ((1e9, "GB"),),
    _BYTES_PER_SECOND: ((1e9, "GB/s"), (1e9 / 8, "Gb/s")),
    _FLOPS_PER_SECOND: ((1e12, "TFLOP/s"),),
    _SECONDS: ((1e-6, "µs"),),
    _SHARE: ((1e-2, "percent"),),
}
"""The units in which data sheets give such a number, and their sizes."""

_LEAST_RESERVED_BYTES = 1e6
"""No runtime reserves as little as that, if it reserves anything."""

_FLOPS_PER_BYTE = 0.5, 2e4
"""The range of a device's peak over its memory bandwidth. One core of a CPU has about 7, GPUs and TPUs 20 to 600."""

_LINK_OVER_MEMORY = 10.0
"""No link carries more than so many times what the memory at its end gives or takes; messages that stay in a cache may
come over the bandwidth of the memory itself."""


def implausible(path: str, value: object) -> str | None:
    """Why ``value`` cannot be in the unit that its name, somewhere in ``path``, states; None where it can."""
    name = next((part for part in reversed(path.split(".")) if part in _PLAUSIBLE), None)
    if name is None or not isinstance(value, int | float):
        return None
    low, high, unit = _PLAUSIBLE[name]
    if name == "reserved_memory_bytes" and 0 < value < _LEAST_RESERVED_BYTES:
        low = _LEAST_RESERVED_BYTES
    if low <= value <= high:
        return None
    meant = [
        f"; {value:g} {short} are {value * size:g}"
        for size, short in _MEANT.get(unit, ())
        if low <= value * size <= high
    ]
    return f"{path}: {value:g} is not plausible, expected {low:g} to {high:g}; the unit is {unit}{''.join(meant)}"


def inconsistent(numbers: Mapping[str, float], peaks: Mapping[str, float], products: Mapping[str, float]) -> list[str]:
    """Why constants of one device cannot be in one another's units: each peak beside the memory bandwidth, and beside
    the fastest measured product of its precision; and the link to the host beside the memory."""
    found = []
    bandwidth = numbers["memory_bandwidth_bytes_per_s"]
    low, high = _FLOPS_PER_BYTE
    off = {precision: peak for precision, peak in peaks.items() if not low <= peak / bandwidth <= high}
    if off:
        precision, peak = next(iter(off.items()))
        others = f" (and {', '.join(list(off)[1:])})" if len(off) > 1 else ""
        found.append(
            f"peak_flops_per_s.{precision}{others}: {peak:g} is {peak / bandwidth:.3g} FLOPs for each byte of "
            f"memory_bandwidth_bytes_per_s, {bandwidth:g}; expected {low:g} to {high:g}: one is in another unit"
        )
    for precision, fastest in products.items():
        if precision not in peaks:
            found.append(f"products: {precision} was measured, and peak_flops_per_s gives no peak of it: add one")
        elif fastest > peaks[precision] * (1 + 1e-6):
            found.append(
                f"peak_flops_per_s.{precision}: {peaks[precision]:g} is below the {fastest:g} that a measured product "
                f"reached; expected at least that"
            )
    host = numbers["host_link_bandwidth_bytes_per_s"]
    found += faster_than_memory("host_link_bandwidth_bytes_per_s", host, bandwidth)
    return found


def faster_than_memory(path: str, value: float, bandwidth: float) -> list[str]:
    """Why a link's bandwidth cannot be: it is far above that of the memory that it reads."""
    most = _LINK_OVER_MEMORY * bandwidth
    if value <= most:
        return []
    return [
        f"{path}: {value:g} is not plausible beside memory_bandwidth_bytes_per_s, {bandwidth:g}, expected at most "
        f"{most:g}: one of the two is in another unit"
    ]
