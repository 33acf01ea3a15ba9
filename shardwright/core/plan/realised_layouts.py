"""A plan's tensor layouts in full, for a captured model: the layouts that a tensor-parallel runtime carries out.

A plan keeps them op by op (`core.plan.program`), so that it runs the same program whatever later versions would choose.
The solver is used again only for units that run other ops than the captured ones (a loss outside of the model, another
form of batch), and only by the version that made the plan.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardwright.core.errors import PlanError
from shardwright.core.layout.placements import Placement, Replicate, Split
from shardwright.core.layout.unit_layouts import RealisedUnit
from shardwright.core.model.fold import Folded, Unit, fold
from shardwright.core.model.graph import Graph
from shardwright.core.model.structure import Structure, structure_of
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.program import Program, UnitProgram, unit_tensors
from shardwright.core.plan.record import PlanRecord
from shardwright.core.solver import Frame, Pins
from shardwright.core.solver.op_layouts import AXIS, Rates, TensorLayouts, Terms, choose, pins_of
from shardwright.core.tables.memory import state_bytes_per_element
from shardwright.core.values.version import own_version

ANEW = "call plan.rebind(graph) with the model as it is captured now, or plan anew with these layouts pinned"
"""The fix for a program that is no longer the plan's."""


def terms_of(decision: Decision, rates: Rates) -> Terms:
    """The terms by which a plan's layouts are realised."""
    state = state_bytes_per_element(
        decision.precision, decision.optimizer, gradient_precision=decision.gradient_precision
    )
    return Terms(decision.tp, rates, decision.precision, state, decision.sequence_parallel)


def program_of(frame: Frame, chosen: TensorLayouts) -> Program:
    """The program of layouts that were chosen for a graph."""
    graph, units = frame.graph, frame.folded.units
    forms = tuple(
        UnitProgram.of(
            graph, units[first], _own(frame, chosen, first), _form(frame, units[first], chosen.terms.sequence_parallel)
        )
        for first in chosen.firsts
    )
    return Program(chosen.terms.degree, chosen.terms.sequence_parallel, chosen.variants, forms)


def program_for(graph: Graph, structure: Structure, decision: Decision, rates: Rates) -> Program:
    """The program of a plan for a graph that it was not made for. The plan fixes the parameters and whether sequences
    are divided; the solver chooses the rest at least cost. Raises PlanError when the layouts cannot be carried out."""
    frame = Frame(fold(graph))
    return program_of(
        frame, choose(frame, terms_of(decision, rates), pins_of(frame, structure, dict(decision.layouts)))
    )


def realise(graph: Graph, plan: PlanRecord) -> tuple[RealisedUnit, ...]:
    """The placements that each op of every unit reads and makes on the tensor axis, and the conversions between them.

    The plan's costs were counted on these. Raises PlanError when the plan is for another model, when its layouts were
    edited since its program was made, and when units run other ops than the captured ones in a version that is not the
    plan's.
    """
    graph = graph.for_precision(plan.decision.precision)
    frame = Frame(fold(graph))
    folded, decision = frame.folded, plan.decision
    structure, _ = structure_of(folded)
    difference = plan.model.difference(structure)
    if difference is not None:
        raise PlanError(
            f"this plan is for {plan.model_name}, which {graph.model_name} in {graph.framework} does not match: "
            f"{difference} (plan against model)"
        )
    pins = pins_of(frame, structure, dict(decision.layouts))
    program = _program(graph, plan)
    found: dict[int, RealisedUnit] = {}
    for unit in folded.units:
        form = program.of_unit(unit.index)
        if form.form == _form(frame, unit, program.sequence_parallel):
            realised = form.on(graph, unit, AXIS, decision.tp)
            _require_decided(graph, plan, realised, pins)
            if _is_legal(frame, realised):
                found[unit.index] = realised
    others = [unit for unit in folded.units if unit.index not in found]
    if others:
        called = [call.path for unit in others for call in unit.calls]
        what = f"unit {others[0].index}{f' ({called[0]})' if called else ''} of {graph.model_name}"
        require_own_version(plan, f"{what} runs other ops than were planned, or at sizes that do not divide: it", ANEW)
        solved = program_of(frame, choose(frame, terms_of(decision, plan.costs.rates), pins))
        anew = {u.index: solved.of_unit(u.index).on(graph, u, AXIS, decision.tp) for u in folded.units}
        mixed = anew | found
        found = mixed if _meet(mixed.values()) else anew
    return tuple(found[unit.index] for unit in folded.units)


def realise_part(graph: Graph, plan: PlanRecord, places: Mapping[str, Placement]) -> tuple[Unit, RealisedUnit]:
    """A part of a model as one unit, whole at its borders, with its layouts. Its parameters have the placements
    ``places`` (by name; the others are whole). No plan keeps these layouts: see `require_own_version`. Raises PlanError
    where an op cannot use a placement."""
    used = {t for op in graph.ops for t in op.inputs}
    unit = Unit(0, 0, len(graph.ops), 0, (), tuple(i for i, p in enumerate(graph.parameters) if p.tensor in used))
    terms = replace(terms_of(plan.decision, plan.costs.rates), sequence_parallel=False)
    pins = {graph.parameters[i].tensor: (places.get(graph.parameters[i].name, Replicate()),) for i in unit.parameters}
    return unit, choose(Frame(Folded(graph, (unit,))), terms, pins).realised(0)


def require_own_version(plan: PlanRecord, what: str, fix: str) -> None:
    """Raise PlanError where the layouts of ``what``, which are chosen while it runs, may differ from those of the
    version that made the plan."""
    made, own = plan.provenance.shardwright, own_version()
    if made != own:
        raise PlanError(
            f"{what} is laid out on the tensor axis as it runs, and Shardwright {own} may do that otherwise than "
            f"{made}, which made the plan: {fix}"
        )


def digest(units: Sequence[RealisedUnit]) -> str:
    """A short hash of the placements that every op of every unit reads and makes, and of all conversions."""
    return hashlib.sha256(repr(tuple(units)).encode()).hexdigest()[:16]


def _program(graph: Graph, plan: PlanRecord) -> Program:
    """The plan's program in the graph's framework. Raises PlanError where it has none, or one for another decision."""
    known = dict(plan.programs)
    if graph.framework not in known:
        raise PlanError(
            f"this plan says how {', '.join(known) or 'no framework'} runs on the tensor axis, and not how "
            f"{graph.framework} does: {ANEW}"
        )
    program, decision = known[graph.framework], plan.decision
    for name, mine, theirs in (
        ("tp", program.ranks, decision.tp),
        ("sequence_parallel", program.sequence_parallel, decision.sequence_parallel),
    ):
        if mine != theirs:
            raise PlanError(f"the plan's program was made for {name}={mine}, and the decision has {theirs}: {ANEW}")
    return program


def _require_decided(graph: Graph, plan: PlanRecord, realised: RealisedUnit, pins: Pins) -> None:
    """Raise PlanError unless a unit's parameters have the decision's placements."""
    for tensor, layout in realised.parameters:
        wanted = pins.get(tensor, (None,))[0]
        if wanted is not None and layout.on(AXIS) != wanted:
            raise PlanError(
                f"the plan's program was made for {graph.tensors[tensor].name} at {layout.on(AXIS)} on the tensor axis "
                f"in unit {realised.unit}, and its decision has {wanted}: the layouts were edited since; {ANEW}"
            )


def _meet(units: Iterable[RealisedUnit]) -> bool:
    """Whether every value enters units in the layout in which it left another."""
    held = tuple(units)
    left = {tensor: layout for unit in held for tensor, layout in unit.leaves}
    return all(left.get(tensor, layout) == layout for unit in held for tensor, layout in unit.enters)


def _own(frame: Frame, chosen: TensorLayouts, unit: int) -> RealisedUnit:
    """The layouts of a unit, which the solver has for one like it."""
    like = chosen.realised(unit)
    if like.unit == unit:
        return like
    graph, units = frame.graph, frame.folded.units
    (axis, ranks), theirs = like.axes[0], units[like.unit]
    return UnitProgram.of(graph, theirs, like, "").on(graph, units[unit], axis, ranks)


def _form(frame: Frame, unit: Unit, sequence_parallel: bool) -> str:
    """A digest of a unit's ops: their kinds, labels and wiring, the values through which gradients flow, and the values
    that leave the unit. Sizes are left out, so that another sequence length has the same form."""
    graph = frame.graph
    places = {tensor: i for i, tensor in enumerate(unit_tensors(graph, unit))}
    rows = [
        (op.kind, op.labels, op.special, [places[t] for t in (*op.inputs, *op.outputs)])
        for op in graph.ops[unit.first_op : unit.end_op]
    ]
    values = [
        (
            graph.tensors[t].role,
            frame.counter.needs_gradient(t),
            t in frame.leaving[unit.index],
            sequence_parallel and t in (frame.main[unit.index], frame.main[unit.index - 1] if unit.index else None),
        )
        for t in places
    ]
    return hashlib.sha256(repr((rows, values)).encode()).hexdigest()[:16]


def _is_legal(frame: Frame, realised: RealisedUnit) -> bool:
    """Whether a unit can run with its layouts at the sizes that it has here."""
    graph, ranks = frame.graph, realised.axes[0][1]
    lies = [(tensor, layout.on(AXIS)) for tensor, layout in (*realised.enters, *realised.leaves)]
    for link in realised.links:
        lies += [(link.tensor, place) for place in (*link.before, *link.after)]
    for index, (signature,) in enumerate(realised.signatures):
        if signature not in frame.signatures(realised.unit, 1)[index]:
            return False
        op = graph.ops[realised.first_op + index]
        lies += zip((*op.inputs, *op.outputs), (*signature.inputs, *signature.outputs), strict=True)
    return all(frame.can_split(tensor, place, ranks) for tensor, place in set(lies) if isinstance(place, Split))
