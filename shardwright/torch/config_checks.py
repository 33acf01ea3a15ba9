"""The checks of a configuration: values that are possible, and values that go together."""

import math
import warnings
from typing import TYPE_CHECKING

import torch

from shardwright.core.cost.row_gradients import POLICIES
from shardwright.core.errors import PlanError, ShardwrightError, nearest
from shardwright.core.partition.partitioners import require_partitioner
from shardwright.core.plan.decision import STATES_LEVEL, require_residency
from shardwright.core.schedule import AUTO, Schedule, schedule_names
from shardwright.core.schedule.action_table import has_any
from shardwright.core.schedule.actions import SHARDING
from shardwright.core.schedule.checks import require_runnable
from shardwright.core.values.recompute_modes import names_products
from shardwright.core.values.step_line import require_every

if TYPE_CHECKING:
    from shardwright.torch.config import Config

AXIS_LETTERS = {"P": "pp", "D": "dp", "T": "tp"}
STRATEGIES = {"cluster": "DPT", "spread": "TPD"}
PIPELINE_MODES = ("auto", "recorded", "messages")
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


def require_possible(config: "Config") -> None:
    """Raise ShardwrightError for a value of a configuration that is not possible, or two that do not go together."""
    for name in _COUNTS:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ShardwrightError(f"{name}={value!r}: expected a whole number of at least 1")
    _require_types(config)
    if config.pipeline_parallel_degree == 1 and config.virtual_stages > 1:
        raise ShardwrightError(
            f"pipeline_parallel_degree=1 and virtual_stages={config.virtual_stages}: one rank alone has nobody to "
            f"take turns with; leave out virtual_stages"
        )
    if isinstance(config.pipeline, Schedule):
        _require_sizes(config, config.pipeline)
        require_runnable(config.pipeline)
    elif not isinstance(config.pipeline, str) or config.pipeline not in (*schedule_names(), AUTO):
        hint = nearest(str(config.pipeline), (*schedule_names(), AUTO))
        raise ShardwrightError(f"pipeline={config.pipeline!r} is no schedule: {hint}")
    for name, (known, said) in _CHOICES.items():
        value = getattr(config, name)
        if value not in known and not (name == "recompute" and names_products(str(value))):
            raise ShardwrightError(f"{name}={value!r}: expected {said}")
    if not isinstance(config.compile, bool):
        backends = torch.compiler.list_backends(exclude_tags=())
        if config.compile not in backends:
            said = ", ".join(backends)
            raise ShardwrightError(f"compile={config.compile!r}: expected True, False or a backend: {said}")
    if config.debug and config.compile:
        raise ShardwrightError("debug='numerics' looks at single ops, and compile leaves none: leave one out")
    if config.debug and config.nonfinite == "ignore":
        raise ShardwrightError("debug='numerics' and nonfinite='ignore' are given: leave one of them out")
    if config.pipeline_mode not in PIPELINE_MODES:
        raise ShardwrightError(
            f"pipeline_mode={config.pipeline_mode!r}: {nearest(str(config.pipeline_mode), PIPELINE_MODES)}"
        )
    letters = STRATEGIES.get(config.placement_strategy, config.placement_strategy)
    if sorted(letters) != sorted(AXIS_LETTERS):
        raise ShardwrightError(
            f"placement_strategy={config.placement_strategy!r}: expected cluster, spread or an order of D, P and T, "
            f"such as PDT"
        )


def _require_types(config: "Config") -> None:
    for name in _SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise ShardwrightError(f"{name}={getattr(config, name)!r}: expected True or False")
    if not isinstance(config.hierarchical_gathers, bool | None):
        raise ShardwrightError(f"hierarchical_gathers={config.hierarchical_gathers!r}: expected True or False")
    if not isinstance(config.seed, int) or isinstance(config.seed, bool):
        raise ShardwrightError(f"seed={config.seed!r}: expected a whole number")
    timeout = config.wait_timeout_s
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < math.inf:
        raise ShardwrightError(f"wait_timeout_s={timeout!r}: expected a number of seconds above 0")
    require_every(config.log_every)
    if config.active_microbatches is not None and type(config.active_microbatches) is not int:
        raise ShardwrightError(f"active_microbatches={config.active_microbatches!r}: expected a whole number")
    for name in ("placement_strategy", "pipeline_mode", "ddp_dist_backend"):
        if not isinstance(getattr(config, name), str):
            raise ShardwrightError(f"{name}={getattr(config, name)!r}: expected text")
    if config.tensor_parallel_degree == 1 and config.layouts not in (None, "auto"):
        raise ShardwrightError(
            "tensor_parallel_degree=1 has no axis for layouts to lie on: leave layouts out, or set the degree"
        )
    if config.shard not in (0, 1, 2, 3) or isinstance(config.shard, bool):
        raise ShardwrightError(f"shard={config.shard!r}: expected 0, 1, 2 or 3")
    if config.shard_group is not None and (type(config.shard_group) is not int or config.shard_group < 1):
        raise ShardwrightError(f"shard_group={config.shard_group!r}: expected a number of replicas")
    if config.activation_loading_horizon > 1 and not config.offload_activations:
        warnings.warn(
            f"activation_loading_horizon={config.activation_loading_horizon} has no effect without offload_activations",
            stacklevel=6,
        )
    if config.offload_activations and config.recompute != "none":
        raise ShardwrightError(
            f"offload_activations=True and recompute={config.recompute!r}: the same activations are kept on the "
            f"host, or computed again; leave out one of them"
        )
    _require_partitioner(config)
    _require_one_sharding(config)
    _require_limits(config)
    _require_residency(config)
    if config.bf16 and config.fp16:
        raise ShardwrightError("bf16 and fp16 are both True: steps compute in one of them; leave out one")
    if config.fp8 and config.fp16:
        raise ShardwrightError("fp8 and fp16 are both True: what is not computed in fp8 is in bf16; leave out fp16")
    if config.fp8 and config.pipeline_mode == "messages":
        raise ShardwrightError("fp8 and pipeline_mode='messages': a plan says what is in fp8; leave one out")
    if config.cluster is not None and not isinstance(config.cluster, str):
        raise ShardwrightError(f"cluster={config.cluster!r}: expected the name of a hardware profile, such as 'h100'")


def _require_partitioner(config: "Config") -> None:
    ranks, default, weight = config.pipeline_parallel_degree, config.default_partition, config.memory_weight
    if type(default) is not int or not 0 <= default < ranks:
        raise ShardwrightError(
            f"default_partition={default!r}: expected 0 to {ranks - 1} (pipeline_parallel_degree={ranks})"
        )
    if default and config.auto_partition:
        warnings.warn(
            f"default_partition={default} has no effect under auto_partition=True, where the planner places every "
            f"module",
            stacklevel=6,
        )
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float)):
        raise ShardwrightError(f"memory_weight={weight!r}: expected a number from 0 (time) to 1 (memory)")
    if weight is not None and not 0 <= weight <= 1:
        raise ShardwrightError(f"memory_weight={weight}: expected a number from 0 (time) to 1 (memory)")
    if config.partitioner is not None:
        require_partitioner(config.partitioner)
    if weight is not None and config.partitioner not in (None, "tree"):
        raise ShardwrightError(
            f"memory_weight={weight} and partitioner={config.partitioner!r}: only the module tree weighs memory "
            f"against time; leave out one of them"
        )
    by_hand = [name for name in ("partitioner", "memory_weight") if getattr(config, name) is not None]
    by_hand += ["virtual_stages"] if config.virtual_stages > 1 else []
    if by_hand and not config.auto_partition:
        raise ShardwrightError(
            f"auto_partition=False and {by_hand[0]}={getattr(config, by_hand[0])!r}: modules are placed by hand, one "
            f"stage on each rank; leave out one of them"
        )


def _require_one_sharding(config: "Config") -> None:
    degree = config.sharded_data_parallel_degree
    said = [f"shard={config.shard}"] if config.shard else []
    said += ["shard_optimizer_state=True"] if config.shard_optimizer_state else []
    said += [f"sharded_data_parallel_degree={degree}"] if degree > 1 else []
    if len(said) > 1:
        raise ShardwrightError(f"{' and '.join(said)} say how state is sharded: keep one of them")
    on_host = config.offload_states != "none"
    level = STATES_LEVEL.get(config.offload_states, 0)
    if on_host and said and config.shard_level != level:
        raise ShardwrightError(
            f"offload_states={config.offload_states!r} and {said[0]}: replicas divide what lies on the host, which "
            f"is shard={level}; leave out one of them"
        )
    if config.shard_group is not None and not config.shard and not on_host:
        raise ShardwrightError(f"shard_group={config.shard_group} goes with shard=1, 2 or 3: nothing is sharded")
    if said and not config.ddp:
        raise ShardwrightError(f"{said[0]} shares state over replicas, and ddp is False: set 'ddp': True")


def _require_limits(config: "Config") -> None:
    for name in OF_DIVIDED_PARAMETERS:
        value, least = getattr(config, name), 0 if name == "sdp_param_persistence_threshold" else 1
        if isinstance(value, float) and value.is_integer():  # as 5e8
            object.__setattr__(config, name, value := int(value))
        if value is not None and (type(value) is not int or value < least):
            raise ShardwrightError(f"{name}={value!r}: expected a number of entries, {least} or more")
    clips = config.sdp_gradient_clipping
    if clips is not None and (
        isinstance(clips, bool) or not isinstance(clips, int | float) or not 0 < clips < math.inf
    ):
        raise ShardwrightError(f"sdp_gradient_clipping={clips!r}: expected a norm above 0, or None for no clipping")
    if config.sdp_max_live_parameters is not None and config.gathered_stages:
        raise ShardwrightError(
            f"sdp_max_live_parameters={config.sdp_max_live_parameters} and gathered_stages={config.gathered_stages}: "
            f"what is whole follows from the number of stages; leave out one of them"
        )


def _require_residency(config: "Config") -> None:
    for name in ("gathered_stages", "look_ahead"):
        value = getattr(config, name)
        if not (name == "look_ahead" and value is None) and (type(value) is not int or value < 0):
            raise ShardwrightError(f"{name}={value!r}: expected a whole number of stages")
    if config.reduce_after not in (None, "each", "last"):
        raise ShardwrightError(f"reduce_after={config.reduce_after!r}: expected 'each' or 'last'")
    try:
        require_residency(
            config.shard_level,
            config.gathered_stages or None,
            config.look_ahead,
            config.reduce_after,
            config.virtual_stages,
        )
    except PlanError as error:
        raise ShardwrightError(str(error)) from error
    if config.says_residency and isinstance(config.pipeline, Schedule) and has_any(config.pipeline, SHARDING):
        raise ShardwrightError(
            "the schedule given as pipeline gathers stages or reduces gradients itself: leave out gathered_stages "
            "and reduce_after, or remove these actions with strip_sharding"
        )


def _require_sizes(config: "Config", schedule: Schedule) -> None:
    given = (schedule.ranks, schedule.microbatches, schedule.virtual_stages)
    asked = (config.pipeline_parallel_degree, config.microbatches, config.virtual_stages)
    if given != asked:
        raise ShardwrightError(
            f"the schedule given as pipeline has (ranks, microbatches, virtual stages) = {given}, and the "
            f"configuration asks for {asked}: set pipeline_parallel_degree, microbatches and virtual_stages to "
            f"those of the schedule"
        )
