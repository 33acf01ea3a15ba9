"""Seconds of a unit: its products by shape, the traffic of the rest, launches, the host, tensor-axis collectives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwright.core.cluster.groups import Group
from shardwright.core.cluster.hardware.device import Device
from shardwright.core.cost import fp8_casts
from shardwright.core.cost.fp8_casts import FORWARD_KERNELS, INPUT_GRAD_KERNELS, WEIGHT_GRAD_KERNELS
from shardwright.core.cost.matrix_products import product_s
from shardwright.core.cost.results_kept import NOTHING, ByOp, KeptResult
from shardwright.core.cost.work import Collective, ForwardPart, Product, Result, UnitWork
from shardwright.core.cost.working_memory import PhaseBytes
from shardwright.core.errors import ClusterError, nearest
from shardwright.core.execution import PLAIN, Execution

FUSED_ATTENTION_EFFICIENCY = 0.75
"""The rate of attention in one kernel, as a share of that of large products, where a device's file does not say. Prior:
FlashAttention-2 (arXiv 2307.08691, section 4.1) reaches 50 to 73% of an A100's peak, where large products reach about
80%."""

BACKWARD_DISPATCH = 1.54
"""The host's time to issue a backward pass, as a multiple of that for a forward pass. Fitted:
benchmarks/fit_cost_model.py."""

EAGER_OP_DISPATCH = 0.25
"""The host's time to issue an eager op that is no product, as a share of that for a product, whose module, views and
autograd function take longer. Measured: forward and backward of five tiny models on a CPU by least squares
(`benchmarks/host_time.py`)."""

OVERLAP_POWER = 3.06
"""The sharpness with which the slower of host and device decides: (host^p + device^p)^(1/p). Some kernels of a unit are
waited for and others queue, so near equality both count. Fitted: benchmarks/fit_cost_model.py."""

COLLECTIVE_DISPATCH = 0.16
"""The host's time to issue an all-reduce, as a share of that for a product; half of that for each of a gather and a
scatter. Fitted: benchmarks/fit_cost_model.py; prior: 0.25, PyTorch's call in an autograd function on a CPU takes 0.17
to 0.34 (`benchmarks/host_time.py`)."""

SLOWED_BY_COLLECTIVE = 0.25
"""The time by which a collective slows the products beside it, as a share of the collective's time. Prior: NCCL takes
up to 24 of an A100's 108 multiprocessors while it runs."""


@dataclass(frozen=True, slots=True)
class UnitCost:
    """The cost of one microbatch of one unit on one rank, in seconds and bytes."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    selective_s: float
    """Seconds that selective recompute adds to the backward: the scores, their softmax and dropout once more."""
    collective_s: float
    """The part of the forward and backward seconds that is tensor-axis communication."""
    saved_bytes: int
    saved_selective_bytes: int
    entering_bytes: int
    passing_bytes: int
    parameter_elements: int
    """Entries of the parameters that the rank holds for this unit, tied ones included."""
    step_s: float = 0.0
    """Seconds once a step: tensor-axis communication for the gradients of its parameters, and what was measured beside
    it."""
    trained_elements: int = 0
    """Entries of those parameters that have gradients."""
    update_share: float = 1.0
    """The time of the optimizer's step on them, as a share of what is counted for it."""
    idle_lent: float = 0.0
    """The share of what idle ranks of a pipeline leave unused that those at work get, as in `StageCosts`."""
    put_off_bytes: int | None = None
    """Bytes as in `UnitWork`; None: all that is saved."""
    input_grad_bytes: tuple[int, int] | None = None
    weight_grad_bytes: int = 0
    given_bytes: int = 0
    """Bytes as in `UnitWork`."""
    forward_collective_s: float = 0.0
    """The part of ``collective_s`` in the forward pass, which full recompute runs again."""
    between_bytes: int = 0
    """Bytes as in `UnitWork`."""
    looped_bytes: int = 0
    scales_bytes: int = 0
    kept_by_calls_bytes: tuple[int, int] | None = None
    working_again_bytes: tuple[int, int] | None = None
    merged_bytes: tuple[int, int, int] | None = None
    adding_bytes: int | None = None
    """Bytes as in `UnitWork`."""
    left_bytes: tuple[int, int] = (0, 0)
    fetched_bytes: int = 0
    """Bytes as in `UnitWork`."""
    forward_beside_bytes: int = 0
    backward_again_bytes: int | None = None
    """Bytes as in `UnitWork`."""
    phases: tuple[PhaseBytes, ...] = ()
    """Bytes as in `UnitWork`."""
    collective_hidden_s: float = 0.0
    """Seconds of tensor-axis communication that products hide, beside ``collective_s``."""
    parameter_tensors: int = 0
    """The number of the parameters that a system gathers by themselves (`Execution.whole_entries`)."""
    not_again_s: float = 0.0
    """Seconds of the forward that full recompute does not run again."""
    own_again_s: float = 0.0
    """Seconds that checkpoints of the model's own add to the backward, where the plan does not recompute the unit."""
    host_wait_s: float = 0.0
    """Seconds of all passes in which the device waits for the host to issue kernels."""
    by_op: ByOp = NOTHING
    """What is kept and computed again where results of products are kept op by op."""

    def in_one_program(self) -> "UnitCost":
        """The same unit in a step that is one compiled program."""
        if self.merged_bytes is None:
            return self
        saved, passing, _ = self.merged_bytes
        return replace(self, saved_bytes=saved, passing_bytes=passing)

    def by_calls(self) -> "UnitCost":
        """The same unit where a plan has one stage and computes something again. What it keeps where it is not computed
        again itself is what a step that is one compiled program keeps."""
        if self.kept_by_calls_bytes is None:
            return self
        full, selective = self.kept_by_calls_bytes
        return replace(self.in_one_program(), entering_bytes=full, saved_selective_bytes=selective)

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_grad_s + self.weight_grad_s


def unit_cost(
    work: UnitWork,
    device: Device,
    precision: str,
    *,
    collective_s: Callable[[Collective], float] | None = None,
    execution: Execution = PLAIN,
    chunks: int = 1,
    parameters: int = 0,
    trained: int = 0,
    gradient_bytes: int = 0,
    parameter_tensors: int = 0,
) -> UnitCost:
    """The cost of a unit's work on a device.

    The device takes the time of its products (`cost.matrix_products`), of the bytes that everything else moves (once
    forward; twice backward, for values and gradients), and of a launch for each kernel. The host meanwhile issues the
    kernels, one after the other; where that takes longer, the device waits for it. The collectives over the tensor axis
    (``collective_s`` gives the seconds of one; None: there is no tensor axis) come on top of the longer of the two, as
    all ranks start one together and read its result next: a host that is behind gains nothing while they run.

    ``parameter_tensors`` is as in `UnitCost`, ``parameters`` the number of entries that the rank holds of them,
    ``trained`` the number of those that have gradients, ``gradient_bytes`` the bytes that it moves in all to add the
    gradients of one microbatch to those of the others.
    With sequence parallelism operands may be gathered once more in the backward, beside the products, which that slows.
    ``execution`` says how kernels are made; ``chunks`` into how many parts gathers and scatters of divided sequences
    are cut, of which products hide all but one.
    """
    forward = input_grad = weight_grad = 0.0
    for product in work.products:
        once, back, weights = _product_times(product, device, precision)
        forward, input_grad, weight_grad = forward + once, input_grad + back, weight_grad + weights
    products = forward, input_grad + weight_grad
    is_eager = execution.kernels == "eager"
    kernels = work.eager_kernels if is_eager else work.kernels
    vector_bytes = work.eager_bytes if is_eager else work.vector_bytes
    bandwidth = vector_bandwidth(device, execution)
    vector = vector_bytes / bandwidth
    if execution.kernels == "fused" and not execution.takes_all_ops:
        kernels += work.op_by_op_kernels
        vector += work.op_by_op_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    launches = kernels * device.kernel_launch_s
    forward += vector + launches
    input_grad += 2 * vector + launches
    weight_grad += launches + gradient_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    on_device = forward
    collective = ahead = back = hidden = 0.0
    issued = len(work.products) + (kernels - len(work.products)) * (EAGER_OP_DISPATCH if is_eager else 1.0)
    issued += sum(p.casts is not None for p in work.products) * FORWARD_KERNELS * fp8_casts.ISSUED
    if collective_s is not None:
        ahead, under = _beside_products(work.forward_moved, collective_s, chunks, products[0])
        back, over = _beside_products(work.backward_moved, collective_s, chunks, products[1])
        hidden, collective = under + over, ahead + back
        beside = hidden + sum(map(collective_s, work.backward_gathered))
        input_grad += beside * SLOWED_BY_COLLECTIVE
        moved = (*work.forward_moved, *work.backward_moved)
        issued += sum(COLLECTIVE_DISPATCH * (1.0 if c.kind == "all_reduce" else 0.5) for c in moved)
    host = issued * device.dispatched_s * execution.dispatch_share
    forward = _overlapped(forward, host) + ahead
    backward = input_grad + weight_grad
    waits = forward - ahead - on_device
    if backward > 0:
        longer = _overlapped(backward, host * BACKWARD_DISPATCH) / backward
        waits += (longer - 1) * backward
        input_grad, weight_grad = input_grad * longer, weight_grad * longer
    input_grad += back
    is_compiled = execution.kernels == "compiled"

    def again_s(made: Result) -> float:
        is_read = made.is_read[is_compiled] or not execution.stops_early
        return _product_times(made.product, device, precision)[0] if is_read else 0.0

    def once_s(part: ForwardPart) -> tuple[float, float]:
        """Seconds on the device of a part of the forward: of its memory traffic, and of its products."""
        moved = part.eager_bytes if is_eager else part.vector_bytes
        return moved / bandwidth, sum(_product_times(p, device, precision)[0] for p in part.products)

    spared, spared_products = once_s(work.not_again[is_compiled] if execution.stops_early else ForwardPart())
    spared_s, own_s = spared + spared_products, sum(once_s(work.own_again))
    of_forward, of_own = ((part / on_device if on_device > 0 else 0.0) for part in (spared_s, own_s))
    again = sum(_product_times(p, device, precision)[0] for p in work.selective_products)
    again += (work.eager_selective_bytes if is_eager else work.selective_vector_bytes) / bandwidth
    again += 2 * len(work.selective_products) * device.kernel_launch_s
    unfused = (0, 0) if device.fuses_dropout else (work.unfused_dropout_bytes, work.unfused_dropout_selective_bytes)
    whole, scores = work.saved_bytes + unfused[0], 0 if device.fuses_dropout else work.unfused_scores_bytes
    fetched, input_grad_bytes = work.fetched_bytes, work.input_grad_bytes
    if work.fetched_unfused_bytes is not None and not device.fuses_dropout:
        fetched, of_input_grad = work.fetched_unfused_bytes
        input_grad_bytes = None if input_grad_bytes is None else (input_grad_bytes[0], of_input_grad)
    return UnitCost(
        forward,
        input_grad,
        weight_grad,
        again,
        collective,
        whole,
        work.saved_selective_bytes + unfused[1],
        work.entering_bytes,
        work.passing_bytes,
        parameters,
        sum(map(collective_s, work.step_moved)) if collective_s is not None else 0.0,
        trained,
        put_off_bytes=work.put_off_bytes,
        input_grad_bytes=input_grad_bytes,
        weight_grad_bytes=work.weight_grad_bytes,
        given_bytes=work.given_bytes,
        forward_collective_s=ahead,
        between_bytes=work.between_bytes,
        looped_bytes=work.looped_bytes,
        scales_bytes=work.scales_bytes,
        kept_by_calls_bytes=work.kept_by_calls_bytes,
        working_again_bytes=work.working_again_bytes,
        merged_bytes=work.merged_bytes,
        adding_bytes=work.adding_bytes,
        forward_beside_bytes=work.forward_beside_bytes,
        backward_again_bytes=None if is_compiled else work.backward_again_bytes,
        left_bytes=work.left_bytes,
        fetched_bytes=fetched,
        phases=work.phases,
        collective_hidden_s=hidden,
        parameter_tensors=parameter_tensors,
        not_again_s=max(0.0, forward - ahead) * min(1.0, of_forward),
        own_again_s=max(0.0, forward - ahead) * min(1.0, of_own),
        host_wait_s=waits,
        by_op=ByOp(
            work.beside_results_bytes,
            max(0.0, vector - spared) + launches,
            tuple(KeptResult(made.module, made.is_plain, made.size_bytes, again_s(made)) for made in work.results),
            scores,
        ),
    )


def vector_bandwidth(device: Device, execution: Execution) -> float:
    """The memory bandwidth that everything but products reaches, by the traffic that the kernels of a system have."""
    if execution.kernels == "fused":
        return device.vector_bandwidth_bytes_per_s
    return device.memory_bandwidth_bytes_per_s * device.memory_efficiency


def _beside_products(
    moved: Sequence[Collective], seconds_of: Callable[[Collective], float], chunks: int, products_s: float
) -> tuple[float, float]:
    """The exposed and the hidden seconds of a pass's collectives. A gather or scatter in so many chunks travels beside
    the product that reads or makes it, but for one chunk."""
    cut = sum(seconds_of(each) for each in moved if each.kind in ("all_gather", "reduce_scatter"))
    hidden = min(cut * (1 - 1 / chunks), products_s)
    return sum(map(seconds_of, moved)) - hidden, hidden


def seconds_of(group: Group, ranks: int) -> Callable[[Collective], float]:
    """The seconds of a collective, as a function, on a tensor axis of ``ranks`` that lies like ``group``."""

    def seconds(collective: Collective) -> float:
        """The seconds of one collective. Raises ClusterError for a kind that the group has no cost for."""
        match collective.kind:
            case "all_reduce":
                return group.all_reduce_s(collective.size_bytes)
            case "reduce_scatter":
                return group.reduce_scatter_s(collective.size_bytes)
            case "all_gather":
                return group.all_gather_s(collective.size_bytes)
            case "all_to_all":  # each rank's shard, cut again
                return group.all_gather_s(collective.size_bytes / ranks)
        known = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
        raise ClusterError(f"collective {collective.kind!r} has no cost: {nearest(collective.kind, known)}")

    return seconds


def _overlapped(device_s: float, host_s: float) -> float:
    """Seconds of a pass whose kernels the host issues while the device runs them."""
    longest = max(device_s, host_s)
    if longest <= 0:
        return 0.0
    shorter = min(device_s, host_s) / longest
    return float(longest * (1 + shorter**OVERLAP_POWER) ** (1 / OVERLAP_POWER))


def _product_times(product: Product, device: Device, precision: str) -> tuple[float, float, float]:
    """Seconds of the forward, of the gradients of activations and of those of weights. Of steps in fp8, the products
    that are not computed in it are computed in bf16."""
    if product.casts is None and precision == "fp8":
        precision = "bf16"
    if not product.batches:
        share = FUSED_ATTENTION_EFFICIENCY if device.attention_efficiency is None else device.attention_efficiency
        peak = device.flops_per_s(precision) * device.matmul_efficiency * share
        bandwidth = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
        once = max(product.flops / peak, product.size_bytes / bandwidth)
        return once, once * product.backward_input, once * product.backward_weight
    b, m, n, k, size = product.batches, product.m, product.n, product.k, product.size_bytes
    forward = product_s(device, precision, b, m, n, k, size)
    of_left = product_s(device, precision, b, m, k, n, size)
    of_right = product_s(device, precision, b, k, n, m, size)
    weights = of_right * product.backward_weight
    if (taken := product.casts) is not None:
        bandwidth = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
        forward += taken.forward_bytes / bandwidth + FORWARD_KERNELS * device.kernel_launch_s
        of_left += taken.input_grad_bytes / bandwidth + INPUT_GRAD_KERNELS * device.kernel_launch_s
        made = taken.weight_grad_bytes / bandwidth + WEIGHT_GRAD_KERNELS * device.kernel_launch_s
        weights += made * product.backward_weight
    if product.backward_input >= 2:  # two activations: both gradients
        return forward, of_left + of_right * (product.backward_input - 1), weights
    return forward, of_left * product.backward_input, weights
