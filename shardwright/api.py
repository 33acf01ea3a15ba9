"""The entry points that are the same for both frameworks."""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from shardwright.backends import protocol
from shardwright.backends.capabilities import runtimes_of
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import CaptureError, PlanError
from shardwright.core.model.graph import Graph
from shardwright.core.plan.decision import LossScope
from shardwright.core.plan.plan import Plan
from shardwright.core.rules.pins import Asked, pins_of
from shardwright.core.schedule import Schedule, StageCosts
from shardwright.core.schedule.simulate import simulate_schedule
from shardwright.core.schedule.timeline import Timeline
from shardwright.core.search import Progress, make_plan
from shardwright.core.search.request import Request, stage_starts_of
from shardwright.core.tables.cost_tables import unpriced_of


def capture(model: Any, sample: Any, loss: Callable[..., Any] | None = None, *, batch_dims: Any = None) -> Graph:
    """Read a model as it is, without running it on real data.

    Args:
        model: an `nn.Module`, an `nnx.Module`, a pair (Linen module, variables), or a JAX function of (params, batch).
        sample: one batch: a tensor, or a tuple, list or dict of them (for a JAX function: the pair (params, batch)).
            Shapes and dtypes matter, values do not.
        loss: called on the model's output. Default: the output's ``.loss``, or a scalar output.
        batch_dims: for inputs whose dim 0 is not the batch: the same structure as ``sample``, with a dim or None.

    Raises:
        CaptureError: the model is of neither framework, or it cannot be read; names the op and the module.
        MissingFrameworkError: the model's framework is there, but not all that its backend needs.
    """
    return protocol.load(framework_of(model)).capture(model, sample, loss, batch_dims=batch_dims)


def framework_of(model: Any) -> str:
    """``torch`` or ``jax``. Looks only at modules that are loaded already: a model's framework is."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return "torch"
    parts = model if isinstance(model, tuple) else (model,)
    modules = {cls.__module__.split(".")[0] for part in parts for cls in type(part).__mro__}
    if "flax" in modules or (callable(model) and not isinstance(model, type)):
        return "jax"
    raise CaptureError(
        f"a {type(model).__name__} is not a model: expected a torch.nn.Module, a flax.nnx.Module, a pair (flax.linen "
        f"module, variables), or a JAX function of (params, batch)"
    )


def plan(
    graph: Graph,
    cluster: Cluster,
    *,
    batch: int,
    pp: int | None = None,
    tp: int | None = None,
    dp: int | None = None,
    microbatch: int | None = None,
    virtual_stages: int | None = None,
    schedule: str | None = None,
    recompute: Literal["none", "selective", "full", "auto"] = "auto",
    shard: Literal[0, 1, 2, 3] | None = None,
    shard_group: int | None = None,
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
    optimizer: str = "adamw",
    loss_scope: LossScope | None = None,
    stage_starts: Sequence[int] | None = None,
    sequence_parallel: bool | None = None,
    gradient_precision: Literal["fp32", "bf16", "fp16"] | None = None,
    layouts: Asked | None = None,
    placement_order: str | None = None,
    partitioner: str = "exact",
    frameworks: Sequence[str] | None = None,
    devices: int | Literal["all", "auto"] | None = None,
    offload: bool | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Find how to split a captured model over a cluster. What is given is pinned, the rest is searched.

    Args:
        graph: from `capture`.
        cluster: the devices, as many of them used as ``devices`` says.
        batch: samples per step, over all replicas.
        pp, tp, dp: pipeline, tensor and data degrees.
        microbatch: samples that one replica runs at a time.
        virtual_stages: stages per pipeline rank.
        schedule: the name of a schedule (`Schedule.build`), or "auto" for one that is generated for the stages' costs
            and the memory left; None searches the named ones that the framework's runtime can run.
        recompute: which activations are computed again in the backward pass; "auto" searches.
        shard: ZeRO stage over the data axis.
        shard_group: ranks that share a shard; None with a pinned ``shard`` is the whole data axis.
        precision: of parameters and activations; default: a 16-bit one in which the device is faster than
            in fp32, else fp32.
        optimizer: whose states are counted.
        loss_scope: whether what depends on the batch as a whole is taken over the replica's batch or the global one;
            None: over the replica's, and a runtime may ask where the loss couples samples.
        stage_starts: the first unit of every stage, where the cut is not to be searched.
        sequence_parallel: divide what the tensor axis leaves whole along the sequence; None searches, within what the
            framework's runtime can do.
        gradient_precision: in which gradients add up over microbatches; default: as the parameters.
        layouts: parameters whose layouts on the tensor axis are pinned: a Hugging Face plan (module pattern → style),
            or a list of (regular expression, Layout), of which the first that matches counts, and of rules (logical
            axis, mesh axis or None) for the axes that Flax parameters name. What the model itself says (marks of
            ``set_tensor_parallelism``, parameters partitioned by name) is pinned too.
        placement_order: how the axes lie on the ranks, an order of D, P and T; the last one's neighbours are
            neighbouring ranks.
        partitioner: what cuts the model into stages: "exact", "pareto", "tree" (SageMaker's) or "blocks" (RaNNC's).
        frameworks: whose runtimes must be able to carry the plan out: "torch", "jax" or both; None: both, so that a
            model and its twin get one plan. What is pinned is planned all the same; where nothing that they carry out
            fits, the best of all is taken, with a warning.
        devices: how many of the cluster's to use, "all", or "auto" for as many as make the fastest plan (whole nodes,
            in powers of two, of every kind that there is; parts of the last node). None: all, but of a mixed cluster
            "auto", as slow nodes may hold up the fast ones. The plan's provenance says which are left out.
        offload: whether activations of units that memory has no room for may go to the host's memory and come back,
            where that is faster than computing them again; None: where the runtimes asked for carry that out.
        progress: called with (candidates scored, candidates in all).

    Raises:
        LayoutError: pins that contradict each other (both are named), that match nothing, or on an axis that the
            mesh lacks.
        PlanError: degrees or batch that do not divide (with the nearest that do), or no plan that fits the memory (by
            how much, and the nearest plan that fits).
    """
    if not isinstance(graph, Graph):
        raise PlanError(f"plan takes a captured graph, not a {type(graph).__name__}: call shardwright.capture first")
    if not isinstance(cluster, Cluster):
        raise PlanError(f"plan takes a Cluster, not {cluster!r}: write Cluster({cluster!r})")
    request = Request(
        batch=batch,
        pp=pp,
        tp=tp,
        dp=dp,
        microbatch=microbatch,
        virtual_stages=virtual_stages,
        schedule=schedule,
        recompute=recompute,
        shard=shard,
        shard_group=shard_group,
        precision=precision,
        optimizer=optimizer,
        loss_scope=loss_scope,
        stage_starts=None if stage_starts is None else stage_starts_of(stage_starts),
        sequence_parallel=sequence_parallel,
        gradient_precision=gradient_precision,
        placement_order=placement_order,
        partitioner=partitioner,
        devices=devices,
        offload=offload,
    )
    return make_plan(graph, cluster, of_graph(request, graph, frameworks, layouts), progress)


def of_graph(
    request: Request, graph: Graph, frameworks: Sequence[str] | None = None, layouts: Asked | None = None
) -> Request:
    """A request with what is asked of this model: the runtimes that must carry the plan out, and the layouts that are
    pinned, by the model's own marks too. Raises PlanError for a framework without a runtime, LayoutError as `plan`."""
    if (unpriced := unpriced_of(graph)) is not None:
        warnings.warn(f"{graph.model_name}: {unpriced}", stacklevel=3)
    return replace(request, layouts=pins_of(graph, layouts), runtimes=runtimes_of(graph.capabilities, frameworks))


def simulate(plan_or_schedule: Plan | Schedule, costs: StageCosts | None = None) -> Timeline:
    """When every action of a pipeline would run.

    A plan is simulated with its own costs unless others are given. Raises ScheduleError when the costs are of another
    number of stages.
    """
    if isinstance(plan_or_schedule, Plan):
        return simulate_schedule(plan_or_schedule.build_schedule(), costs or plan_or_schedule.stage_costs())
    if isinstance(plan_or_schedule, Schedule):
        return simulate_schedule(plan_or_schedule, costs)
    raise PlanError(f"simulate takes a Plan or a Schedule, not a {type(plan_or_schedule).__name__}")
