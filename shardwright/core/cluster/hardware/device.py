"""The device that one rank computes on, and the profile that joins it to its usual links."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le, MinLen

from shardwright.core.cluster.hardware import check
from shardwright.core.cluster.hardware.frozen_mapping import Table
from shardwright.core.cluster.hardware.link import Link
from shardwright.core.errors import ClusterError, nearest

Kind = Literal["gpu", "tpu", "trainium", "cpu"]

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
"""The precisions of matrix products that a profile may give a peak for."""


def _require_precision(owner: str, precision: str) -> None:
    if precision not in PRECISIONS:
        raise ClusterError(f"{owner}: precision {precision!r} is not known; {nearest(str(precision), PRECISIONS)}")


@dataclass(frozen=True, slots=True)
class MeasuredProduct:
    """The rate at which one product of m × k by k × n ran. Raises ClusterError for sizes or a rate that cannot be."""

    precision: str
    m: Annotated[int, Ge(1)]
    n: Annotated[int, Ge(1)]
    k: Annotated[int, Ge(1)]
    flops_per_s: Annotated[float, Gt(0)]

    def __post_init__(self) -> None:
        owner = f"product {self.m} × {self.k} by {self.k} × {self.n}"
        _require_precision(owner, self.precision)
        for name in ("m", "n", "k"):
            check.whole(owner, name, getattr(self, name), at_least=1)
        check.positive(owner, "flops_per_s", self.flops_per_s)


@dataclass(frozen=True, slots=True)
class MeasuredUnit:
    """The measured time of one microbatch of one class of units of a model on one device.

    model: the framework and the digest of the model's structure.
    unit_class: the class, as a plan at that tensor degree tells units apart (`Costs.unit_classes`).
    tensor_degree: the number of ranks that shared the unit, collectives among them included; 1: it ran whole.
    layouts: the digest of the layouts by which they shared it (`op_layouts.digest`); "" where it ran whole.
    step_s: its part, by entries of the parameters of the fullest stage, of what a step took beside its microbatches and
        above what is counted for gradients and optimizer: handing out the batch, starting and ending.
    update_share: the time of the optimizer's step, as a share of what is counted for it: below 1 where a step took less
        than is counted, as small parameters stay in a cache.
    in_stages: whether it ran in a pipeline of several stages, not in one stage.
    idle_lent: the share of what idle ranks left unused that ranks at work got, in a pipeline whose ranks share a
        machine (`StageCosts`).
    form: the digest of the unit's ops without their sizes (`model.structure.unit_form`); "": not known. Units of the
        same form in models that were not measured take the same multiple of what is counted for them.
    counted_forward_s, counted_backward_s: what is counted for it without the measurement.
    parameter_elements: the entries of its parameters.

    Raises ClusterError for a count or a time that cannot be.
    """

    model: Annotated[str, MinLen(1)]
    unit_class: Annotated[int, Ge(0)]
    precision: str
    microbatch: Annotated[int, Ge(1)]
    forward_s: Annotated[float, Ge(0)]
    backward_s: Annotated[float, Ge(0)]
    tensor_degree: Annotated[int, Ge(1)] = 1
    layouts: str = ""
    step_s: Annotated[float, Ge(0)] = 0.0
    update_share: Annotated[float, Gt(0), Le(1)] = 1.0
    in_stages: bool = False
    idle_lent: Annotated[float, Ge(0), Le(1)] = 0.0
    form: str = ""
    counted_forward_s: Annotated[float, Ge(0)] = 0.0
    counted_backward_s: Annotated[float, Ge(0)] = 0.0
    parameter_elements: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        owner = f"unit class {self.unit_class} of model {self.model}"
        _require_precision(owner, self.precision)
        check.whole(owner, "unit_class", self.unit_class, at_least=0)
        check.whole(owner, "microbatch", self.microbatch, at_least=1)
        check.whole(owner, "tensor_degree", self.tensor_degree, at_least=1)
        check.whole(owner, "parameter_elements", self.parameter_elements, at_least=0)
        for name in ("forward_s", "backward_s", "step_s", "counted_forward_s", "counted_backward_s"):
            check.positive(owner, name, getattr(self, name), zero_allowed=True)
        check.positive(owner, "update_share", self.update_share, at_most=1.0)
        check.positive(owner, "idle_lent", self.idle_lent, zero_allowed=True, at_most=1.0)
        if self.idle_lent and not self.in_stages:
            raise ClusterError(f"{owner}: idle_lent={self.idle_lent} of a run in one stage, which has no idle time")


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one rank.

    memory_bytes: its whole memory; ``reserved_memory_bytes`` of it go to the driver, the runtime and the communication
        library before a model has any.
    peak_flops_per_s: dense peak of matrix products, by precision; a precision that is absent is not supported.
    memory_bandwidth_bytes_per_s: peak of its own memory.
    kernel_launch_s: the least that one op costs, however small.
    matmul_efficiency, memory_efficiency: the share of the peaks that large ops reach.
    host_link_bandwidth_bytes_per_s: the bandwidth to the host's memory, in one direction.
    compute_units: the multiprocessors that share out the tiles of a matrix product; None: no such rounding.
    tile_depth: the contracted entries that a tile's start and end cost, beside its own; None: nothing.
    vector_efficiency: the share of the memory bandwidth that everything but products reaches, its traffic counted as if
        chains of elementwise ops ran as one kernel each; None: memory_efficiency.
    dispatch_s: the host's time to issue one product, forward, and one such chain where ops are fused (an eager op takes
        a share of it); None: kernel_launch_s.
    attention_efficiency: the rate of attention in one kernel, every pair of positions counted, as a share of that of
        large products; None: a prior.
    optimizer_efficiency: the share of the memory bandwidth that an optimizer's step reaches, its traffic counted as if
        it were one kernel; None: memory_efficiency.
    measured_products: rates of products measured on this device, which stand in for peak, tiles and efficiency.
    measured_units: times of units of some models measured on this device, which stand in for the sum of their ops.
    host_memory_bytes: what the device has for itself of the host's memory; None when not known, and then no limit.
    price_usd_per_hour: the price of one device; None when not known; 0 for machines of one's own.
    origins: the source of each constant.

    Raises ClusterError when a constant is not positive and finite, or an efficiency is above 1.
    """

    name: str
    kind: Kind
    memory_bytes: int
    peak_flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    kernel_launch_s: float
    matmul_efficiency: float
    memory_efficiency: float
    host_link_bandwidth_bytes_per_s: float
    reserved_memory_bytes: int = 0
    compute_units: int | None = None
    tile_depth: float | None = None
    vector_efficiency: float | None = None
    dispatch_s: float | None = None
    attention_efficiency: float | None = None
    optimizer_efficiency: float | None = None
    measured_products: tuple[MeasuredProduct, ...] = ()
    measured_units: tuple[MeasuredUnit, ...] = ()
    host_memory_bytes: int | None = None
    price_usd_per_hour: float | None = None
    summary: str = field(default="", compare=False)
    origins: Mapping[str, str] = field(default_factory=Table, compare=False, repr=False)

    def __post_init__(self) -> None:
        owner = f"device {self.name!r}"
        if self.kind not in get_args(Kind):
            raise ClusterError(f"{owner}: kind {self.kind!r} is not known; {nearest(str(self.kind), get_args(Kind))}")
        check.whole(owner, "memory_bytes", self.memory_bytes, at_least=1)
        check.whole(owner, "reserved_memory_bytes", self.reserved_memory_bytes, at_least=0)
        if self.reserved_memory_bytes >= self.memory_bytes:
            raise ClusterError(
                f"{owner}: reserved_memory_bytes ({self.reserved_memory_bytes}) must be below memory_bytes "
                f"({self.memory_bytes})"
            )
        if self.peak_flops_per_s and not isinstance(self.peak_flops_per_s, Mapping):
            raise ClusterError(
                f"{owner}: peak_flops_per_s gives a peak for each precision, {{'bf16': NUMBER}}; "
                f"given {self.peak_flops_per_s!r}"
            )
        if not self.peak_flops_per_s:
            raise ClusterError(
                f"{owner}: peak_flops_per_s must name at least one of {', '.join(PRECISIONS)}; given none"
            )
        for precision, peak in self.peak_flops_per_s.items():
            _require_precision(owner, precision)
            check.positive(owner, f"peak_flops_per_s.{precision}", peak)
        check.positive(owner, "memory_bandwidth_bytes_per_s", self.memory_bandwidth_bytes_per_s)
        check.positive(owner, "kernel_launch_s", self.kernel_launch_s, zero_allowed=True)
        check.positive(owner, "matmul_efficiency", self.matmul_efficiency, at_most=1.0)
        check.positive(owner, "memory_efficiency", self.memory_efficiency, at_most=1.0)
        check.positive(owner, "host_link_bandwidth_bytes_per_s", self.host_link_bandwidth_bytes_per_s)
        if self.host_memory_bytes is not None:
            check.whole(owner, "host_memory_bytes", self.host_memory_bytes, at_least=0)
        if self.compute_units is not None:
            check.whole(owner, "compute_units", self.compute_units, at_least=1)
        for share in ("vector_efficiency", "optimizer_efficiency", "attention_efficiency"):
            if (value := getattr(self, share)) is not None:
                check.positive(owner, share, value, at_most=1.0)
        for constant in ("tile_depth", "dispatch_s"):
            if (value := getattr(self, constant)) is not None:
                check.positive(owner, constant, value, zero_allowed=True)
        if self.price_usd_per_hour is not None:
            check.positive(owner, "price_usd_per_hour", self.price_usd_per_hour, zero_allowed=True)
        check.origins(owner, self.origins)
        object.__setattr__(self, "peak_flops_per_s", Table(self.peak_flops_per_s))
        object.__setattr__(self, "origins", Table(self.origins))

    @property
    def usable_memory_bytes(self) -> int:
        """The memory that is left for the model."""
        return self.memory_bytes - self.reserved_memory_bytes

    @property
    def vector_bandwidth_bytes_per_s(self) -> float:
        """The memory bandwidth that everything but matrix products reaches, by the traffic of fused chains."""
        efficiency = self.memory_efficiency if self.vector_efficiency is None else self.vector_efficiency
        return self.memory_bandwidth_bytes_per_s * efficiency

    @property
    def optimizer_bandwidth_bytes_per_s(self) -> float:
        """The memory bandwidth that an optimizer's step reaches, by the traffic of a single kernel."""
        efficiency = self.memory_efficiency if self.optimizer_efficiency is None else self.optimizer_efficiency
        return self.memory_bandwidth_bytes_per_s * efficiency

    @property
    def dispatched_s(self) -> float:
        """The host's time to issue one product or one chain of elementwise ops."""
        return self.kernel_launch_s if self.dispatch_s is None else self.dispatch_s

    @property
    def fuses_dropout(self) -> bool:
        """Whether dropout keeps a byte for each entry, and attention with dropout is one kernel. On CPUs PyTorch draws
        the mask in the values' own type and runs attention with dropout as two products around a softmax
        (aten/native/Dropout.cpp, transformers/attention.cpp)."""
        return self.kind != "cpu"

    def flops_per_s(self, precision: str) -> float:
        """Peak of matrix products in ``precision``. Raises ClusterError when the device does not have it."""
        peak = self.peak_flops_per_s.get(precision)
        if peak is None:
            known = nearest(precision, self.peak_flops_per_s)
            raise ClusterError(f"device {self.name!r} has no {precision!r} matrix products; {known}")
        return peak


@dataclass(frozen=True, slots=True)
class Profile:
    """A device and the links that its usual node has, as one profile file holds them."""

    device: Device
    intra_node: Link
    inter_node: Link
