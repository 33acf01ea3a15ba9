"""The plan made of scored choices: the best, the next ones, and the term by which each of them lost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shardwright.core.capabilities import Capabilities
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.model.structure import measured_name
from shardwright.core.plan.decision import Decision, summarize
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.prediction_error import LEAD, prediction_error
from shardwright.core.plan.realised_layouts import program_of
from shardwright.core.plan.record import Alternative, ClassCost, Costs, Predicted, Provenance, RankCosts
from shardwright.core.plan.training_run import usd_per_hour
from shardwright.core.search.defaults import Default
from shardwright.core.search.request import Request
from shardwright.core.search.scoring import Scored, Scorer
from shardwright.core.search.simplicity import why_less_simple
from shardwright.core.search.step_work import step_work
from shardwright.core.tables.cost_tables import Place, is_one_stage
from shardwright.core.tables.memory import collectives_s, kept_bytes, recomputed_s, unit_recompute
from shardwright.core.values.recompute_modes import Mode
from shardwright.core.values.version import own_version


def as_plan(
    scorer: Scorer,
    best: Scored,
    others: list[Scored],
    beside: list[Default],
    left_out: str = "",
    elsewhere: Sequence[tuple[Cluster, Scored]] = (),
    fastest: Scored | None = None,
    margin: float = LEAD,
) -> Plan:
    """The plan of the best choice, with the others and the defaults as alternatives.

    ``left_out``: devices that are not worth using. ``elsewhere``: the best choices on other parts of the cluster.
    ``fastest``: the choice that was predicted to be the fastest, where a simpler one is the best, and the ``margin``
    within which it is.
    """
    tables, decision, request = scorer.tables, best.decision, scorer.request
    first = _costs_at(scorer, best, place_of(scorer, best, 0))
    ranks: tuple[RankCosts, ...] = ()
    if not best.tables.is_uniform:
        ranks = tuple(
            RankCosts(_costs_at(scorer, best, place_of(scorer, best, pp)), best.tables.tables[pp].boundary_s)
            for pp in range(decision.pp)
        )
        first = ranks[0].classes
    alternatives = []
    if fastest is not None and fastest.decision != decision:
        alternatives.append(_alternative(fastest, why_not_fastest(best, fastest, margin)))
    alternatives += [_alternative(s, why_slower(best, s)) for s in others]
    alternatives += [_alternative(s, f"on {where}: {why_slower(best, s)}") for where, s in elsewhere]
    for default in beside:
        if default.scored is None:
            alternatives.append(Alternative(default.name, 0.0, 0, f"the {default.name} default: {default.reason}"))
            continue
        same = default.scored.decision == decision
        said = "this is the plan" if same else why_slower(best, default.scored)
        lacking = not_carried_out(default.scored.decision, scorer.request.runtimes)
        said += f"; {lacking}" if lacking else ""
        alternatives.append(_alternative(default.scored, f"the {default.name} default: {said}"))
    graph = tables.graph
    return Plan(
        decision=decision,
        model_name=graph.model_name,
        model=tables.structure,
        bindings=((graph.framework, tables.binding),),
        programs=((graph.framework, program_of(tables.frame, tables.chosen(decision.tp))),) if decision.tp > 1 else (),
        costs=Costs(
            _variants(scorer, best),
            first,
            best.tables.tables[0].boundary_bytes,
            best.tables.tables[-1].boundary_s,
            tables.rates(decision.tp),
            ranks,
            best.tables.idle_lent,
            scorer.step.waits(decision, best.tables, decision.stage_ranks),
            tables.execution,
        ),
        predicted=replace(
            best.predicted,
            error=prediction_error(
                [group.device for group in scorer.cluster.groups],
                graph.framework,
                measured_name(graph.framework, tables.structure.digest),
                decision,
                tables.host_share(decision.microbatch),
            ),
        ),
        run=replace(request.training_run, usd_per_hour=usd_per_hour(scorer.cluster, request.price)),
        alternatives=tuple(alternatives),
        unsplit=tables.unsplit(decision.tp) if decision.tp > 1 else (),
        layout_alternatives=tables.layout_alternatives(decision.tp),
        not_in_fp8=tables.fp8_products.others,
        work=step_work(tables, decision),
        provenance=Provenance(
            shardwright=own_version(),
            captured_from=graph.framework,
            cluster=str(scorer.cluster),
            world_size=scorer.cluster.world_size,
            device_memory_bytes=tuple(scorer.links.memory_bytes(decision.mesh, pp) for pp in range(decision.pp)),
            peak_flops_per_s=tuple(scorer.cluster.peak_flops_per_s.items()),
            pinned=_pinned(request),
            pinned_layouts=_pinned_layouts(scorer) if decision.tp > 1 else (),
            left_out=left_out,
            headroom=request.left_free,
        ),
    )


def _pinned(request: Request) -> tuple[str, ...]:
    """The pins beside the batch, as ``("pp=2", …)``; for layouts, the number of parameters that each source pins."""
    sources = Counter(pin.source for pin in request.pins)
    layouts = [f"layouts of {count} parameters by {source}" for source, count in sources.items()]
    given = (
        f"{name}={value}" for name, value in request.given.items() if name not in ("batch", "layouts", "frameworks")
    )
    return (*given, *layouts)


def _pinned_layouts(scorer: Scorer) -> tuple[tuple[str, str], ...]:
    """The slots of the parameters whose layouts are pinned, each with the source of its pin."""
    sources = {pin.name: pin.source for pin in scorer.request.pins}
    classes = scorer.tables.structure.unit_classes
    slots = {
        f"{classes[unit]}/{role}": sources[name]
        for unit, bound in enumerate(scorer.tables.binding.units)
        for role, name, _ in bound.parameters
        if name in sources
    }
    return tuple(slots.items())


def place_of(scorer: Scorer, best: Scored, pp: int) -> Place:
    """The kind of place that decides a pipeline rank's time."""
    decision = best.decision
    places = scorer.links.places(decision.mesh)[pp]
    asked = decision.tp, decision.microbatch, decision.recompute
    is_whole = is_one_stage(decision.pp, decision.recompute)
    tables = [scorer.tables.table(*asked, place, is_whole=is_whole) for place in places]
    return next(
        (p for p, table in zip(places, tables, strict=True) if table.units is best.tables.tables[pp].units), places[0]
    )


def _variants(scorer: Scorer, best: Scored) -> tuple[int, ...]:
    """The index of each unit's cost. The costs of units that differ from the rest follow those of all classes."""
    variants = scorer.tables.variants(best.decision.tp)
    apart = {unit: at for at, (_, units) in enumerate(_apart(best.decision), 1) for unit in units}
    return tuple(v + (max(variants) + 1) * apart.get(unit, 0) for unit, v in enumerate(variants))


def _apart(decision: Decision) -> list[tuple[Mode, tuple[int, ...]]]:
    """The modes of the units that differ from the rest, with these units."""
    found: list[tuple[Mode, tuple[int, ...]]] = []
    if decision.kept_units or decision.offloaded_units:
        found.append(("none", decision.kept_units))
    if decision.offloaded_units:
        found.append(("offload", decision.offloaded_units))
    if decision.other_recompute is not None:
        found.append((decision.other_recompute, decision.other_units))
    return found


def _costs_at(scorer: Scorer, best: Scored, place: Place) -> tuple[ClassCost, ...]:
    tables, decision = scorer.tables, best.decision
    costs = tables.class_costs(decision.tp, decision.microbatch, place)
    variants = tables.variants(decision.tp)
    again = [tables.recomputable[variants.index(variant)] for variant in range(len(costs))]
    modes: list[list[Mode]] = [[unit_recompute(decision.recompute, may) for may in again]]
    modes += [[mode] * len(costs) for mode, _ in _apart(decision)]
    rate = place.device.host_link_bandwidth_bytes_per_s
    return tuple(_class_cost(cost, mode, rate) for of in modes for cost, mode in zip(costs, of, strict=True))


def _class_cost(cost: UnitCost, mode: Mode, host_bytes_per_s: float) -> ClassCost:
    return ClassCost(
        forward_s=cost.forward_s,
        input_grad_s=cost.input_grad_s + recomputed_s(cost, mode),
        weight_grad_s=cost.weight_grad_s,
        activation_bytes=kept_bytes(cost, mode),
        parameter_elements=cost.parameter_elements,
        trained_elements=cost.trained_elements,
        swapped_s=cost.saved_bytes / host_bytes_per_s if mode == "offload" else 0.0,
        collective_s=collectives_s(cost, mode),
    )


def terms_s(predicted: Predicted) -> dict[str, float]:
    """The terms of a step by which plans differ, in seconds; they add up to the step time."""
    busy = predicted.pipeline_s * (1 - predicted.bubble_fraction)
    return {
        "compute": busy - predicted.tensor_collective_s - predicted.passes_wait_s,
        "tensor collectives": predicted.tensor_collective_s,
        "pipeline bubble": predicted.bubble_fraction * predicted.pipeline_s,
        "traffic over the data axis": predicted.data_parallel_s + predicted.passes_wait_s,
        "optimizer step": predicted.optimizer_s,
    }


def not_carried_out(decision: Decision, runtimes: Sequence[Capabilities]) -> str:
    """The parts of a decision that some runtime does not carry out, in words; empty when all carry it out."""
    d = decision
    lacks = {
        runtime.framework: runtime.lack(recompute=d.recompute, shard=d.shard, shard_group=d.shard_group, dp=d.dp)
        or runtime.lack_of_modes(d.other_recompute)
        or runtime.lack_of_residency(d.shard, d.gathered_stages, d.reduce_after)
        or runtime.lack_of_host(d.offloaded_units, d.offload_states)
        for runtime in runtimes
    }
    return "; ".join(f"{name}'s runtime does not carry out {lack}" for name, lack in lacks.items() if lack)


def why_slower(best: Scored, other: Scored) -> str:
    """The reason why another choice is slower: by how much, and the term that grew most. For a choice that is faster
    (and cannot be carried out), the term that shrank most."""
    mine, theirs = terms_s(best.predicted), terms_s(other.predicted)
    ratio = other.predicted.step_time_s / best.predicted.step_time_s if best.predicted.step_time_s else 1.0
    if abs(ratio - 1) <= 1e-6:
        return "as fast, and less simple"
    if ratio < 1:
        name = min(theirs, key=lambda term: theirs[term] - mine[term])
        return f"{1 - ratio:.1%} faster: {name} {theirs[name] * 1e3:.3g} ms against {mine[name] * 1e3:.3g} ms"
    name = max(theirs, key=lambda term: theirs[term] - mine[term])
    return f"{ratio - 1:.1%} slower: {name} {theirs[name] * 1e3:.3g} ms against {mine[name] * 1e3:.3g} ms"


def why_not_fastest(best: Scored, fastest: Scored, margin: float) -> str:
    """The reason why the choice that was predicted to be the fastest is not the answer."""
    lead = why_slower(best, fastest)
    cause = "" if margin < 2 * LEAD else " where devices wait for their hosts"
    return (
        f"the fastest by prediction: {lead}; a lead within {margin:.0%} tells nothing{cause}, and it is less simple: "
        f"{why_less_simple(best.decision, fastest.decision)}"
    )


def _alternative(scored: Scored, reason: str) -> Alternative:
    predicted = scored.predicted
    peak = max(use.total_bytes for use in predicted.memory_by_stage_rank)
    return Alternative(summarize(scored.decision), predicted.step_time_s, peak, reason)
