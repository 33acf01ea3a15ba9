"""The surroundings of a plan: what binds it, what changes would bring, time against memory and price."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cluster.hardware import Link
from shardwright.core.cluster.node_group import NodeGroup
from shardwright.core.errors import PlanError
from shardwright.core.model.graph import Graph
from shardwright.core.plan.decision import summarize
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.training_run import usd_per_hour
from shardwright.core.search.answer import terms_s
from shardwright.core.search.devices_in_use import parts
from shardwright.core.search.request import Request
from shardwright.core.search.scoring import Scored
from shardwright.core.search.search import search_parts
from shardwright.core.tables.memory import STAYING

FASTER = 2
"""The factor on the bandwidth and on the memory in the changes that are tried."""


@dataclass(frozen=True, slots=True)
class Binds:
    """The limits that keep a plan from being faster."""

    memory_rank: int
    """The fullest pipeline rank."""
    memory_share: float
    """The share of its device's memory that the fullest rank uses."""
    memory_part: str
    """The largest class of that memory."""
    memory_when: str
    term: str
    """The largest part of the step that is not computing."""
    term_s: float
    link: str
    """The link that the term's traffic uses; empty for the pipeline's bubble and the optimizer."""


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of another cluster or another microbatch."""

    name: str
    summary: str
    step_time_s: float | None
    """The step time in seconds; None where no plan fits or none is possible."""
    gain: float
    """The share of the plan's step time that is saved, negative for a loss."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """A plan on some of the devices."""

    summary: str
    devices: int
    cluster: str
    """The devices, in words."""
    step_time_s: float
    peak_memory_bytes: int
    usd_per_step: float | None
    efficiency: float
    """Samples per second and device, as a share of the best of all points."""


@dataclass(frozen=True, slots=True)
class Study:
    """A plan and its surroundings."""

    plan: Plan
    binds: Binds
    changes: tuple[Change, ...]
    front: tuple[Point, ...]
    sizes: tuple[Point, ...]
    """The fastest plan for each number of devices, most devices first: how many are worth using."""


def study(plan: Plan, graph: Graph, cluster: Cluster, request: Request) -> Study:
    """A study of the best plan of a request: what binds it, what changes would bring, the front of time, memory and
    price. All of it is of the fastest plans, so that it compares like with like; the plan may be a simpler one.

    Raises PlanError for a plan of another request.
    """
    used = next((p.cluster for p in parts(cluster, request) if str(p.cluster) == plan.provenance.cluster), None)
    if used is None or plan.decision.batch != request.batch:
        raise PlanError(f"the plan on {plan.provenance.cluster} is not one of this request on {cluster}: plan first")
    request = replace(request, answer="fastest", left_free=plan.provenance.headroom, deadline=None, budget=None)
    points = _points(graph, cluster, request)
    return Study(
        plan,
        what_binds(plan, used),
        tuple(_changes(graph, cluster, request, plan)),
        tuple(_front(points)),
        tuple(_fastest_of_each_size(points)),
    )


def what_binds(plan: Plan, cluster: Cluster) -> Binds:
    """The fullest rank and the largest term beside computing."""
    uses = plan.predicted.memory_by_stage_rank
    limits = [
        min(cluster.memory_bytes(rank) for rank in _ranks_of(plan, pp)) if cluster.world_size == plan.mesh.size else 1
        for pp in range(len(uses))
    ]
    rank = max(range(len(uses)), key=lambda pp: uses[pp].total_bytes / limits[pp])
    use = uses[rank]
    part = max(use.classes, key=lambda name: use.classes[name])
    when = "all through the step"
    if part not in STAYING:
        when = "in the last backward of one microbatch"
        if plan.decision.pp > 1:
            when = (
                f"when it has most microbatches under way, at the end of the pipeline's fill ({plan.decision.schedule})"
            )
    terms = {name: seconds for name, seconds in terms_s(plan.predicted).items() if name != "compute"}
    term = max(terms, key=lambda name: terms[name])
    axis = {"tensor collectives": "tp", "traffic over the data axis": "dp"}.get(term)
    link = _link_name(plan, cluster, axis) if axis is not None else ""
    return Binds(rank, use.total_bytes / limits[rank], part, when, term, terms[term], link)


def _ranks_of(plan: Plan, pp: int) -> list[int]:
    mesh = plan.mesh
    size, stride = mesh.axis_size("pp"), mesh.stride("pp")
    return [rank for rank in range(mesh.size) if rank // stride % size == pp]


def _link_name(plan: Plan, cluster: Cluster, axis: str) -> str:
    members = plan.mesh.group(0, axis)
    return cluster.link_for_group(members).name if len(members) > 1 else ""


def _changes(graph: Graph, cluster: Cluster, request: Request, plan: Plan) -> Iterator[Change]:
    fastest, _ = _best(graph, cluster, request)
    now_s = plan.predicted.step_time_s if fastest is None else fastest.predicted.step_time_s

    def tried(name: str, other: Cluster, **pins: Any) -> Change:
        best, note = _best(graph, other, request, **pins)
        if best is None:
            return Change(name, "", None, 0.0, note or "does not fit")
        step_s = best.predicted.step_time_s
        return Change(name, summarize(best.decision), step_s, 1 - step_s / now_s)

    yield tried(f"{FASTER} times the memory", _with_memory(cluster, FASTER))
    inside = [replace(group, intra_node=_faster(group.intra_node)) for group in cluster.groups]
    if max(group.devices_per_node for group in cluster.groups) > 1:
        yield tried(f"{FASTER} times the bandwidth within nodes", _again(cluster, inside, cluster.inter_node))
    if cluster.nodes > 1 and cluster.inter_node is not None:
        faster = _again(cluster, list(cluster.groups), _faster(cluster.inter_node))
        yield tried(f"{FASTER} times the bandwidth between nodes", faster)
    if request.microbatch is None:
        chosen = plan.decision.microbatch
        each = request.batch // (request.dp or 1)
        divisors = [size for size in range(1, each + 1) if each % size == 0]
        smaller = [size for size in divisors if 2 * size <= chosen]
        larger = [size for size in divisors if size >= 2 * chosen]
        for size in (*smaller[-1:], *larger[:1]):
            yield tried(f"microbatch {size} instead of {chosen}", cluster, microbatch=size)


def _again(cluster: Cluster, groups: list[NodeGroup], between: Link | None) -> Cluster:
    return Cluster.of_groups(groups, between, cluster.inter_region)


def _faster(link: Link) -> Link:
    return replace(link, name=f"{link.name} × {FASTER}", bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * FASTER)


def _with_memory(cluster: Cluster, times: int) -> Cluster:
    groups = [
        replace(group, device=replace(group.device, memory_bytes=group.device.memory_bytes * times))
        for group in cluster.groups
    ]
    return _again(cluster, groups, cluster.inter_node)


def _best(graph: Graph, cluster: Cluster, request: Request, **pins: Any) -> tuple[Scored | None, str]:
    """The best plan with more pins; None, with the reason, where they contradict other pins or nothing fits."""
    try:
        return search_parts(graph, cluster, replace(request, **pins), runners_up=0)[0].found.fastest, ""
    except PlanError as error:
        return None, str(error).split(";")[0]


def _points(graph: Graph, cluster: Cluster, request: Request) -> list[Point]:
    """The fastest plan and the plan of least memory, on the whole cluster and on fewer and fewer nodes of each kind."""
    found: list[tuple[Scored, Cluster]] = []
    looked_at = request if isinstance(request.devices, int) else replace(_unpinned(request), devices="auto")
    for part in parts(cluster, looked_at):
        used = part.cluster
        asked = replace(request if used.world_size == cluster.world_size else _unpinned(request), devices="all")
        most = min(max(runtime.shard_levels) for runtime in request.runtimes or (graph.capabilities,))
        saving: dict[str, Any] = {"recompute": "full", "shard": most, "shard_group": None, "offload": None}
        for more in ({}, saving):
            if more and (request.recompute != "auto" or request.shard is not None):
                continue
            best, _ = _best(graph, used, asked, **more)
            if best is not None:
                found.append((best, used))
    points = [_point(scored, where, request) for scored, where in found]
    rate = max((request.batch / p.step_time_s / p.devices for p in points), default=1.0)
    return [replace(p, efficiency=request.batch / p.step_time_s / p.devices / rate) for p in points]


def _front(points: list[Point]) -> list[Point]:
    """The points that no other beats in time, memory and price; fastest first."""
    kept = [p for p in points if not any(_beats(other, p) for other in points)]
    distinct = {(p.devices, f"{p.step_time_s:.6g}", p.peak_memory_bytes): p for p in reversed(kept)}
    return sorted(distinct.values(), key=lambda p: p.step_time_s)


def _fastest_of_each_size(points: list[Point]) -> list[Point]:
    fastest: dict[int, Point] = {}
    for point in sorted(points, key=lambda p: p.step_time_s):
        fastest.setdefault(point.devices, point)
    return sorted(fastest.values(), key=lambda p: -p.devices)


def _unpinned(request: Request) -> Request:
    """The same request with free degrees, for another number of devices."""
    return replace(request, pp=None, tp=None, dp=None, stage_starts=None, shard_group=None)


def _point(scored: Scored, cluster: Cluster, request: Request) -> Point:
    step_s, price = scored.predicted.step_time_s, usd_per_hour(cluster, request.price)
    peak = max(use.total_bytes for use in scored.predicted.memory_by_stage_rank)
    return Point(
        summarize(scored.decision),
        cluster.world_size,
        str(cluster),
        step_s,
        peak,
        None if price is None else price * step_s / 3600,
        1.0,
    )


def _beats(one: Point, other: Point) -> bool:
    """Whether a point is nowhere worse than another, and somewhere better."""

    def key(point: Point) -> tuple[float, float, float]:
        price = point.usd_per_step if point.usd_per_step is not None else point.devices * point.step_time_s
        return point.step_time_s, point.peak_memory_bytes, price

    return key(one) != key(other) and all(a <= b for a, b in zip(key(one), key(other), strict=True))
