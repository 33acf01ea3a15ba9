"""Planning at the first step, when `init` was given degrees and no plan: the captured model with the degrees pinned."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from shardwright.backends.torch.capture.partition_marks import placed
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cluster.hardware import Device, load_profile
from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.errors import ShardwrightError, UnrecordableError
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph
from shardwright.core.partition.placed_modules import placed_starts, require_all_ranks
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import AUTO, Schedule, schedule_names
from shardwright.torch.config import Config


def _layouts(asked: Any, module: nn.Module) -> Any:
    """The layouts that `plan` is asked for. Raises ShardwrightError for "auto" where the model brings no plan of its
    own."""
    if asked != "auto":
        return asked
    shipped = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if not shipped:
        raise ShardwrightError(
            f"layouts='auto' takes the tensor-parallel plan that a Hugging Face model brings, and "
            f"{type(module).__name__} has no config.base_model_tp_plan: leave layouts out, and the planner finds them"
        )
    return shipped


def plan_at_first_step(config: Config, bound: BoundMesh, model: nn.Module, graph: Graph) -> StageMap:
    """Plan the captured model with the configuration's degrees. Every rank calls this and comes to the same plan.

    Raises PlanError when no plan satisfies the degrees.
    """
    from shardwright.api import plan as search

    samples = graph.sample_batch
    dp, pp = bound.size("dp"), bound.size("pp")
    on_host = config.offload_states != "none"
    level = config.shard_level if dp > 1 or on_host else 0
    precision, entries = config.precision or _precision(model), config.sdp_param_persistence_threshold
    # What a configuration does not ask for is not excluded by it: the model may compute units again by itself.
    recompute = "auto" if config.recompute == "none" and any(c.is_recomputed for c in graph.calls) else config.recompute
    cluster = Cluster(
        config.cluster or _hardware(bound.device), nodes=bound.mesh.size // bound.ranks_per_node,
        devices_per_node=bound.ranks_per_node,
    )  # fmt: skip
    find: Callable[..., Plan] = partial(
        search, graph, cluster,
        batch=samples * config.microbatches * dp,
        pp=pp, tp=bound.size("tp"), dp=dp, sequence_parallel=_divides_sequence(config),
        microbatch=samples, schedule=_schedule_for_cut(config),
        virtual_stages=config.virtual_stages,
        loss_scope=config.loss_scope, shard=level, shard_group=config.sharing_replicas if level else None,
        gathered_stages=config.gathered_stages if level == 3 else 0,
        look_ahead=config.look_ahead if level == 3 else None, reduce_after=config.reduces if level else None,
        hierarchical_gathers=config.hierarchical_gathers if level else None,
        whole_below_bytes=None if level < 3 or entries is None else entries * PRECISION_BYTES[precision],
        precision=precision, layouts=_layouts(config.layouts, model),
        offload_states=config.offload_states if on_host else None, **_cut(config, model, graph),
    )  # fmt: skip
    if config.offload_activations and recompute == "auto":
        raise ShardwrightError(
            "offload_activations=True, and the model asks by checkpoints or marks to compute blocks again: leave out "
            "one of them"
        )
    plan = find(recompute="full" if config.offload_activations else recompute)
    if config.offload_activations and not plan.recomputed_units:
        raise ShardwrightError(
            f"offload_activations=True, and {type(model).__name__} has no blocks whose activations could be on the host"
        )
    if config.offload_activations:
        starts = plan.decision.stage_starts
        plan = find(recompute="full", offloaded_units=plan.recomputed_units, stage_starts=starts, partitioner="exact",
                    memory_weight=None, activation_loading_horizon=config.activation_loading_horizon)  # fmt: skip
    stage_map = StageMap.of_plan(plan, config.schedule(plan.stage_costs()))
    # On nodes of unlike numbers of ranks, which were planned as one, groups may lie evenly all the same.
    asks = config.hierarchical_gathers is not False and not bound.has_even_nodes
    return replace(stage_map, hierarchical=stage_map.hierarchical or asks)


def owners_by_hand(config: Config, model: nn.Module) -> dict[str, int] | None:
    """The rank of each module that has one, by path, with the default for the root; None where the planner places
    them."""
    if config.auto_partition:
        return None
    return {"": config.default_partition, **placed(model)}


def _cut(config: Config, model: nn.Module, graph: Graph) -> dict[str, Any]:
    """What says where stages begin, as options of `plan`.

    Raises:
        PlanError: a rank has no module.
        UnrecordableError: modules are placed by hand so that no row of stages has them.
    """
    by_hand = owners_by_hand(config, model)
    if by_hand is None:
        return config.cut
    require_all_ranks(by_hand, config.pipeline_parallel_degree)
    starts = placed_starts(fold(graph), by_hand, config.pipeline_parallel_degree)
    if isinstance(starts, str):
        raise UnrecordableError(f"its modules are placed by hand, and {starts}")
    return {"stage_starts": starts}


def device_peaks(config: Config, plan: Plan | None, device: torch.device) -> Mapping[str, float]:
    """FLOPs per second of one device at best, by precision: those of the plan's devices, or of the configuration's."""
    if plan is not None:
        return dict(plan.provenance.peak_flops_per_s)
    return Cluster(config.cluster or _hardware(device)).peak_flops_per_s


def _divides_sequence(config: Config) -> bool | None:
    """Whether values that the tensor axis leaves whole are divided along the sequence; None: the planner decides."""
    if config.optimize is None or config.tensor_parallel_degree == 1:
        return None
    return config.optimize == "memory"


def _schedule_for_cut(config: Config) -> str:
    """The named schedule by whose placement and memory the stages are cut. Every number of microbatches has it, because
    the schedule itself may be built later from the costs of the stages, or be given."""
    if config.virtual_stages == 1:
        return "1f1b"
    if isinstance(config.pipeline, Schedule):
        return config.pipeline.name if config.pipeline.name in schedule_names() else "looped-bfs"
    return "looped-bfs" if config.pipeline == AUTO else config.pipeline


def _precision(module: torch.nn.Module) -> Literal["fp32", "bf16", "fp16"]:
    """The precision of the model as it is."""
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if torch.float32 in dtypes or torch.float64 in dtypes:
        return "fp32"
    return "fp16" if torch.float16 in dtypes else "bf16"


def _hardware(device: torch.device) -> str | Device:
    """The profile of this device: for one that is no CUDA device the CPU's, with this machine's memory; for a CUDA
    device without a profile the H100's."""
    if device.type != "cuda":
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return replace(load_profile("cpu").device, memory_bytes=memory_bytes)
    name = torch.cuda.get_device_name(device).lower()
    large = torch.cuda.get_device_properties(device).total_memory > 60e9
    for key, profile in (("h200", "h200"), ("h100", "h100"), ("b200", "b200"), ("v100", "v100"), ("t4", "t4")):
        if key in name:
            return profile
    if "a100" in name:
        return "a100-80gb" if large else "a100-40gb"
    return "h100"
