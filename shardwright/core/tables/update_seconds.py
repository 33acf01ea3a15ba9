"""The time of an optimizer's step, by the bytes that it reads and writes."""

from shardwright.core.cluster.hardware import Device
from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.tables.optimizers import optimizer_of

HOST_UPDATE_BYTES_PER_S = 20e9
"""The bytes per second that an optimizer on the host of a device reads and writes. Prior: torch's Adam in fp32 on the
cores that a device of a node of eight has for itself, whose memory gives 25 to 50e9."""


def touched_bytes(optimizer: str, precision: str, gradient_precision: str | None) -> int:
    """The bytes that the step on one parameter entry reads and writes.

    The optimizer reads parameter, gradient and states, and writes parameter and states, in fp32. In mixed precision the
    16-bit parameter is written after that, and the gradient is first read in 16 bits and written in 32. Gradients that
    add up in 32 bits are kept: cleared, unscaled in place, read for their norm and clipped in place.
    """
    width, mixed = PRECISION_BYTES[precision], 0
    if width < 4:
        mixed = width + (4 + 24 if gradient_precision == "fp32" else width + 4)
    return 4 * (3 + 2 * optimizer_of(optimizer).states) + mixed


def update_rate(device: Device, *, on_host: bool = False) -> float:
    """The bytes per second that the optimizer reads and writes."""
    rate = device.optimizer_bandwidth_bytes_per_s
    return min(rate, HOST_UPDATE_BYTES_PER_S) if on_host and device.kind != "cpu" else rate
