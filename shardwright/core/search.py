"""The search for a plan: degrees, microbatch, recompute and sharding, each scored with its best cut and layouts.

Every factorisation of the world into pp · dp · tp is tried with every microbatch size that divides the batch; least
memory saving comes first and more is added only where it does not fit. Candidates are ranked by a bound of the pipeline
time; the best few are simulated.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

from shardwright.core.cluster import Cluster
from shardwright.core.cost_tables import CostTables
from shardwright.core.errors import PlanError, ScheduleError
from shardwright.core.graph import Graph
from shardwright.core.memory import (
    Recompute,
    kept_bytes,
    live_microbatches,
    recomputed_s,
    unit_recompute,
)
from shardwright.core.mesh import Mesh
from shardwright.core.plan import (
    Alternative,
    ClassCost,
    Costs,
    Decision,
    Plan,
    Predicted,
    Provenance,
    pinned_summary,
    summarize,
)
from shardwright.core.predict import StepModel, placement_of, seconds_per_rank, simulated_makespan_s, stage_costs
from shardwright.core.request import Request
from shardwright.core.stages import MemoryRequest, UnitTable

SIMULATED = 3
"""How many of the best candidates are simulated."""
MAX_MICROBATCH = 64
REPORTED_ALTERNATIVES = 4
REMEMBERED_TABLES = 8
Progress = Callable[[int, int], None]
"""Called with (candidates scored, candidates in all)."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A way to use the devices, before it is scored."""

    mesh: Mesh
    microbatch: int
    microbatches: int


@dataclass(frozen=True, slots=True)
class _Scored:
    """A candidate with its cut; ``over_bytes`` is what its fullest rank lacks (0 when it fits)."""

    decision: Decision
    table: UnitTable
    predicted: Predicted
    over_bytes: int


def make_plan(graph: Graph, cluster: Cluster, request: Request, progress: Progress | None = None) -> Plan:
    """The best plan for a captured model on a cluster.

    Raises PlanError when degrees do not divide, when the batch does not divide, or when no plan fits: then by how much,
    and the nearest plan that does.
    """
    return _Search(graph, cluster, request).run(progress)


_REMEMBERED: dict[object, CostTables] = {}


def _tables(graph: Graph, cluster: Cluster, *options: Any) -> CostTables:
    """The cost tables of a graph on a cluster; the last few are kept, for plans that differ in what they pin.

    Graphs are known by identity, each kept alive by its tables.
    """
    key = (id(graph), cluster, options)
    found = _REMEMBERED.pop(key, None) or CostTables(graph, cluster, *options)
    _REMEMBERED[key] = found
    while len(_REMEMBERED) > REMEMBERED_TABLES:
        _REMEMBERED.pop(next(iter(_REMEMBERED)))
    return found


class _Search:
    """One search. Holds what all candidates share."""

    def __init__(self, graph: Graph, cluster: Cluster, request: Request) -> None:
        self.graph, self.cluster, self.request = graph, cluster, request
        self.tables = _tables(
            graph,
            cluster,
            request.precision,
            request.optimizer,
            request.gradient_precision,
            request.sequence_parallel,
            request.layouts,
        )
        self.device, self.precision = self.tables.device, self.tables.precision
        self.folded = self.tables.folded
        self.step = StepModel(cluster, self.device, self.precision)

    def run(self, progress: Progress | None) -> Plan:
        candidates = list(self._candidates())
        fitting: list[_Scored] = []
        tight: list[_Scored] = []
        for done, candidate in enumerate(candidates):
            if progress is not None:
                progress(done, len(candidates))
            for scored in self._score(candidate):
                (tight if scored.over_bytes else fitting).append(scored)
        if not fitting:
            raise PlanError(self._does_not_fit(tight))
        fitting.sort(key=_preference)
        ahead = sorted([self._simulated(s) for s in fitting[:SIMULATED]], key=_preference)
        if progress is not None:
            progress(len(candidates), len(candidates))
        return self._plan(ahead[0], [*ahead[1:], *fitting[SIMULATED:]], tight)

    # Candidates --------------------------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[_Candidate]:
        request, world = self.request, self.cluster.world_size
        given = {name: getattr(request, name) for name in ("pp", "dp", "tp")}
        product = math.prod(v for v in given.values() if v)
        if world % product or (None not in given.values() and product != world):
            said = " · ".join(f"{name} {value}" for name, value in given.items() if value)
            raise PlanError(
                f"{said} = {product}, and the cluster has {world} devices: the degrees must "
                f"{'multiply to' if None not in given.values() else 'divide'} {world}; {_nearest_degrees(given, world)}"
            )
        found = False
        reasons: dict[str, None] = {}
        for mesh in self._meshes(given, world):
            for microbatch in self._microbatches(mesh, reasons):
                found = True
                yield _Candidate(mesh, microbatch, request.batch // (mesh.axis_size("dp") * microbatch))
        if not found:
            raise PlanError("; ".join(reasons) or f"the model has {len(self.folded.units)} units: fewer than pp stages")

    def _meshes(self, given: dict[str, int | None], world: int) -> Iterator[Mesh]:
        node = max(1, self.cluster.world_size // self.cluster.nodes)
        units = len(self.folded.units)
        if given["pp"] and given["pp"] * self.request.virtual_stages > units:
            most = units // self.request.virtual_stages
            raise PlanError(f"pp={given['pp']} needs more stages than the model's {units} units: use at most pp={most}")
        for pp in _options(given["pp"], world):
            if pp * self.request.virtual_stages > units:
                continue
            for tp in _options(given["tp"], world // pp):
                if (given["dp"] and pp * tp * given["dp"] != world) or (not given["tp"] and node % tp):
                    continue
                yield Mesh.of(pp=pp, dp=world // (pp * tp), tp=tp)

    def _microbatches(self, mesh: Mesh, reasons: dict[str, None]) -> Iterator[int]:
        dp, batch, given = mesh.axis_size("dp"), self.request.batch, self.request.microbatch
        if batch % (dp * (given or 1)):
            multiple = dp * (given or 1)
            near = max(1, round(batch / multiple)) * multiple
            by = f"dp · microbatch = {dp} · {given}" if given else f"dp = {dp}"
            reasons[f"batch={batch} is not a multiple of {by}: use batch={near}, or other degrees"] = None
            return
        if given:
            yield given
            return
        size = 1
        while size <= min(MAX_MICROBATCH, batch // dp):
            if (batch // dp) % size == 0:
                yield size
            size *= 2

    # Scoring -----------------------------------------------------------------------------------------------------

    def _score(self, candidate: _Candidate) -> Iterator[_Scored]:
        """The candidate with as little recompute and sharding as fits; the last one tried when nothing fits."""
        request = self.request
        modes: tuple[Recompute, ...] = ("none", "selective", "full")
        if request.recompute != "auto":
            modes = tuple(m for m in modes if m == request.recompute)
        levels = (request.shard,) if request.shard is not None else (0, 1)
        last: _Scored | None = None
        for recompute in modes:
            for shard in levels:
                last = self._score_one(candidate, recompute, shard)
                if last is not None and not last.over_bytes:
                    yield last
                    if shard == levels[0]:
                        return
                    break
        if last is not None and last.over_bytes:
            yield last

    def _score_one(self, candidate: _Candidate, recompute: Recompute, shard: int) -> _Scored | None:
        request, mesh = self.request, candidate.mesh
        pp, dp, tp = (mesh.axis_size(axis) for axis in ("pp", "dp", "tp"))
        stages = pp * request.virtual_stages
        try:
            live = live_microbatches(request.schedule, pp, candidate.microbatches, request.virtual_stages)
            placement = placement_of(request.schedule, pp, request.virtual_stages)
        except ScheduleError as error:
            if request.pp is not None:
                raise PlanError(f"schedule {request.schedule!r} at pp={pp}: {error}") from error
            return None
        ways = request.shard_group or dp
        if dp % ways:
            raise PlanError(f"shard_group={ways} does not divide dp={dp}: use a divisor of {dp}")
        limit = min(self.cluster.memory_bytes(rank) for rank in range(0, self.cluster.world_size, max(1, dp * tp)))
        memory_request = MemoryRequest(
            limit, self.precision, request.optimizer, shard, ways, request.gradient_precision
        )
        table = self.tables.table(mesh, candidate.microbatch, recompute)
        starts = list(request.stage_starts) if request.stage_starts else table.cut(stages, live, memory_request)
        if starts is None:
            starts = table.cut(stages, live, replace(memory_request, limit_bytes=1 << 62))
        if starts is None:
            return None
        self._require_starts(starts, stages)
        memory = table.memory(starts, placement, live, memory_request)
        over = max(0, max(use.total_bytes for use in memory) - limit)
        decision = Decision(
            pp=pp,
            dp=dp,
            tp=tp,
            batch=request.batch,
            microbatch=candidate.microbatch,
            schedule=request.schedule,
            stage_starts=tuple(starts),
            layouts=self.tables.layouts(tp),
            virtual_stages=request.virtual_stages,
            recompute=recompute,
            shard=shard,
            shard_group=request.shard_group,
            precision=self.precision,
            optimizer=request.optimizer,
            loss_scope=request.loss_scope,
            sequence_parallel=self.tables.sequence_parallel(tp),
            gradient_precision=request.gradient_precision,
        )
        costs = stage_costs(table, starts)
        per_stage = [sum(parts) for parts in zip(costs.forward_s, costs.backward_s, strict=True)]
        round_s = sum(per_stage) + 2 * sum(costs.transfer_s)
        busiest = max(seconds_per_rank(per_stage, placement, pp))
        pipeline = round_s / request.virtual_stages + (candidate.microbatches - 1 / request.virtual_stages) * busiest
        predicted = self.step.predicted(decision, table, starts, placement, memory, pipeline if pp > 1 else None)
        return _Scored(decision, table, predicted, over)

    def _require_starts(self, starts: list[int], stages: int) -> None:
        """Raise PlanError unless ``starts`` cuts the model's units into that many stages."""
        units = len(self.folded.units)
        rising = starts[0] == 0 and all(a < b for a, b in pairwise(starts)) and starts[-1] < units
        if len(starts) != stages or not rising:
            raise PlanError(
                f"stage_starts={starts}: expected {stages} (pp · virtual_stages) unit numbers that rise from 0 "
                f"and stay below the model's {units} units"
            )

    def _simulated(self, scored: _Scored) -> _Scored:
        """The same with its pipeline time simulated."""
        decision = scored.decision
        if decision.pp == 1:
            return scored
        starts = list(decision.stage_starts)
        costs = stage_costs(scored.table, starts)
        pipeline = simulated_makespan_s(decision, costs)
        placement = placement_of(decision.schedule, decision.pp, decision.virtual_stages)
        predicted = self.step.predicted(
            decision, scored.table, starts, placement, scored.predicted.memory_by_stage_rank, pipeline
        )
        return _Scored(decision, scored.table, predicted, scored.over_bytes)

    # Answers -----------------------------------------------------------------------------------------------------

    def _plan(self, best: _Scored, others: list[_Scored], tight: list[_Scored]) -> Plan:
        request, decision, table = self.request, best.decision, best.table
        classes = []
        variants = self.tables.variants(decision.tp)
        for variant, cost in enumerate(self.tables.class_costs(decision.tp, decision.microbatch)):
            mode = unit_recompute(decision.recompute, self.tables.repeated[variants.index(variant)])
            backward = cost.input_grad_s + recomputed_s(cost, mode)
            kept = kept_bytes(cost, mode)
            classes.append(ClassCost(cost.forward_s, backward, cost.weight_grad_s, kept, cost.parameter_elements))
        alternatives = [
            Alternative(
                summarize(s.decision),
                s.predicted.step_time_s,
                max(u.total_bytes for u in s.predicted.memory_by_stage_rank),
                _why_slower(best.predicted, s.predicted),
            )
            for s in others[:REPORTED_ALTERNATIVES]
        ]
        alternatives += [
            Alternative(
                summarize(s.decision),
                s.predicted.step_time_s,
                max(u.total_bytes for u in s.predicted.memory_by_stage_rank),
                f"does not fit: {_gib(s.over_bytes)} too much",
            )
            for s in sorted(tight, key=_preference)[:1]
        ]
        names = ("pp", "tp", "dp", "microbatch", "shard", "shard_group", "precision")
        pins: dict[str, object] = {name: getattr(request, name) for name in names}
        if request.recompute != "auto":
            pins["recompute"] = request.recompute
        return Plan(
            decision=decision,
            model_name=self.graph.model_name,
            model=self.tables.structure,
            bindings=((self.graph.framework, self.tables.binding),),
            costs=Costs(
                variants,
                tuple(classes),
                table.boundary_bytes,
                table.boundary_s,
                self.tables.rates(decision.tp),
            ),
            predicted=best.predicted,
            alternatives=tuple(alternatives),
            unsplit=self.tables.unsplit(decision.tp) if decision.tp > 1 else (),
            provenance=Provenance(
                shardwright=_own_version(),
                captured_from=self.graph.framework,
                cluster=str(self.cluster),
                world_size=self.cluster.world_size,
                device_memory_bytes=self.cluster.memory_bytes(0),
                pinned=pinned_summary(pins),
            ),
        )

    def _does_not_fit(self, tight: list[_Scored]) -> str:
        if not tight:
            return f"schedule {self.request.schedule!r} admits none of the pipeline degrees tried"
        least = min(tight, key=lambda s: s.over_bytes)
        peak = max(u.total_bytes for u in least.predicted.memory_by_stage_rank)
        limit = peak - least.over_bytes
        said = (
            f"{self.graph.model_name} does not fit: with {summarize(least.decision)} the fullest rank needs "
            f"{_gib(peak)}, {_gib(least.over_bytes)} more than the {_gib(limit)} that {self.device.name} has"
        )
        relaxed = self._relaxed(least.decision)
        if relaxed is not None:
            return f"{said}; the nearest plan that fits: {relaxed.summary()}"
        return f"{said}; no plan over {self.cluster.world_size} devices fits: use more of them, or larger ones"

    def _relaxed(self, wanted: Decision) -> Plan | None:
        """The plan nearest in degrees to the one wanted, when nothing but batch and schedule is pinned."""
        r = self.request
        free = Request(
            batch=r.batch,
            schedule=r.schedule,
            precision=r.precision,
            optimizer=r.optimizer,
            loss_scope=r.loss_scope,
            layouts=r.layouts,
        )
        if free == r:
            return None
        search = _Search(self.graph, self.cluster, free)
        fitting = [s for c in search._candidates() for s in search._score(c) if not s.over_bytes]
        if not fitting:
            return None

        def distance(scored: _Scored) -> tuple[float, float]:
            d = scored.decision
            ratios = [(d.pp, wanted.pp), (d.dp, wanted.dp), (d.tp, wanted.tp), (d.microbatch, wanted.microbatch)]
            return sum(abs(math.log2(a / b)) for a, b in ratios), scored.predicted.step_time_s

        return search._plan(min(fitting, key=distance), [], [])


def _preference(scored: _Scored) -> tuple[float, int, int, int, int]:
    """Fastest first; among equals the simpler: fewer stages, less tensor splitting, larger microbatches."""
    d = scored.decision
    return (float(f"{scored.predicted.step_time_s:.6g}"), d.pp, d.tp, d.shard, -d.microbatch)


def _options(given: int | None, world: int) -> list[int]:
    if given:
        return [given] if world % given == 0 else []
    return [d for d in range(1, world + 1) if world % d == 0]


def _nearest_degrees(given: dict[str, int | None], world: int) -> str:
    """For an error: the divisor of the world nearest to each degree that does not divide it."""
    said = []
    for name, value in given.items():
        if value and world % value:
            near = min(_options(None, world), key=lambda d: (abs(math.log(d / value)), d))
            said.append(f"nearest for {name}: {near}")
    return ", ".join(said) or f"leave one of them out, and it becomes what is left of {world}"


def _why_slower(best: Predicted, other: Predicted) -> str:
    """The term that grew most."""
    terms = {
        "pipeline bubble": (best.bubble_fraction * best.pipeline_s, other.bubble_fraction * other.pipeline_s),
        "tensor collectives": (best.tensor_collective_s, other.tensor_collective_s),
        "gradient reduction": (best.data_parallel_s, other.data_parallel_s),
        "optimizer step": (best.optimizer_s, other.optimizer_s),
    }
    busy = [p.pipeline_s * (1 - p.bubble_fraction) - p.tensor_collective_s for p in (best, other)]
    terms["compute"] = (busy[0], busy[1])
    name, (mine, theirs) = max(terms.items(), key=lambda item: item[1][1] - item[1][0])
    slower = other.step_time_s / best.step_time_s - 1 if best.step_time_s else 0.0
    return f"{slower:.1%} slower: {name} {theirs * 1e3:.3g} ms against {mine * 1e3:.3g} ms"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def _own_version() -> str:
    try:
        return version("shardwright")
    except PackageNotFoundError:
        return "0+unknown"
