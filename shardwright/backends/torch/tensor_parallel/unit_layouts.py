"""The solver's choice for one unit, op by op: signatures, and the conversions of every value and its gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.backends.torch.machine.tensor_axis import Change
from shardwright.core.errors import PlanError
from shardwright.core.layout.placements import Placement, Replicate
from shardwright.core.layout.signature import Signature
from shardwright.core.layout.unit_layouts import Link, RealisedUnit
from shardwright.core.model.fold import Unit, fold
from shardwright.core.model.graph import Graph
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.realised_layouts import realise_part
from shardwright.core.solver.unit_problem import dual

R = Replicate()


@dataclass(frozen=True, slots=True)
class Hop:
    """The conversion of a value between two placements, and that of its gradient back (None: no gradient flows)."""

    value: Change
    gradient: Change | None

    @property
    def is_idle(self) -> bool:
        return self.value[0] == self.value[1] and (self.gradient is None or self.gradient[0] == self.gradient[1])


@dataclass(frozen=True, slots=True)
class OpLayout:
    """The layout of one op: the placements of its operands, and the conversion of every input from the value's
    placement."""

    signature: Signature
    inputs: tuple[Hop, ...]


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The layout of one unit along the tensor axis."""

    unit: Unit
    ops: tuple[OpLayout, ...]
    parameters: Mapping[int, Placement]
    """Tensor → the placement of a parameter."""
    enters: Mapping[int, Placement]
    """Tensor → the placement in which a value that earlier units made, or an input, comes."""
    shared: Mapping[int, Hop]
    """Tensor → the conversion that all its readers share, after it is made or comes."""
    leaves: Mapping[int, tuple[Placement, Hop]]
    """Tensor → its placement for later units, and the conversion to it."""


def planned_part(graph: Graph, plan: Plan, places: Mapping[str, Placement]) -> tuple[UnitLayout, ...]:
    """The layouts of a part of a model as one unit, whole at its borders, with its parameters in these placements (by
    name; those not named are whole). Raises PlanError as `realise_part` does."""
    return (_layout(graph, *realise_part(graph, plan, places)),)


def of_realised(graph: Graph, realised: Sequence[RealisedUnit]) -> tuple[UnitLayout, ...]:
    """The layouts of all units, which have one axis. Raises PlanError for several axes."""
    if any(len(unit.axes) != 1 for unit in realised):
        raise PlanError(f"one tensor axis is run: the layouts have {len(realised[0].axes)}")
    units = fold(graph).units
    return tuple(_layout(graph, units[found.unit], found) for found in realised)


def _layout(graph: Graph, unit: Unit, found: RealisedUnit) -> UnitLayout:
    readers: dict[tuple[int, int], Hop] = {}
    shared: dict[int, Hop] = {}
    leaving: dict[int, Hop] = {}
    for link in found.links:
        if link.reader is not None:
            readers[link.reader, link.position] = _hop(link)
        elif link.leaves:
            leaving[link.tensor] = _hop(link)
        else:
            shared[link.tensor] = _hop(link)
    ops = []
    for index, signatures in zip(range(unit.first_op, unit.end_op), found.signatures, strict=True):
        wanted = signatures[0].inputs
        hops = (readers.get((index, i)) or Hop((p, p), None) for i, p in enumerate(wanted))
        ops.append(OpLayout(signatures[0], tuple(hops)))
    parameters = {tensor: layout.on(found.axes[0][0]) for tensor, layout in found.parameters}
    enters = {tensor: layout.on(found.axes[0][0]) for tensor, layout in found.enters}
    made = {t for op in graph.ops[unit.first_op : unit.end_op] for t in op.outputs}
    outside = set(graph.outputs)
    for op in (*graph.ops[: unit.first_op], *graph.ops[unit.end_op :]):
        outside.update(t for t in op.inputs if t in made)
    leaves = {}
    for tensor in (t for t in made if t in outside):
        hop = leaving.get(tensor) or _whole(graph, unit, found, tensor, shared.get(tensor))
        leaves[tensor] = (hop.value[1], hop)
    return UnitLayout(unit, tuple(ops), parameters, enters, shared, leaves)


def _whole(graph: Graph, unit: Unit, found: RealisedUnit, tensor: int, shared: Hop | None) -> Hop:
    """The conversion to whole of a value that leaves this unit, where the solver's unit like it has no such value."""
    if shared is not None:
        return Hop((shared.value[1], R), None if shared.gradient is None else (R, shared.gradient[0]))
    index = graph.producer[tensor]
    place = found.signatures[index - unit.first_op][0].outputs[graph.ops[index].outputs.index(tensor)]
    return Hop((place, R), (R, dual(place)) if graph.tensors[tensor].carries_gradients else None)


def _hop(link: Link) -> Hop:
    gradient = (link.gradient_before[0], link.gradient_after[0]) if link.flows else None
    return Hop((link.before[0], link.after[0]), gradient)
