"""The shards of a planned job as the stages of a pipeline, for runtimes that cut a program by such a plan."""

from dataclasses import replace

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import MissingCapabilityError, PlanError
from shardwright.core.jobs.jobs_plan import PlannedJob
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph
from shardwright.core.model.structure import structure_of
from shardwright.core.plan.plan import Plan
from shardwright.core.search import make_plan
from shardwright.core.search.options import Options
from shardwright.core.search.request import request_for

ROOM = 1 << 50
"""Bytes of memory of a stage's device: whether a shard fits its device is the plan of jobs' to say."""


def shards_as_stages(own: PlannedJob, graph: Graph, cluster: Cluster) -> Plan:
    """The plan of a pipeline whose stages are the shards of a job, each on a device of its own.

    Raises:
        PlanError: the job was planned for another model than the captured one.
        MissingCapabilityError: shards that begin inside of blocks, which stages do not.
    """
    require_model(own, graph)
    if own.nesting:
        raise MissingCapabilityError(
            f"job {own.name!r} is planned in shards that begin inside of the model's blocks, and its stages are whole "
            f"blocks: plan it with the graph that {graph.framework} captures, or with a larger budget"
        )
    device = replace(cluster.device(0), memory_bytes=ROOM)
    stages = Cluster(device, devices_per_node=len(own.shards))
    options = Options(
        batch=own.batch, pp=len(own.shards), tp=1, dp=1, microbatch=own.microbatch, virtual_stages=1, schedule="gpipe",
        recompute="none", shard=0, precision=own.precision, optimizer=own.optimizer,
        stage_starts=tuple(shard.first_unit for shard in own.shards),
    )  # fmt: skip
    return make_plan(graph, stages, request_for(options, (), (graph.capabilities,)))


def require_model(own: PlannedJob, graph: Graph) -> None:
    """Raise PlanError unless a job was planned for this model."""
    if structure_of(fold(graph, own.nesting))[0].digest != own.model_digest:
        raise PlanError(f"job {own.name!r} is planned for another model than {graph.model_name}: plan it again")
