"""The configuration that `init` takes: SageMaker's keys, and a few of our own."""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwright.core.cost.row_gradients import Policy
from shardwright.core.errors import MissingCapabilityError, ShardwrightError, nearest
from shardwright.core.layout.mesh import Mesh
from shardwright.core.plan.decision import STATES_LEVEL, LossScope, OffloadStates
from shardwright.core.schedule import Schedule, StageCosts
from shardwright.core.schedule.passes.sharding import ReduceAfter, insert_residency
from shardwright.torch.config_checks import AXIS_LETTERS, STRATEGIES, require_possible

_ALIASES = {"partitions": "pipeline_parallel_degree", "sdp_hierarchical_allgather": "hierarchical_gathers"}

_LATER: dict[str, tuple[Any, str]] = {
    "fp16_params": (False, "use torch.autocast around the step"),
    "_match_weights": (False, "SageMaker describes it nowhere, and weights are the unsplit model's under any split"),
}
"""Keys of features that this version lacks: the value that asks for nothing, and the alternative."""

_WITHOUT_EFFECT = {
    "skip_tracing", "deterministic_server", "static_mode", "fast_mode", "tensor_parallel_seed",
}  # fmt: skip
"""Keys that tune machinery which this library does not have: accepted with a warning."""


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration that `init` was given.

    Attributes:
        pipeline: the name of a schedule, "auto" for the one that is searched for the planned costs, or a schedule.
        pipeline_mode: "recorded" runs the step body once and replays it; "messages" runs it as a program whose control
            flow may depend on values, and calls modules where they are; "auto" takes messages where recording fails.
        recompute: "full" runs the forward of repeated blocks again in the backward pass; "elementwise" all but their
            products and attention, "alternate" these and every second product; "products" all but the products of as
            many modules as memory has room for, and "products:attn.c_attn,mlp.c_fc" but for those of these modules.
        offload_activations: whether the activations of the blocks that ``recompute="full"`` would run again are on the
            host between forward and backward instead; not with ``recompute``.
        activation_loading_horizon: the number of these blocks whose activations are on their way back ahead of the one
            whose backward runs, on devices that copy beside computing.
        offload_states: "optimizer" keeps the states of the optimizer on the host, with the parameters that it updates
            there and the sums of gradients; "parameters" all parameters too, of which the device has those of the
            modules at hand. Over several replicas they divide what is there, as under shard=2 and shard=3.
        prescaled_batch: whether all ranks of the tensor axis are given the same batch. Without it each has samples of
            its own, and a step is over all of them.
        optimize: on the tensor axis, "memory" divides along the sequence the values that every rank would hold whole,
            "speed" keeps them whole; default: the planner decides. With ``partitioner="tree"`` the weight of memory is
            0.8 under "memory" and 0.2 under "speed", where ``memory_weight`` does not say it.
        auto_partition: whether the planner cuts the model into stages. False: modules are on the ranks that `partition`
            and `set_partition` say. Where these make no row of stages, the step runs by messages.
        default_partition: under ``auto_partition=False``, the rank of modules that are placed nowhere.
        partitioner: what cuts the model into stages, as in `shardwright.plan`; "tree" is SageMaker's.
        memory_weight: of the tree, what memory weighs against time, from 0 to 1. Where it is given, the tree is taken.
        loss_scope: the meaning where the loss couples samples: "replica" takes every microbatch of every replica by
            itself; "global" lets batch norm see the microbatches of all replicas together. None: such a loss is an
            error where there are several microbatches.
        compile: run each block of this rank through torch.compile; a name is that of its backend. Not with dropout,
            with recompute or with schedules that split the backward pass.
        compare_in_full_every: in every so many training steps ranks compare all of their batches, replicas all of their
            parameters, and every rank the model's modules; in the others they compare digests of the batches.
        wait_timeout_s: the time in seconds that a peer may give no sign of life before this rank stops with an error;
            that all ranks may wait for each other without anything moving; that ranks wait for each other to start. A
            peer that computes, compiles or saves is waited for.
        nonfinite: the reaction when a loss or a gradient is NaN or infinite: "warn", "error", or "ignore". In float16
            gradients that overflow are left to the scaler.
        debug: "numerics" looks at every op, and names the first that made a NaN or an infinity; slow.
        axes: the mesh axes, outermost first.
        layouts: as in `shardwright.plan`; "auto" takes the plan that Hugging Face ships for the model.
        shard: what is divided over the replicas between steps: 0 nothing, 1 optimizer states, 2 gradients too, 3
            parameters too.
        shard_group: the number of neighbouring replicas that share; None: all of them.
        gathered_stages: under shard=3, the most stages that a rank keeps whole at once, gathered and freed as the
            schedule says; 0: every pass gathers and frees module by module.
        look_ahead: the most of these that are gathered ahead of their use; None: all but the one that runs.
        reduce_after: whether gradients are summed over the replicas after "each" microbatch or after the "last"; None:
            after each under shard 2 and 3, where none is kept whole, else after the last.
        hierarchical_gathers: whether replicas that share state, several on each of several nodes, gather between the
            nodes and then within each, and sum the other way round; None: where the planner finds it faster.
            ``sdp_hierarchical_allgather`` is SageMaker's name.
        sparse_gradients: how gradients of rows, of ``nn.Embedding(sparse=True)``, travel between replicas: "sparse"
            gathers the rows of all, "dense" sums whole tables, "auto" takes what moves fewer bytes in each step. They
            arrive as rows either way. Where parameters are sharded or split by a tensor axis they are made whole.
        shard_optimizer_state: SageMaker's name for ``shard=1``.
        sharded_data_parallel_degree: SageMaker's name for ``shard=3`` with this ``shard_group``.
        sdp_reduce_bucket_size: under shard 3, the most entries of gradients that are summed, and of parameters that are
            gathered, at once, but for a larger parameter by itself; None: those of a module call.
        sdp_param_persistence_threshold: under shard 3, the entries of a block of parameters below which they stay whole
            all through a step; None: the planner decides.
        sdp_max_live_parameters: under shard 3 without gathered_stages, the entries of whole parameters from which on
            none are gathered ahead of their use; None: those of the next module call always are.
        sdp_gradient_clipping: the norm of all gradients to which a step of `DistributedOptimizer` clips them; None:
            it does not.
        bf16: compute in bfloat16: steps run on 16-bit copies of parameters that are in float32 between steps, where the
            optimizer updates them; gradients add up in float32.
        log_every: rank 0 says a line of figures after the first update and after every so many; 0: none.
        fp8: the same as bf16, with linear layers computed in 8 bits: the plan says which (its device has such products,
            or ``cluster`` names one that does).
        fp16: the same as bf16 in float16; see `DistributedOptimizer` for the scaling of losses.
        delayed_parameter_initialization: whether `model_creation` leaves parameters without memory until the model is
            split, as `delay_param_initialization` does.
    """

    pipeline_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    microbatches: int = 1
    pipeline: str | Schedule = "1f1b"
    virtual_stages: int = 1
    active_microbatches: int | None = None
    ddp: bool = False
    ddp_dist_backend: str = "auto"
    placement_strategy: str = "PDT"
    cluster: str | None = None
    recompute: str = "none"
    offload_activations: bool = False
    activation_loading_horizon: int = 1
    offload_states: OffloadStates = "none"
    prescaled_batch: bool = True
    optimize: Literal["speed", "memory"] | None = None
    loss_scope: LossScope | None = None
    compile: bool | str = False
    seed: int = 0
    wait_timeout_s: float = 60.0
    nonfinite: Literal["warn", "error", "ignore"] = "warn"
    debug: str | None = None
    compare_in_full_every: int = 100
    layouts: Any = None
    pipeline_mode: str = "auto"
    shard: int = 0
    shard_group: int | None = None
    gathered_stages: int = 0
    look_ahead: int | None = None
    reduce_after: ReduceAfter | None = None
    hierarchical_gathers: bool | None = None
    sparse_gradients: Policy = "auto"
    shard_optimizer_state: bool = False
    sharded_data_parallel_degree: int = 1
    sdp_reduce_bucket_size: int | None = None
    sdp_param_persistence_threshold: int | None = None
    sdp_max_live_parameters: int | None = None
    sdp_gradient_clipping: float | None = None
    bf16: bool = False
    fp8: bool = False
    fp16: bool = False
    log_every: int = 10
    delayed_parameter_initialization: bool = False
    auto_partition: bool = True
    default_partition: int = 0
    partitioner: str | None = None
    memory_weight: float | None = None

    def __post_init__(self) -> None:
        require_possible(self)

    @property
    def cut(self) -> dict[str, Any]:
        """What cuts the model into stages, as options of `shardwright.plan`."""
        if self.partitioner != "tree" and self.memory_weight is None:
            return {} if self.partitioner is None else {"partitioner": self.partitioner}
        weight = {"speed": 0.2, "memory": 0.8}.get(self.optimize or "memory")
        return {"partitioner": "tree", "memory_weight": weight if self.memory_weight is None else self.memory_weight}

    @property
    def says_residency(self) -> bool:
        """Whether it says when stages are gathered or gradients are reduced."""
        return bool(self.gathered_stages or self.reduce_after)

    @property
    def reduces(self) -> ReduceAfter:
        """When gradients are summed over the replicas."""
        return self.reduce_after or ("each" if self.shard_level >= 2 else "last")

    @property
    def shard_level(self) -> int:
        """The stage of ZeRO that is asked for."""
        if self.sharded_data_parallel_degree > 1:
            return 3
        return 1 if self.shard_optimizer_state else self.shard or STATES_LEVEL.get(self.offload_states, 0)

    @property
    def precision(self) -> Literal["fp8", "bf16", "fp16"] | None:
        """The precision that is asked for; None: that of the model."""
        if self.fp8:
            return "fp8"
        return "bf16" if self.bf16 else "fp16" if self.fp16 else None

    @property
    def sharing_replicas(self) -> int | None:
        """The number of replicas that share state; None: all of them."""
        return self.sharded_data_parallel_degree if self.sharded_data_parallel_degree > 1 else self.shard_group

    @property
    def placement_order(self) -> str:
        """The letters of the axes, the last those of neighbouring ranks, as a plan has them."""
        return STRATEGIES.get(self.placement_strategy, self.placement_strategy)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(AXIS_LETTERS[letter] for letter in self.placement_order)

    def schedule(self, costs: StageCosts | None) -> Schedule:
        """The schedule asked for. Raises ScheduleError when it does not admit the sizes, or when more stages run at
        once than may be gathered."""
        if isinstance(self.pipeline, Schedule):
            schedule = self.pipeline
        else:
            schedule = Schedule.build(
                self.pipeline, ranks=self.pipeline_parallel_degree, microbatches=self.microbatches,
                virtual_stages=self.virtual_stages, costs=costs, active_microbatches=self.active_microbatches,
            )  # fmt: skip
        if not self.says_residency:
            return schedule
        each = self.reduces == "each"
        return insert_residency(schedule, self.gathered_stages or None, self.look_ahead, reduces_each=each)

    def mesh(self, world_size: int) -> Mesh:
        """The mesh over all ranks. Raises ShardwrightError when the degrees do not divide their number."""
        pp, tp = self.pipeline_parallel_degree, self.tensor_parallel_degree
        if world_size % (pp * tp):
            raise ShardwrightError(
                f"pipeline_parallel_degree={pp} and tensor_parallel_degree={tp} do not divide the {world_size} ranks "
                f"that are running: start a multiple of {pp * tp}, or choose degrees that divide {world_size}"
            )
        dp = world_size // (pp * tp)
        if dp > 1 and not self.ddp:
            raise ShardwrightError(
                f"{world_size} ranks with pipeline_parallel_degree={pp} make {dp} data-parallel replicas, and ddp is "
                f"False: set 'ddp': True, or start {pp * tp} ranks"
            )
        group = self.sharing_replicas
        if group is not None and dp % group:
            raise ShardwrightError(
                f"{group} replicas are to share state (sharded_data_parallel_degree or shard_group), and there are "
                f"{dp}: choose a divisor of {dp}"
            )
        sizes = {"pp": pp, "dp": dp, "tp": tp}
        return Mesh(self.axes, tuple(sizes[axis] for axis in self.axes))


def read_config(given: Mapping[str, Any] | None) -> Config:
    """Check a configuration.

    Raises:
        ShardwrightError: an unknown key (the nearest is named), or a value that is not possible.
        MissingCapabilityError: a feature that this version does not have.
    """
    own = set(Config.__dataclass_fields__)
    known = own | set(_ALIASES) | set(_LATER) | _WITHOUT_EFFECT
    taken: dict[str, Any] = {}
    for key, value in (given or {}).items():
        if key not in known:
            raise ShardwrightError(f"init knows no key {key!r}: {nearest(str(key), known)}")
        name = _ALIASES.get(key, key)
        if name in _LATER:
            neutral, instead = _LATER[name]
            if value != neutral:
                raise MissingCapabilityError(
                    f"{key}={value!r} is not possible in this version of the torch runtime ({instead}): leave it at "
                    f"{neutral!r}"
                )
        elif name in _WITHOUT_EFFECT:
            warnings.warn(f"{key} has no effect here: it tunes machinery that this library does not have", stacklevel=3)
        elif name in taken:
            raise ShardwrightError(f"{key} and its other name are both given: keep one")
        else:
            taken[name] = value
    return Config(**taken)


ENVIRONMENT = "SM_HP_MP_PARAMETERS"
"""The variable in which SageMaker's launcher gives a script the configuration of a run, as JSON."""


def configuration_of_environment() -> dict[str, Any]:
    """The keys of `ENVIRONMENT`; none where it is not set. Raises ShardwrightError where it holds no JSON object."""
    text = os.environ.get(ENVIRONMENT, "")
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except ValueError as failed:
        raise ShardwrightError(f"{ENVIRONMENT}={text[:80]!r} is no JSON: {failed}") from None
    if not isinstance(found, dict):
        raise ShardwrightError(
            f'{ENVIRONMENT}={text[:80]!r}: expected a JSON object of keys, as {{"pipeline_parallel_degree": 2}}'
        )
    return found
