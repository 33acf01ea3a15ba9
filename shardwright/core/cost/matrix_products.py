"""Seconds of a matrix product of a given shape: tiles, waves of tiles over the compute units, depth, the roofline.

A product of m × k by k × n is cut into tiles of the result; tiles that hang over the edge cost a whole one, and the
last wave over the compute units costs a whole one too (NVIDIA, "Matrix Multiplication Background User's Guide",
sections 2 to 4: tile and wave quantisation). A tile takes the time of its k contracted entries and of a fixed depth
more, for filling its pipeline and writing its result. As libraries do, the best of a few tile shapes and of splitting k
over several tiles is taken.
"""

import math
from functools import lru_cache

from shardwright.core.cluster.hardware.device import Device, MeasuredProduct
from shardwright.core.cluster.hardware.measurements import rate_of

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.82), (64, 128, 0.82), (64, 64, 0.66))
"""(rows, columns, share of the largest tile's rate). Prior: operands move once per tile, so a tile's rate falls with
1/rows + 1/columns; the shares are those of the guide's figure on tile sizes, rounded."""

SPLITS = (1, 2, 4, 8)
"""The numbers of parts into which the contracted dim may be cut. Prior: what cuBLAS offers."""


def product_s(device: Device, precision: str, batches: int, m: int, n: int, k: int, size_bytes: float) -> float:
    """Seconds of ``batches`` products of m × k by k × n that read and write ``size_bytes`` in all, launch excluded.

    The longer of compute and memory traffic (the roofline, doi:10.1145/1498765.1498785). A device without
    ``compute_units`` computes at its peak × efficiency whatever the shape.
    """
    if device.measured_products:
        rate = _measured_rate(device.measured_products, precision, m, n, k)
        if rate is not None:  # as measured, memory traffic and all
            return 2.0 * batches * m * n * k / rate
    peak = device.flops_per_s(precision) * device.matmul_efficiency
    bandwidth = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    return max(
        _compute_s(peak, bandwidth, device.compute_units or 0, device.tile_depth or 0.0, batches, m, n, k),
        size_bytes / bandwidth,
    )


@lru_cache(maxsize=65536)
def _measured_rate(products: tuple[MeasuredProduct, ...], precision: str, m: int, n: int, k: int) -> float | None:
    """FLOPs per second by the measured products; None where none is of that precision."""
    known = {(p.m, p.n, p.k): p.flops_per_s for p in products if p.precision == precision}
    return rate_of(known, m, n, k) if known else None


@lru_cache(maxsize=65536)
def _compute_s(peak: float, bandwidth: float, units: int, depth: float, batches: int, m: int, n: int, k: int) -> float:
    if not units:
        return 2.0 * batches * m * n * k / peak
    best = math.inf
    for rows, columns, rate in TILES:
        tiles = batches * -(-m // rows) * -(-n // columns)
        for pieces in SPLITS:
            if pieces > 1 and k // pieces < 256:
                break
            waves = -(-tiles * pieces // units)
            one = 2.0 * rows * columns * (k / pieces + depth) * units / (peak * rate)
            merged = 4.0 * batches * m * n * (pieces + 1) / bandwidth if pieces > 1 else 0.0
            best = min(best, waves * one + merged)
    return best
