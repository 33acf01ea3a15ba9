"""Every key of the configuration of ``smdistributed.modelparallel``, its default there, and what becomes of it here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Key:
    """A key of SageMaker's configuration.

    Attributes:
        default: SageMaker's own, which `modelparallel.init` takes too.
        state: "acts"; "none": it has no effect, which a warning says; "fixed": any value but the default is refused.
        says: what it does here where that differs, or what to do instead.
        example: a value other than the default.
    """

    name: str
    default: Any
    state: Literal["acts", "none", "fixed"]
    example: Any
    says: str = ""


KEYS: tuple[Key, ...] = (
    Key("pipeline_parallel_degree", 1, "acts", 2),
    Key("partitions", 1, "acts", 2, "the older name of pipeline_parallel_degree"),
    Key("tensor_parallel_degree", 1, "acts", 2),
    Key("microbatches", 1, "acts", 4, "a batch that does not divide makes microbatches that differ by a sample"),
    Key("pipeline", "interleaved", "acts", "simple", "any other schedule too: 1f1b, zb-h1, auto …"),
    Key("active_microbatches", None, "acts", 3, "of the schedules interleaved and simple"),
    Key("optimize", "memory", "acts", "speed", "on the tensor axis, and as the memory_weight of partitioner='tree'"),
    Key(
        "memory_weight",
        0.8,
        "acts",
        0.5,
        "takes SageMaker's cut by the module tree; where it is left out the planner cuts stages of even time that fit",
    ),
    Key("placement_strategy", "cluster", "acts", "spread"),
    Key("ddp", False, "acts", True, "needed where there are replicas, as there"),
    Key("ddp_dist_backend", "auto", "acts", "gloo"),
    Key("prescaled_batch", False, "acts", True),
    Key("shard_optimizer_state", False, "acts", True, "shard=1"),
    Key("sharded_data_parallel_degree", 1, "acts", 2, "shard=3 in groups of that many replicas"),
    Key("sdp_reduce_bucket_size", 500_000_000, "acts", 1000, "the planner decides where it is left out"),
    Key("sdp_param_persistence_threshold", 1_000_000, "acts", 10, "the planner decides where it is left out"),
    Key("sdp_max_live_parameters", 1_000_000_000, "acts", 1000, "no limit where it is left out"),
    Key("sdp_hierarchical_allgather", True, "acts", False, "the planner decides where it is left out"),
    Key("sdp_gradient_clipping", 1.0, "acts", 0.5, "under sharded_data_parallel_degree"),
    Key("offload_activations", False, "acts", True),
    Key("activation_loading_horizon", 4, "acts", 2, "under offload_activations"),
    Key("fp16", False, "acts", True),
    Key("bf16", False, "acts", True),
    Key("delayed_parameter_initialization", False, "acts", True, "of model_creation"),
    Key("auto_partition", True, "acts", False, "modules are where partition and set_partition place them"),
    Key("default_partition", 0, "acts", 1, "under auto_partition=False"),
    Key("fp16_params", False, "fixed", True, "deprecated there; fp16 takes its place"),
    Key("_match_weights", False, "fixed", True, "described nowhere; a script of AWS's gives its default"),
    Key("skip_tracing", False, "none", True, "models are captured without being run"),
    Key("deterministic_server", False, "none", True, "steps are deterministic"),
    Key("static_mode", False, "none", True, "steps are recorded once"),
    Key("fast_mode", False, "none", True, "stages send to each other directly"),
    Key("tensor_parallel_seed", 0, "none", 1, "values are those of the unsplit model, under any split"),
)
BY_KEY = {key.name: key for key in KEYS}
ALWAYS = ("placement_strategy", "prescaled_batch", "pipeline")
UNDER = {
    "tensor_parallel_degree": ("optimize",),
    "sharded_data_parallel_degree": ("sdp_gradient_clipping",),
    "offload_activations": ("activation_loading_horizon",),
}
"""The keys whose default is another than `shardwright.torch`'s, in every run, and where another key is not its
default."""


def with_defaults(given: Mapping[str, Any], *, is_planned: bool = False) -> dict[str, Any]:
    """A configuration with SageMaker's defaults beside it. ``is_planned``: whether a plan decides the rest."""
    defaults = [key for key in ALWAYS if not is_planned or key == "prescaled_batch"]
    for key, others in UNDER.items():
        if given.get(key, BY_KEY[key].default) != BY_KEY[key].default:
            defaults += others
    return {key: BY_KEY[key].default for key in defaults} | dict(given)


def table(keys: Sequence[Key] = KEYS) -> str:
    """Keys as a table in Markdown."""
    said = {"acts": "acts", "none": "no effect, with a warning", "fixed": "refused, but for the default"}
    lines = ["| key | default | state | |", "|---|---|---|---|"]
    lines += [f"| `{key.name}` | `{key.default!r}` | {said[key.state]} | {key.says} |" for key in keys]
    return "\n".join(lines) + "\n"
