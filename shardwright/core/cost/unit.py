"""Seconds of a unit: the roofline of its products, the traffic of the rest, launches and tensor-axis collectives."""

from dataclasses import dataclass

from shardwright.core.cost.collectives import all_reduce_s
from shardwright.core.cost.work import UnitWork
from shardwright.core.hardware.device import Device
from shardwright.core.hardware.link import Link


@dataclass(frozen=True, slots=True)
class UnitCost:
    """One microbatch of one unit on one rank. Seconds and bytes."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    collective_s: float
    """The part of the above that is tensor-axis communication."""
    saved_bytes: int
    saved_selective_bytes: int
    entering_bytes: int
    largest_bytes: int
    parameter_elements: int
    """Entries of the parameters that the rank holds for this unit, tied ones included."""

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_grad_s + self.weight_grad_s


def unit_cost(
    work: UnitWork, device: Device, precision: str, *, degree: int = 1, link: Link | None = None, parameters: int = 0
) -> UnitCost:
    """Time of a unit's work on a device.

    A product takes the longer of its FLOPs at the device's peak × efficiency and its bytes at memory bandwidth ×
    efficiency (the roofline, doi:10.1145/1498765.1498785). The rest moves its bytes once in the forward pass and twice
    in the backward (values and gradients). Every kernel costs a launch.
    """
    peak = device.flops_per_s(precision) * device.matmul_efficiency
    bandwidth = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    forward = input_grad = weight_grad = 0.0
    for product in work.products:
        once = max(product.flops / peak, product.size_bytes / bandwidth)
        forward += once
        input_grad += once * product.backward_input
        weight_grad += once * product.backward_weight
    launches = work.kernels * device.kernel_launch_s
    forward += work.vector_bytes / bandwidth + launches
    input_grad += 2 * work.vector_bytes / bandwidth + launches
    collective = 0.0
    if degree > 1 and link is not None:
        ahead = sum(all_reduce_s(size, degree, link) for size in work.forward_reduced)
        back = sum(all_reduce_s(size, degree, link) for size in work.backward_reduced)
        forward, input_grad, collective = forward + ahead, input_grad + back, ahead + back
    return UnitCost(
        forward,
        input_grad,
        weight_grad,
        collective,
        work.saved_bytes,
        work.saved_selective_bytes,
        work.entering_bytes,
        work.largest_bytes,
        parameters,
    )
