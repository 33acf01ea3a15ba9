"""The configuration that `init` takes: SageMaker's keys, and a few of our own."""

import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardwright.core.cost.row_gradients import POLICIES, Policy
from shardwright.core.errors import MissingCapabilityError, PlanError, ShardwrightError, nearest
from shardwright.core.layout.mesh import Mesh
from shardwright.core.partition.partitioners import require_partitioner
from shardwright.core.plan.decision import STATES_LEVEL, LossScope, OffloadStates, require_residency
from shardwright.core.schedule import AUTO, Schedule, StageCosts, schedule_names
from shardwright.core.schedule.action_table import has_any
from shardwright.core.schedule.actions import SHARDING
from shardwright.core.schedule.checks import require_runnable
from shardwright.core.schedule.passes.sharding import ReduceAfter, insert_residency
from shardwright.core.values.recompute_modes import names_products
from shardwright.core.values.step_line import require_every

_ALIASES = {"partitions": "pipeline_parallel_degree", "sdp_hierarchical_allgather": "hierarchical_gathers"}
_AXIS_LETTERS = {"P": "pp", "D": "dp", "T": "tp"}
_STRATEGIES = {"cluster": "DPT", "spread": "TPD"}

PIPELINE_MODES = ("auto", "recorded", "messages")

_LATER: dict[str, tuple[Any, str]] = {
    "fp16_params": (False, "use torch.autocast around the step"),
    "_match_weights": (False, "SageMaker describes it nowhere, and weights are the unsplit model's under any split"),
}
"""Keys of features that this version lacks: the value that asks for nothing, and the alternative."""

_WITHOUT_EFFECT = {
    "skip_tracing", "deterministic_server", "static_mode", "fast_mode", "tensor_parallel_seed",
}  # fmt: skip
"""Keys that tune machinery which this library does not have: accepted with a warning."""


OF_DIVIDED_PARAMETERS = ("sdp_reduce_bucket_size", "sdp_param_persistence_threshold", "sdp_max_live_parameters")
"""Keys that are about parameters of which each rank keeps a part, under ``shard=3``."""
_COUNTS = (
    "pipeline_parallel_degree", "tensor_parallel_degree", "microbatches", "virtual_stages", "compare_in_full_every",
    "sharded_data_parallel_degree", "activation_loading_horizon",
)  # fmt: skip
_SWITCHES = (
    "ddp", "prescaled_batch", "shard_optimizer_state", "bf16", "fp8", "fp16", "offload_activations",
    "delayed_parameter_initialization", "auto_partition",
)  # fmt: skip
_CHOICES: dict[str, tuple[tuple[str | None, ...], str]] = {
    "recompute": (
        ("none", "elementwise", "alternate", "products", "full"),
        "'none', 'elementwise', 'alternate', 'products', 'products:MODULE,…' or 'full'",
    ),
    "loss_scope": ((None, "replica", "global"), "'replica' or 'global'"),
    "nonfinite": (("warn", "error", "ignore"), "'warn', 'error' or 'ignore'"),
    "debug": ((None, "numerics"), "'numerics', or None"),
    "offload_states": (("none", "optimizer", "parameters"), "'none', 'optimizer' or 'parameters'"),
    "optimize": ((None, "speed", "memory"), "'speed' or 'memory'"),
    "ddp_dist_backend": (("auto", "nccl", "gloo"), "auto, nccl or gloo"),
    "sparse_gradients": (POLICIES, "'auto', 'dense' or 'sparse'"),
}
"""The values of a key, and the same in words."""


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
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ShardwrightError(f"{name}={value!r}: expected a whole number of at least 1")
        self._require_types()
        if self.pipeline_parallel_degree == 1 and self.virtual_stages > 1:
            raise ShardwrightError(
                f"pipeline_parallel_degree=1 and virtual_stages={self.virtual_stages}: one rank alone has nobody to "
                f"take turns with; leave out virtual_stages"
            )
        if isinstance(self.pipeline, Schedule):
            self._require_sizes(self.pipeline)
            require_runnable(self.pipeline)
        elif not isinstance(self.pipeline, str) or self.pipeline not in (*schedule_names(), AUTO):
            hint = nearest(str(self.pipeline), (*schedule_names(), AUTO))
            raise ShardwrightError(f"pipeline={self.pipeline!r} is no schedule: {hint}")
        for name, (known, said) in _CHOICES.items():
            value = getattr(self, name)
            if value not in known and not (name == "recompute" and names_products(str(value))):
                raise ShardwrightError(f"{name}={value!r}: expected {said}")
        if not isinstance(self.compile, bool):
            backends = torch.compiler.list_backends(exclude_tags=())
            if self.compile not in backends:
                said = ", ".join(backends)
                raise ShardwrightError(f"compile={self.compile!r}: expected True, False or a backend: {said}")
        if self.debug and self.compile:
            raise ShardwrightError("debug='numerics' looks at single ops, and compile leaves none: leave one out")
        if self.debug and self.nonfinite == "ignore":
            raise ShardwrightError("debug='numerics' and nonfinite='ignore' are given: leave one of them out")
        if self.pipeline_mode not in PIPELINE_MODES:
            raise ShardwrightError(
                f"pipeline_mode={self.pipeline_mode!r}: {nearest(str(self.pipeline_mode), PIPELINE_MODES)}"
            )
        letters = _STRATEGIES.get(self.placement_strategy, self.placement_strategy)
        if sorted(letters) != sorted(_AXIS_LETTERS):
            raise ShardwrightError(
                f"placement_strategy={self.placement_strategy!r}: expected cluster, spread or an order of D, P and T, "
                f"such as PDT"
            )

    def _require_types(self) -> None:
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ShardwrightError(f"{name}={getattr(self, name)!r}: expected True or False")
        if not isinstance(self.hierarchical_gathers, bool | None):
            raise ShardwrightError(f"hierarchical_gathers={self.hierarchical_gathers!r}: expected True or False")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ShardwrightError(f"seed={self.seed!r}: expected a whole number")
        timeout = self.wait_timeout_s
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < math.inf:
            raise ShardwrightError(f"wait_timeout_s={timeout!r}: expected a number of seconds above 0")
        require_every(self.log_every)
        if self.active_microbatches is not None and type(self.active_microbatches) is not int:
            raise ShardwrightError(f"active_microbatches={self.active_microbatches!r}: expected a whole number")
        for name in ("placement_strategy", "pipeline_mode", "ddp_dist_backend"):
            if not isinstance(getattr(self, name), str):
                raise ShardwrightError(f"{name}={getattr(self, name)!r}: expected text")
        if self.tensor_parallel_degree == 1 and self.layouts not in (None, "auto"):
            raise ShardwrightError(
                "tensor_parallel_degree=1 has no axis for layouts to lie on: leave layouts out, or set the degree"
            )
        if self.shard not in (0, 1, 2, 3) or isinstance(self.shard, bool):
            raise ShardwrightError(f"shard={self.shard!r}: expected 0, 1, 2 or 3")
        if self.shard_group is not None and (type(self.shard_group) is not int or self.shard_group < 1):
            raise ShardwrightError(f"shard_group={self.shard_group!r}: expected a number of replicas")
        if self.activation_loading_horizon > 1 and not self.offload_activations:
            warnings.warn(
                f"activation_loading_horizon={self.activation_loading_horizon} has no effect without "
                f"offload_activations",
                stacklevel=5,
            )
        if self.offload_activations and self.recompute != "none":
            raise ShardwrightError(
                f"offload_activations=True and recompute={self.recompute!r}: the same activations are kept on the "
                f"host, or computed again; leave out one of them"
            )
        self._require_partitioner()
        self._require_one_sharding()
        self._require_limits()
        self._require_residency()
        if self.bf16 and self.fp16:
            raise ShardwrightError("bf16 and fp16 are both True: steps compute in one of them; leave out one")
        if self.fp8 and self.fp16:
            raise ShardwrightError("fp8 and fp16 are both True: what is not computed in fp8 is in bf16; leave out fp16")
        if self.fp8 and self.pipeline_mode == "messages":
            raise ShardwrightError("fp8 and pipeline_mode='messages': a plan says what is in fp8; leave one out")
        if self.cluster is not None and not isinstance(self.cluster, str):
            raise ShardwrightError(f"cluster={self.cluster!r}: expected the name of a hardware profile, such as 'h100'")

    def _require_partitioner(self) -> None:
        ranks, default, weight = self.pipeline_parallel_degree, self.default_partition, self.memory_weight
        if type(default) is not int or not 0 <= default < ranks:
            raise ShardwrightError(
                f"default_partition={default!r}: expected 0 to {ranks - 1} (pipeline_parallel_degree={ranks})"
            )
        if default and self.auto_partition:
            warnings.warn(
                f"default_partition={default} has no effect under auto_partition=True, where the planner places every "
                f"module",
                stacklevel=5,
            )
        if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float)):
            raise ShardwrightError(f"memory_weight={weight!r}: expected a number from 0 (time) to 1 (memory)")
        if weight is not None and not 0 <= weight <= 1:
            raise ShardwrightError(f"memory_weight={weight}: expected a number from 0 (time) to 1 (memory)")
        if self.partitioner is not None:
            require_partitioner(self.partitioner)
        if weight is not None and self.partitioner not in (None, "tree"):
            raise ShardwrightError(
                f"memory_weight={weight} and partitioner={self.partitioner!r}: only the module tree weighs memory "
                f"against time; leave out one of them"
            )
        by_hand = [name for name in ("partitioner", "memory_weight") if getattr(self, name) is not None]
        by_hand += ["virtual_stages"] if self.virtual_stages > 1 else []
        if by_hand and not self.auto_partition:
            raise ShardwrightError(
                f"auto_partition=False and {by_hand[0]}={getattr(self, by_hand[0])!r}: modules are placed by hand, one "
                f"stage on each rank; leave out one of them"
            )

    @property
    def cut(self) -> dict[str, Any]:
        """What cuts the model into stages, as options of `shardwright.plan`."""
        if self.partitioner != "tree" and self.memory_weight is None:
            return {} if self.partitioner is None else {"partitioner": self.partitioner}
        weight = {"speed": 0.2, "memory": 0.8}.get(self.optimize or "memory")
        return {"partitioner": "tree", "memory_weight": weight if self.memory_weight is None else self.memory_weight}

    def _require_one_sharding(self) -> None:
        degree = self.sharded_data_parallel_degree
        said = [f"shard={self.shard}"] if self.shard else []
        said += ["shard_optimizer_state=True"] if self.shard_optimizer_state else []
        said += [f"sharded_data_parallel_degree={degree}"] if degree > 1 else []
        if len(said) > 1:
            raise ShardwrightError(f"{' and '.join(said)} say how state is sharded: keep one of them")
        on_host = self.offload_states != "none"
        level = STATES_LEVEL.get(self.offload_states, 0)
        if on_host and said and self.shard_level != level:
            raise ShardwrightError(
                f"offload_states={self.offload_states!r} and {said[0]}: replicas divide what lies on the host, which "
                f"is shard={level}; leave out one of them"
            )
        if self.shard_group is not None and not self.shard and not on_host:
            raise ShardwrightError(f"shard_group={self.shard_group} goes with shard=1, 2 or 3: nothing is sharded")
        if said and not self.ddp:
            raise ShardwrightError(f"{said[0]} shares state over replicas, and ddp is False: set 'ddp': True")

    def _require_limits(self) -> None:
        for name in OF_DIVIDED_PARAMETERS:
            value, least = getattr(self, name), 0 if name == "sdp_param_persistence_threshold" else 1
            if isinstance(value, float) and value.is_integer():  # as 5e8
                object.__setattr__(self, name, value := int(value))
            if value is not None and (type(value) is not int or value < least):
                raise ShardwrightError(f"{name}={value!r}: expected a number of entries, {least} or more")
        clips = self.sdp_gradient_clipping
        if clips is not None and (
            isinstance(clips, bool) or not isinstance(clips, int | float) or not 0 < clips < math.inf
        ):
            raise ShardwrightError(f"sdp_gradient_clipping={clips!r}: expected a norm above 0, or None for no clipping")
        if self.sdp_max_live_parameters is not None and self.gathered_stages:
            raise ShardwrightError(
                f"sdp_max_live_parameters={self.sdp_max_live_parameters} and gathered_stages={self.gathered_stages}: "
                f"what is whole follows from the number of stages; leave out one of them"
            )

    def _require_residency(self) -> None:
        for name in ("gathered_stages", "look_ahead"):
            value = getattr(self, name)
            if not (name == "look_ahead" and value is None) and (type(value) is not int or value < 0):
                raise ShardwrightError(f"{name}={value!r}: expected a whole number of stages")
        if self.reduce_after not in (None, "each", "last"):
            raise ShardwrightError(f"reduce_after={self.reduce_after!r}: expected 'each' or 'last'")
        try:
            require_residency(
                self.shard_level, self.gathered_stages or None, self.look_ahead, self.reduce_after, self.virtual_stages
            )
        except PlanError as error:
            raise ShardwrightError(str(error)) from error
        if self._says_residency and isinstance(self.pipeline, Schedule) and has_any(self.pipeline, SHARDING):
            raise ShardwrightError(
                "the schedule given as pipeline gathers stages or reduces gradients itself: leave out gathered_stages "
                "and reduce_after, or remove these actions with strip_sharding"
            )

    @property
    def _says_residency(self) -> bool:
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
        return _STRATEGIES.get(self.placement_strategy, self.placement_strategy)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(_AXIS_LETTERS[letter] for letter in self.placement_order)

    def _require_sizes(self, schedule: Schedule) -> None:
        given = (schedule.ranks, schedule.microbatches, schedule.virtual_stages)
        asked = (self.pipeline_parallel_degree, self.microbatches, self.virtual_stages)
        if given != asked:
            raise ShardwrightError(
                f"the schedule given as pipeline has (ranks, microbatches, virtual stages) = {given}, and the "
                f"configuration asks for {asked}: set pipeline_parallel_degree, microbatches and virtual_stages to "
                f"those of the schedule"
            )

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
        if not self._says_residency:
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
