"""The best plan for a request, over the parts of a cluster that it may use, with a schedule generated on request."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.core.capabilities import Capabilities
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanError, PlanWarning
from shardwright.core.execution import PLAIN, Execution, system
from shardwright.core.model.graph import Graph
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.plan_input import PlanInput
from shardwright.core.plan.prediction_error import lead, memory_error
from shardwright.core.plan.training_run import usd_per_hour
from shardwright.core.schedule import AUTO
from shardwright.core.search.answer import as_plan, not_carried_out
from shardwright.core.search.best_first import REPORTED, Found, Search, preference
from shardwright.core.search.defaults import defaults
from shardwright.core.search.devices_in_use import Part, parts
from shardwright.core.search.kept_products import recompute_choices
from shardwright.core.search.mixed_modes import with_two_modes
from shardwright.core.search.options import Progress
from shardwright.core.search.refusal import refusal
from shardwright.core.search.request import Request
from shardwright.core.search.scoring import Scored, Scorer
from shardwright.core.search.sliced_search import Sliced, SlicedSearch, as_recorded
from shardwright.core.search.space import GENERATED_ACTIONS
from shardwright.core.search.step_work import step_tokens
from shardwright.core.search.time_limits import out_of_time, require_price
from shardwright.core.search.unit_labels import again_in_turns
from shardwright.core.tables.cost_tables import CostTables
from shardwright.core.values.recompute_modes import NAMED

GENERATED = 3
"""The number of choices for which a schedule is generated, where one is asked for."""
REMEMBERED_TABLES = 8

_REMEMBERED: dict[object, CostTables] = {}


@dataclass(slots=True)
class Tried:
    """A part of the cluster that was searched. Its best is None where nothing fits, or another part was faster."""

    part: Part
    search: Search
    found: Found
    within_s: float
    """Seconds that a step takes at most for the deadline and the budget."""
    sliced: Sliced | None = None
    """The answer where sequences may go through the pipeline in slices."""
    lacks: str | None = None
    """What slices lack that were asked for, in words."""

    @property
    def is_answer(self) -> bool:
        """Whether something fits, in slices where these are asked for."""
        return self.sliced is not None if self.search.request.asks_for_slices else self.found.best is not None


def make_plan(graph: Graph, cluster: Cluster, request: Request) -> Plan:
    """The best plan for a captured model on a cluster, or on as much of it as is worth using (`Request.devices`).

    Raises PlanError when degrees do not divide, when the batch does not divide, or when no plan fits; the message then
    says what is lacking, and the nearest plan that fits. Also where no plan meets a deadline or a budget.
    """
    require_price(cluster, request)
    if request.training_run.is_sized:
        request.training_run.steps(request.batch, step_tokens(graph, request.batch)[1])
    asked = with_headroom(graph, request)
    chosen, *left = search_parts(graph, cluster, asked, progress=request.progress)
    if not _in_slices(chosen).is_answer:
        chosen, *left = _with_less_room(graph, cluster, asked)
    asked = chosen.search.request
    scorer, used = chosen.search.scorer, chosen.part.cluster
    best, fastest, others = chosen.found.best, chosen.found.fastest, chosen.found.others
    sliced = chosen.sliced
    if sliced is not None and (best is None or sliced.best is not best):
        best, fastest, others = sliced.best, sliced.best, sliced.others
    elif sliced is not None:
        others = sliced.others
    assert best is not None
    if request.schedule == AUTO:
        best, *others = generated(scorer, [best, *others])
        fastest = best
    elif request.recompute == NAMED and not best.decision.slice_lengths:
        best = _with_two_modes(chosen.search, best)
        if fastest is not None and best.predicted.step_time_s <= fastest.predicted.step_time_s:
            fastest = best
    if request.tp is not None:  # a pinned degree is used, with a warning where it does not pay
        slow = scorer.tables.slow_tensor_axis(best.decision.tp, best.decision.microbatch)
        if slow is not None:
            warnings.warn(slow, PlanWarning, stacklevel=3)
    elsewhere = [(tried.part.cluster, tried.found.fastest) for tried in left if tried.found.fastest is not None]
    beside = [] if _pins_degrees(request) else defaults(scorer.tables, used, asked)
    margin = _margin(request, scorer.tables)
    found = as_plan(scorer, best, others, beside, chosen.part.left_out, elsewhere, fastest, margin)
    if sliced is not None:
        recorded = replace(found.costs, slices=tuple(map(as_recorded, sliced.costs)))
        found = replace(found, costs=recorded, provenance=replace(found.provenance, slices=sliced.reason))
    given = PlanInput.of(graph, used, request.beside_decision, request.pins, request.runtimes)
    return replace(found, counted_for="", input=given)


def _in_slices(tried: Tried) -> Tried:
    """A part with its answer in slices, where these are asked for. Raises PlanError, or CaptureError, where the model
    or the schedules run no slices."""
    if tried.search.request.asks_for_slices:
        search = SlicedSearch(tried.search, tried.within_s)
        tried.sliced = search.run(tried.found.best, tried.found.others, tried.found.fastest)
        tried.lacks = search.lacking()
    return tried


def _with_two_modes(search: Search, best: Scored) -> Scored:
    """The best choice with the modes of recompute of two sets of units, where that is faster."""
    scorer, starts = search.scorer, best.decision.stage_starts
    if best.decision.recompute == "none":
        return best
    # The last units of stages have room when their backward begins, which follows their forward at once.
    last = tuple(sorted(again_in_turns(best.tables, starts)[: best.decision.stages]))
    modes = recompute_choices(scorer.tables, search.request)
    runtimes = search.request.runtimes or (scorer.tables.graph.capabilities,)
    return with_two_modes(
        best, modes, scorer.mixed, lambda choice: tuple(dict.fromkeys([(), last, choice.decision.kept_units])), runtimes
    )


def with_headroom(graph: Graph, request: Request) -> Request:
    """The request with the share of memory that is left free: the headroom, or by default what predictions of memory
    were ever too low by."""
    runtimes = request.runtimes or (graph.capabilities,)
    share = max(memory_error(runtime.framework) for runtime in runtimes)
    share = share if request.headroom is None else request.headroom
    return replace(request, left_free=share)


def _with_less_room(graph: Graph, cluster: Cluster, request: Request) -> list[Tried]:
    """The parts for a request that nothing satisfies: without the headroom that nobody asked for, then with what no
    runtime carries out, each with a warning. Raises PlanError where nothing fits even so, or where what fits is too
    slow or too dear."""
    if request.headroom is None:
        share, request = request.left_free, replace(request, left_free=0.0)
        chosen, *left = search_parts(graph, cluster, request)
        if _in_slices(chosen).is_answer:
            warnings.warn(
                f"nothing fits that leaves {share:.1%} of each device's memory free, by which predictions of memory "
                f"have been too low: this plan may run out of it; headroom=0 asks for such plans without a warning",
                PlanWarning,
                stacklevel=4,
            )
            return [chosen, *left]
    _require_in_time(graph, cluster, request, limited=True)
    chosen, *left = search_parts(graph, cluster, request, limited=False)
    if not _in_slices(chosen).is_answer:
        _require_in_time(graph, cluster, request, limited=False)
        if chosen.lacks is not None and chosen.found.best is not None:
            raise PlanError(chosen.lacks)
        tables, search = tables_of(graph, chosen.part.cluster, request), chosen.search
        raise PlanError(refusal(tables, chosen.part.cluster, request, search.scorer, search.space))
    best = chosen.found.best if chosen.sliced is None else chosen.sliced.best
    assert best is not None
    lacking = not_carried_out(best.decision, request.runtimes)
    warnings.warn(f"nothing that every runtime carries out fits: {lacking}", PlanWarning, stacklevel=4)
    return [chosen, *left]


def _require_in_time(graph: Graph, cluster: Cluster, request: Request, *, limited: bool) -> None:
    """Raise PlanError for a request that plans satisfy but for its deadline and its budget, which none meets."""
    if request.deadline is None and request.budget is None:
        return

    def fastest_step(on: Cluster, of: Request) -> float | None:
        try:
            found = search_parts(graph, on, replace(of, answer="fastest"), limited=limited, runners_up=0)[0].found
        except PlanError:
            return None
        return None if found.fastest is None else found.fastest.predicted.step_time_s

    untimed = replace(request, deadline=None, budget=None)
    step_s = fastest_step(cluster, untimed)
    if step_s is not None:
        tokens = step_tokens(graph, request.batch)[1]
        raise PlanError(out_of_time(cluster, request, step_s, tokens, fastest_step))


def search_parts(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    *,
    limited: bool = True,
    runners_up: int = REPORTED,
    progress: Progress | None = None,
) -> list[Tried]:
    """Every part of the cluster that the request lets a plan use, that of the fastest plan first (the smallest of
    equals; the whole cluster where nothing fits anywhere). The search of a part ends when it cannot beat the best one
    before it.

    Raises the PlanError of the first part when the request leaves nothing to choose from on any part.
    """
    run, tokens = request.training_run, step_tokens(graph, request.batch)[1]
    tried: list[Tried] = []
    refused: PlanError | None = None
    least_s = float("inf")
    admitted = _runnable(parts(cluster, request), request.runtimes or (graph.capabilities,))
    for number, part in enumerate(admitted):
        try:
            search = Search(tables_of(graph, part.cluster, request), part.cluster, request, limited=limited)
            each = progress if len(admitted) == 1 else None
            priced = replace(run, usd_per_hour=usd_per_hour(part.cluster, request.price))
            within_s = priced.longest_step_s(request.batch, tokens)
            margin = _margin(request, search.scorer.tables)
            found = search.run(each, runners_up=runners_up, below_s=least_s, margin=margin, within_s=within_s)
        except PlanError as error:
            refused = refused or error
            continue
        if progress is not None and len(admitted) > 1:
            progress(number + 1, len(admitted))
        tried.append(Tried(part, search, found, within_s))
        if found.fastest is not None:
            least_s = min(least_s, found.fastest.predicted.step_time_s)
    if not tried:
        raise refused or PlanError(f"no part of {cluster} can be used")

    def rank(one: Tried) -> tuple[float, int]:
        fastest = one.found.fastest
        return (
            float("inf") if fastest is None else float(f"{fastest.predicted.step_time_s:.6g}"),
            one.part.cluster.world_size,
        )

    first = min(tried, key=rank) if least_s < float("inf") else tried[0]
    return [first, *(one for one in tried if one is not first)]


def _margin(request: Request, tables: CostTables) -> float:
    """The lead below which plans are not told apart; none where a schedule that is generated afterwards changes their
    times. What matters of the host is asked of the largest microbatch, in which every device has its share of the
    batch."""
    if request.answer != "simplest" or request.schedule == AUTO:
        return 0.0
    own = request.microbatch or max(1, request.batch // tables.cluster.world_size)
    return lead(tables.host_share(own))


def _runnable(admitted: list[Part], runtimes: Sequence[Capabilities]) -> list[Part]:
    """The parts on whose hosts all runtimes run. Raises PlanError where there is none, with a runtime's reason."""
    lacks = []
    for part in admitted:
        sizes = [group.devices_per_node for group in part.cluster.groups]
        lacks.append(next(filter(None, (runtime.lack_of_hosts(sizes) for runtime in runtimes)), None))
    found = [part for part, lack in zip(admitted, lacks, strict=True) if lack is None]
    if not found:
        raise PlanError(str(lacks[0]))
    return found


def generated(scorer: Scorer, choices: list[Scored]) -> list[Scored]:
    """The best choices with schedules generated for their stages, fastest first; at least one.

    Raises PlanError when they have too many microbatches for that, or when no generated schedule fits.
    """
    sizes = [2 * s.decision.stages * s.decision.microbatches for s in choices]
    small = [s for s, size in zip(choices, sizes, strict=True) if size <= GENERATED_ACTIONS][:GENERATED]
    if not small:
        raise PlanError(
            f"schedule 'auto': the best plan has {min(sizes)} forwards and backwards, and a schedule is generated for "
            f"at most {GENERATED_ACTIONS}: pin a larger microbatch, or name a schedule"
        )
    made = [new for scored in small if (new := scorer.generated(scored)) is not None]
    if not made:
        raise PlanError("schedule 'auto': no schedule generated for the best plans keeps their memory: name a schedule")
    return sorted(made, key=preference)


def tables_of(graph: Graph, cluster: Cluster, request: Request) -> CostTables:
    """The cost tables of a graph on a cluster. The last few are remembered, for plans that differ in their pins.

    Graphs are known by identity, and each is kept alive by its tables.
    """
    options: tuple[Any, ...] = (
        request.precision,
        request.optimizer,
        request.gradient_precision,
        _sequence_form(request),
        request.pins,
        _execution(request),
        request.activation_loading_horizon or 1,
    )
    key = (id(graph), cluster, options)
    found = _REMEMBERED.pop(key, None) or CostTables(graph, cluster, *options)
    _REMEMBERED[key] = found
    while len(_REMEMBERED) > REMEMBERED_TABLES:
        _REMEMBERED.pop(next(iter(_REMEMBERED)))
    return found


def _execution(request: Request) -> Execution | None:
    """How the system that was named runs a step. Where several runtimes are to carry the plan out, twins get one plan,
    whose figures are for the overlap of neither; None: as the captured framework's own runtime does."""
    if request.like is not None:
        return system(request.like)
    return PLAIN if len({runtime.framework for runtime in request.runtimes}) > 1 else None


def _sequence_form(request: Request) -> bool | None:
    """Whether sequences are divided on the tensor axis, as pinned; None, to search, where all runtimes can do it. They
    are not where slices of them follow each other."""
    if request.sequence_parallel is None and request.asks_for_slices and request.slices != "auto":
        return False
    able = all(runtime.sequence_parallel for runtime in request.runtimes)
    return request.sequence_parallel if request.sequence_parallel is not None or able else False


def _pins_degrees(request: Request) -> bool:
    return None not in (request.pp, request.tp, request.dp) or request.stage_starts is not None
