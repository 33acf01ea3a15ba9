"""Every partitioner on one model and one cluster, side by side."""

from dataclasses import dataclass

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanError
from shardwright.core.layout.mesh import Mesh
from shardwright.core.model.graph import Graph
from shardwright.core.partition.partitioners import PARTITIONERS, Judged, judge
from shardwright.core.rules.pins import pins_of
from shardwright.core.search.partition_input import partition_input
from shardwright.core.tables.cost_tables import CostTables
from shardwright.core.tables.memory import live_microbatches
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.mesh_links import Links


@dataclass(frozen=True, slots=True)
class Contest:
    """The result of every partitioner; None for one that finds no cut that fits."""

    stages: int
    units: int
    judged: tuple[tuple[str, Judged | None], ...]


def contest(
    graph: Graph, cluster: Cluster, stages: int, *, microbatch: int = 1, shard: int = 0, tp: int = 1
) -> Contest:
    """Cut a model into ``stages`` by every partitioner, for the 1F1B schedule with twice as many microbatches.

    The cluster's devices are divided over pp = ``stages``, ``tp``, and dp for the rest.
    Raises PlanError when they do not divide, or for a number out of range.
    """
    for name, value in (("stages", stages), ("microbatch", microbatch), ("tp", tp)):
        if type(value) is not int or value < 1:
            raise PlanError(f"{name}={value!r}: expected a whole number of at least 1")
    if type(shard) is not int or shard not in (0, 1, 2, 3):
        raise PlanError(f"shard={shard!r}: expected 0, 1, 2 or 3")
    world = cluster.world_size
    if world % (stages * tp):
        raise PlanError(f"{stages} stages × tp {tp} do not divide {world} devices: take divisors of it")
    dp = world // (stages * tp)
    mesh = Mesh.of(pp=stages, dp=dp, tp=tp)
    tables = CostTables(graph, cluster, None, "adamw", pins=pins_of(graph, None))
    place = Links(cluster).places(mesh)[-1][0]
    table = tables.table(tp, microbatch, "none", place)
    request = MemoryRequest(cluster.memory_bytes(0), tables.precision, "adamw", shard, dp)
    units, tasks = partition_input(tables.folded, tables.counter, table, tables.device, microbatch, request)
    live = live_microbatches("1f1b", stages, 2 * stages, 1)
    tasks()  # counted beforehand, so that only the solving is timed
    judged = tuple((name, judge(name, units, tasks, live)) for name in PARTITIONERS)
    return Contest(stages, len(units), judged)
