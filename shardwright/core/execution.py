"""How a system runs a step: which traffic travels beside its computing, and how its kernels are made.

A runtime publishes one value of this type, which travels inside the captured graph. `SYSTEMS` holds those of other
systems, by the names that ``like=`` takes: a plan can be priced as one of them would run it. Each constant belongs to
one mechanism that a microbenchmark could measure.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Le

from shardwright.core.errors import PlanError, nearest
from shardwright.core.values.fields import Amount, require_fields

Kernels = Literal["eager", "fused", "compiled"]
"""``eager``: every op is a kernel that reads its operands and writes its results. ``fused``: chains of elementwise ops
are kernels written by hand, issued one by one. ``compiled``: a compiler makes such kernels, each of which the host
issues with little work."""

COMPILED_DISPATCH = 0.15
"""The host's time to issue a kernel of a compiled program, as a share of that of an eager op with its module, autograd
and Python. Prior: PyTorch issues an eager op of a module in 30 to 80 µs and launches a generated kernel in about 10."""


@dataclass(frozen=True, slots=True)
class Execution:
    """What a system overlaps in a step, and how its kernels are made. Raises PlanError for values out of range."""

    system: str
    """The name of the system."""
    version: str
    """The version of the system that is described, or the day of the description."""
    kernels: Kernels = "fused"
    gradients: bool = False
    """Whether gradients are exchanged over the data axis while the last backward goes on, bucket by bucket as they
    become whole; else after it."""
    updated_parameters: bool = False
    """Whether updated parameters of sharded optimizer states are gathered while the next forward goes on."""
    prefetched_units: Amount = 0
    """The number of units whose sharded parameters are gathered ahead of use; 0: a pass waits for every gather."""
    tensor_chunks: Annotated[int, Ge(0)] = 0
    """The number of parts into which a gather or scatter of divided sequences is cut, so that all but one travel beside
    the product that reads or makes them; 0: as many as the tensor axis has ranks; 1: nothing is hidden."""
    sends: bool = True
    """Whether messages between stages travel while both ranks compute; else the sender waits for them."""
    bucket_elements: Amount = 0
    """The entries of one bucket of gradients; 0: those of one unit."""
    by_parameter: bool = False
    """Whether each parameter is gathered, and its gradient scattered, by itself; else a unit's travel together."""
    takes_all_ops: bool = False
    """Whether kernels written by hand are there for every op; else the loss, and a softmax of few heads, run op by op
    (`core.cost.handwritten_kernels`)."""
    stops_early: bool = False
    """Whether a recomputed unit runs again as far as its backward reads what that makes; else all of its forward."""
    keeps_gathered: bool = False
    """Whether what is gathered of divided sequences for a product is kept for its backward; else the backward gathers
    it once more, as Megatron-LM's (arXiv 2205.05198, section 4.2.2)."""
    message_s: Annotated[float, Ge(0), Le(1)] = 0.0
    """The host's seconds from the end of a stage's pass to the kernels of the next stage's, beside those that the
    message itself takes: to send, to receive, and to begin the pass."""
    whole_entries: Amount = 0
    """Where each parameter is gathered by itself: those of fewer entries stay whole on every rank."""
    live_entries: Amount = 0
    """The entries that lie between two uses of a parameter from which on it is released between them and gathered once
    more, as between computing a unit again and its backward; 0: a unit's stay until its backward is done."""
    lists_ranks: bool = False
    """Whether the host makes and copies one tensor for each rank of a gather or scatter of sharded parameters, for
    which the device waits."""
    gathered_bytes_per_s: Annotated[float, Ge(0), Le(1e30)] = 0.0
    """The bytes of whole parameters that gathers and scatters take at most in a second, however fast the links; 0: no
    such limit."""

    def __post_init__(self) -> None:
        require_fields(self, PlanError)

    @property
    def dispatch_share(self) -> float:
        """The host's time to issue one kernel, as a share of that to issue an eager op."""
        return COMPILED_DISPATCH if self.kernels == "compiled" else 1.0


PIPELINE_MESSAGE_S = 2.6e-4
"""Prior: what a pass of this library's PyTorch runtime takes its thread beside autograd and kernels (160 µs), and 50 µs
to send and to receive one tensor; thread time with torch 2.13 on a virtual machine's core, beside other work."""

PLAIN = Execution("plain", "1", tensor_chunks=1, takes_all_ops=True)
"""Kernels fused by hand, of all ops, as the graphs of twins have the same ops in other parts; and no traffic hidden but
messages between stages."""

DEEPSPEED = Execution(
    "deepspeed",
    "0.7",
    tensor_chunks=1,
    sends=False,
    by_parameter=True,
    whole_entries=100_000,
    live_entries=1_000_000_000,
    gathered_bytes_per_s=42e9,
)
"""DeepSpeed with ZeRO-3, as its code is (runtime/zero): each parameter is gathered by itself; those with fewer entries
than its default of ``stage3_param_persistence_threshold`` stay whole, and those that are read again behind more entries
than its default of ``stage3_max_reuse_distance`` are released until then. Up to 2021 it gave torch.distributed a list
of one tensor for each rank, each of which is copied; later one tensor. It fetches the next parameter ahead; nothing of
that is taken as hidden, as no rate explains the published rows with it. The rate is fitted on the three rows of arXiv
2104.04473, table 2, for ZeRO-3 with 174.6B on 384 to 1,536 A100 (`benchmarks/large_runs.py`), whose nodes' ports are
four times as fast. SageMaker's published 30B on 256 A100 over EFA (`benchmarks/sagemaker.py`), whose port is slower
than the rate, was looked at, and no number is fitted on it: with the lists it would be 13% too slow."""

SYSTEMS: dict[str, Execution] = {
    found.system: found
    for found in (
        # Buckets leave while the backward goes on, and a unit is gathered ahead; each op is a kernel of its own.
        # torch's checkpoint without re-entry stops early (its `early_stop`), and `jax.checkpoint` drops what nothing
        # reads; the checkpoints of Megatron-LM and DeepSpeed enter the forward again, all of it.
        Execution(
            "torch",
            "1",
            kernels="eager",
            gradients=True,
            prefetched_units=1,
            tensor_chunks=1,
            stops_early=True,
            keeps_gathered=True,
            message_s=PIPELINE_MESSAGE_S,
        ),
        Execution(
            "torch-compiled",
            "1",
            kernels="compiled",
            gradients=True,
            prefetched_units=1,
            tensor_chunks=1,
            stops_early=True,
            keeps_gathered=True,
            message_s=PIPELINE_MESSAGE_S,
        ),
        # XLA gathers sharded parameters ahead where it schedules for latency; gradients are summed when all are there.
        Execution("jax", "1", kernels="compiled", prefetched_units=1, tensor_chunks=1, stops_early=True),
        # Megatron-LM's README names what its H100 runs overlap: --overlap-grad-reduce, --overlap-param-gather and
        # --tp-comm-overlap, and messages under the interleaved schedule. Its buckets have 40 million entries.
        Execution(
            "megatron-core",
            "0.8",
            gradients=True,
            updated_parameters=True,
            prefetched_units=1,
            bucket_elements=40_000_000,
        ),
        # FSDP2 (torch.distributed.fsdp.fully_shard) gathers one unit ahead, and scatters gradients unit by unit.
        Execution(
            "fsdp2", "2.5", kernels="eager", gradients=True, prefetched_units=1, tensor_chunks=1, stops_early=True
        ),
        Execution(
            "fsdp2-compiled",
            "2.5",
            kernels="compiled",
            gradients=True,
            prefetched_units=1,
            tensor_chunks=1,
            stops_early=True,
        ),
        # DeepSpeed's pipeline engine sends and receives in turn with computing, and sums gradients after it.
        DEEPSPEED,
        # The code of 2021, which published runs of ZeRO-3 with 174.6B (arXiv 2104.04473, table 2) had.
        replace(DEEPSPEED, system="deepspeed-0.4", version="0.4", lists_ranks=True),
        # TeraPipe's code (github.com/zhuohan123/terapipe) sends between stages by broadcasts, one after the other with
        # eager kernels, and sums gradients after all passes.
        Execution("terapipe", "2021", kernels="eager", tensor_chunks=1, sends=False),
        # SageMaker's sharded data parallelism (MiCS) gathers a layer ahead, and overlaps the sums of gradients.
        Execution("sagemaker", "1.15", gradients=True, prefetched_units=1, tensor_chunks=1),
        # MaxText sets XLA's flags for asynchronous collectives, with its latency-hiding scheduler.
        Execution(
            "maxtext", "2024", kernels="compiled", gradients=True, prefetched_units=1, tensor_chunks=0, stops_early=True
        ),
    )
}
"""The systems that ``like=`` names. Priors: their documentation says what they overlap."""


def system(name: str) -> Execution:
    """The execution of the system that ``like=`` names. Raises PlanError for an unknown one, with the nearest."""
    if name not in SYSTEMS:
        raise PlanError(f"like={name!r} is no system that is known: {nearest(name, SYSTEMS)}")
    return SYSTEMS[name]
