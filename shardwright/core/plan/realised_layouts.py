"""A plan's tensor layouts in full, for a captured model: what a tensor-parallel runtime carries out."""

from dataclasses import replace

from shardwright.core.errors import PlanError
from shardwright.core.layout.unit_layouts import RealisedUnit
from shardwright.core.model.fold import Folded, fold
from shardwright.core.model.graph import Graph
from shardwright.core.model.structure import structure_of
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.plan import Plan
from shardwright.core.solver import Frame
from shardwright.core.solver.op_layouts import Rates, Terms, choose, pins_of
from shardwright.core.tables.memory import state_bytes_per_element


def terms_of(decision: Decision, rates: Rates) -> Terms:
    """What a plan's layouts are realised by."""
    state = state_bytes_per_element(
        decision.precision, decision.optimizer, gradient_precision=decision.gradient_precision
    )
    return Terms(decision.tp, rates, decision.precision, state, decision.sequence_parallel)


def realise(graph: Graph, plan: Plan) -> tuple[RealisedUnit, ...]:
    """For every unit of the graph what each op reads and makes on the tensor axis, and the conversions between.

    The plan fixes the parameters and whether sequences are divided; of what is left the solver takes what costs least.
    The same graph and plan always give the same answer, and it is what the plan's costs were counted on. Raises
    PlanError when the plan is for another model, or its layouts cannot be carried out.
    """
    folded = fold(graph)
    structure, _ = structure_of(folded)
    difference = plan.model.difference(structure)
    if difference is not None:
        raise PlanError(
            f"this plan is for {plan.model_name}, which {graph.model_name} in {graph.framework} does not match: "
            f"{difference} (plan against model)"
        )
    frame = Frame(folded)
    pins = pins_of(frame, structure, dict(plan.decision.layouts))
    chosen = choose(frame, terms_of(plan.decision, plan.costs.rates), pins)
    return tuple(of_unit(folded, unit.index, chosen.realised(unit.index)) for unit in folded.units)


def of_unit(folded: Folded, unit: int, like: RealisedUnit) -> RealisedUnit:
    """The layouts of a unit from those of one like it: the same ops in the same places, on tensors of their own."""
    mine, theirs, ops = folded.units[unit], folded.units[like.unit], folded.graph.ops
    if mine.index == theirs.index:
        return like
    renamed = {
        old: new
        for a, b in zip(ops[theirs.first_op : theirs.end_op], ops[mine.first_op : mine.end_op], strict=True)
        for old, new in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True)
    }
    moved = mine.first_op - theirs.first_op
    return replace(
        like,
        unit=mine.index,
        first_op=mine.first_op,
        links=tuple(
            replace(link, tensor=renamed[link.tensor], reader=None if link.reader is None else link.reader + moved)
            for link in like.links
        ),
        parameters=tuple((renamed[t], layout) for t, layout in like.parameters),
        enters=tuple((renamed[t], layout) for t, layout in like.enters),
        leaves=tuple((renamed[t], layout) for t, layout in like.leaves),
    )
