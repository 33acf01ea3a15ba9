"""The reason why nothing fits: what the nearest choice lacks, on which rank, and what would fit."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanError, ScheduleError
from shardwright.core.plan.decision import Decision, summarize
from shardwright.core.search.best_first import Search
from shardwright.core.search.request import Request
from shardwright.core.search.scoring import Scored, Scorer
from shardwright.core.search.space import Space
from shardwright.core.tables.cost_tables import CostTables
from shardwright.core.tables.stage_working import working_of

LOOKED_AT = 48
"""The number of choices that are cut without a limit, those with the least memory per rank first."""
GIB = 2**30


def refusal(tables: CostTables, cluster: Cluster, request: Request, scorer: Scorer, space: Space) -> str:
    """The message of a request that no plan satisfies."""
    tight = list(_closest(scorer, space))
    if not tight:
        raise PlanError(_no_schedule(request, space))
    least = min(tight, key=lambda s: (s.over_bytes, s.predicted.step_time_s))
    limits = least.tables.limits_bytes
    uses = least.predicted.memory_by_stage_rank
    over = least.tables.over_by_rank(uses)
    worst = over.index(max(over))
    if uses[worst].total_bytes <= limits[worst]:
        return _without_host(tables, least, worst)
    name, size = max(uses[worst].classes.items(), key=lambda part: part[1])
    smallest = min(scorer.links.devices(least.decision.mesh, worst), key=lambda device: device.usable_memory_bytes)
    beside = f" beside a headroom of {request.left_free:.6g} of its memory" if request.left_free else ""
    said = (
        f"{tables.graph.model_name} does not fit: with {summarize(least.decision)} the fullest rank (pipeline rank "
        f"{worst}) needs {_gib(uses[worst].total_bytes)}, {_gib(least.over_bytes)} more than the {_gib(limits[worst])} "
        f"that {smallest.name} has{beside}; most of it, {_gib(size)}, is {name}"
    )
    relaxed = _relaxed(tables, cluster, request, least.decision)
    if relaxed is not None:
        return f"{said}; the nearest plan that fits: {summarize(relaxed)}"
    more = smallest_cluster(tables, cluster, request)
    advice = f"the smallest of this kind that could: {more}" if more is not None else "use larger devices"
    return f"{said}; no plan over {cluster.world_size} devices fits: use more of them, or larger ones; {advice}"


def _without_host(tables: CostTables, least: Scored, worst: int) -> str:
    """What the host lacks, where it is full and the device is not."""
    needed, there = least.predicted.memory_by_stage_rank[worst].host_bytes, least.tables.tables[worst].host_memory_bytes
    return (
        f"{tables.graph.model_name} does not fit: with {summarize(least.decision)} pipeline rank {worst} keeps "
        f"{_gib(needed)} on the host, {_gib(needed - there)} more than the {_gib(there)} of its memory that a device "
        f"has (host_memory_bytes of the device): offload less, or use hosts with more"
    )


def _no_schedule(request: Request, space: Space) -> str:
    reasons = []
    for shape in sorted(space.shapes(), key=lambda shape: shape.degrees[0] == 1):
        pp = shape.mesh.axis_size("pp")
        for virtual in (request.stages_per_rank,) if request.stages_per_rank else (1, 2):
            for name in space.names:
                reason = space.refusal(name, pp, shape.microbatches, virtual)
                if reason:
                    reasons.append(f"schedule {name!r} at pp={pp}: {reason}")
    return reasons[0] if reasons else "no schedule admits any of the pipeline degrees tried"


def _closest(scorer: Scorer, space: Space) -> Iterator[Scored]:
    """The choices that lack least, as estimated before the cut."""
    ranked = []
    for number, shape in enumerate(space.shapes()):
        pp, dp, _ = shape.degrees
        for policy in space.policies(dp):
            table = scorer.bounds.ranked(shape, policy.recompute).tables[0]
            asked = scorer.bounds.memory_request(policy, pp, dp, shape.microbatches)
            state = asked.held_bytes * float(table.range_elements[0, -1])
            state += asked.trained_bytes * float(table.range_trained[0, -1])
            # A rank holds at least its share, and the memory of the fullest unit.
            held = state / pp + float(table.range_kept[0, -1]) / pp + float(working_of(table).range_working[0, -1])
            ranked.append((held, number, shape, policy))
    ranked.sort(key=lambda row: row[:2])
    looked = 0
    for _, _, shape, policy in ranked:
        for pipelining in space.pipelinings(shape.mesh.axis_size("pp"), shape.microbatches):
            if not space.go_together(policy.recompute, pipelining) or not policy.has_stages(pipelining):
                continue
            if looked >= LOOKED_AT:
                return
            try:
                scored = scorer.without_limit(shape, policy, pipelining)
            except ScheduleError:
                continue
            looked += 1
            if scored is not None:
                yield scored


def _relaxed(tables: CostTables, cluster: Cluster, request: Request, wanted: Decision) -> Decision | None:
    """The plan that fits and keeps most of the wanted one: pins are given up a group at a time until something fits.

    What every runtime carries out is preferred. All is given up last, for plain pipelines before any others, as these
    settle most of what is left in a fraction of the time.
    """
    if request == request.unpinned():
        return None

    def distance(scored: Scored) -> tuple[float, float]:
        d = scored.decision
        ratios = [(d.pp, wanted.pp), (d.dp, wanted.dp), (d.tp, wanted.tp), (d.microbatch, wanted.microbatch)]
        return sum(abs(math.log2(a / b)) for a, b in ratios), scored.predicted.step_time_s

    for pins in _given_up(wanted):
        runners_up = 0 if "pp" in pins else 8
        for limited in (True,) if pins else (True, False):
            try:
                found = Search(tables, cluster, request.unpinned(**pins), limited=limited).run(runners_up=runners_up)
            except PlanError:
                continue
            if found.best is not None:
                return min([found.best, *found.others], key=distance).decision
    return None


def _given_up(wanted: Decision) -> Iterator[dict[str, Any]]:
    """The pins that are left of a wanted decision, fewer each time: first the memory policy is given up, then the
    schedule (for the plain one), the microbatch, and the degrees."""
    degrees = {"pp": wanted.pp, "dp": wanted.dp, "tp": wanted.tp}
    plain = {"schedule": "1f1b", "virtual_stages": 1}
    if wanted.pp > 1:
        schedule = {"schedule": wanted.schedule, "virtual_stages": wanted.virtual_stages}
        yield {**degrees, **schedule, "microbatch": wanted.microbatch}
    yield {**degrees, **plain, "microbatch": wanted.microbatch}
    yield {**degrees, **plain}
    yield {**plain, "placement_order": "PDT"}
    yield {}


def smallest_cluster(tables: CostTables, cluster: Cluster, request: Request, most: int = 4096) -> Cluster | None:
    """The smallest cluster of nodes like this cluster's first ones on which some plan fits, with only the batch and the
    kinds of numbers pinned. It is found by doubling and then by bisection. None where nothing fits on up to ``most``
    devices."""
    group, between = cluster.groups[0], cluster.inter_node
    if between is None:
        return None

    def of(nodes: int) -> Cluster:
        return Cluster.of_groups([replace(group, nodes=nodes, region="")], between)

    few, many = (group.nodes, 2 * group.nodes) if len(cluster.groups) == 1 else (0, group.nodes)
    most_nodes = most // group.devices_per_node
    while not _fits(tables, of(many), request):
        if many >= most_nodes:
            return None
        few, many = many, min(2 * many, most_nodes)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if _fits(tables, of(middle), request) else (middle, many)
    return of(many)


def _fits(tables: CostTables, cluster: Cluster, request: Request) -> bool:
    """Whether some plan for the batch fits a cluster."""
    free = request.unpinned(schedule="1f1b", virtual_stages=1, placement_order="PDT")
    try:
        return Search(tables.on(cluster), cluster, free, limited=False).run(runners_up=0).best is not None
    except PlanError:
        return False


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
