"""The plans that one would make without a search, scored as well: data parallel, fully sharded, Megatron-style."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanError
from shardwright.core.search.best_first import Search
from shardwright.core.search.request import Request
from shardwright.core.search.scoring import Scored
from shardwright.core.tables.cost_tables import CostTables

NAMES = ("data parallel", "fully sharded", "Megatron-style")


@dataclass(frozen=True, slots=True)
class Default:
    """A default with its score; the score is None where the default is not possible, for the reason given."""

    name: str
    scored: Scored | None
    reason: str = ""


def requests(cluster: Cluster, request: Request) -> Iterator[tuple[str, Request]]:
    """The request of each default: its pins, and the precision, the optimizer and the like as the user asked."""
    free = request.unpinned(virtual_stages=1, schedule="1f1b", placement_order="PDT")
    world = cluster.world_size
    node = min(group.devices_per_node for group in cluster.groups)
    yield "data parallel", replace(free, pp=1, tp=1, shard=0)
    yield "fully sharded", replace(free, pp=1, tp=1, shard=3)
    # As its papers have it: tensor groups as large as a node (eight at most), then the fewest stages that fit
    # (arXiv 2104.04473, section 3, takeaways 1 and 2), optimizer states divided (its distributed
    # optimizer) where the runtimes do that.
    tp = max(degree for degree in range(1, min(node, 8) + 1) if world % degree == 0)
    yield "Megatron-style", replace(free, tp=tp)


def defaults(tables: CostTables, cluster: Cluster, request: Request) -> list[Default]:
    """The three defaults, each at its best microbatch and recompute."""
    found = []
    for name, asked in requests(cluster, request):
        try:
            if name == NAMES[2]:
                best = _fewest_stages(tables, cluster, asked)
            else:
                best = Search(tables, cluster, asked).run(runners_up=0).best
            found.append(Default(name, best, "" if best is not None else "does not fit the memory"))
        except PlanError as error:
            found.append(Default(name, None, str(error)))
    return found


def _fewest_stages(tables: CostTables, cluster: Cluster, asked: Request) -> Scored | None:
    left = cluster.world_size // (asked.tp or 1)
    refused: PlanError | None = None
    for pp in (degree for degree in range(1, len(tables.folded.units) + 1) if left % degree == 0):
        try:
            able = all(1 in runtime.shard_levels for runtime in asked.runtimes)
            pinned = replace(asked, pp=pp, shard=1 if left // pp > 1 and able else 0)
            best = Search(tables, cluster, pinned).run(runners_up=0).best
        except PlanError as error:
            refused = error
            continue
        if best is not None:
            return best
    if refused is not None:
        raise refused
    return None
