"""The layouts of a model on the tensor axis: chosen by the layout solver, kept in a plan by slot, realised from a plan.

The solver minimises seconds and, at a price, bytes held, because a tensor axis saves both. The price makes twice the
memory as expensive as twice the time, both as if everything were divided evenly. It follows from FLOPs and parameters
alone, which the twins of a model share, so both get the same layouts. Megatron's column/row pairs (arXiv 1909.08053,
section 3) and split vocabularies are results of this and are not built in.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shardwright.core.cost.op_kinds import PRODUCT_KINDS
from shardwright.core.cost.unit_work import forward_flops
from shardwright.core.errors import PlanError
from shardwright.core.layout.placements import Layout, Placement, Split
from shardwright.core.layout.unit_layouts import RealisedUnit
from shardwright.core.model.fold import Folded
from shardwright.core.model.structure import Structure, in_own_dims, in_slot_dims, layout_of
from shardwright.core.rules.dim_groups import DimGroup
from shardwright.core.solver import Alternative, AxisCost, Frame, Pins, Setting, Solution, alternatives, solve_at
from shardwright.core.values.fields import Rate

AXIS = "tp"


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates by which layouts are chosen, kept in the plan. They are the rates of large work, so that a small model
    gets the layouts of its large sibling."""

    flops_per_s: Rate
    memory_bytes_per_s: Rate
    link_bytes_per_s: Rate
    """The bytes per second that each rank of a ring over the tensor axis sends."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Everything but the graph that decides layouts on the tensor axis."""

    degree: int
    rates: Rates
    precision: str
    state_bytes_per_element: float
    sequence_parallel: bool = False

    def setting(self) -> Setting:
        axis = AxisCost(AXIS, self.degree, self.rates.link_bytes_per_s)
        return Setting(
            (axis,),
            self.rates.flops_per_s,
            self.rates.memory_bytes_per_s,
            precision=self.precision,
            state_bytes_per_element=self.state_bytes_per_element,
            free_activations=self.sequence_parallel,
            split_borders=self.sequence_parallel,
        )

    def price_s_per_byte(self, folded: Folded) -> float:
        """The seconds that a byte is worth."""
        held = folded.graph.parameter_count() * self.state_bytes_per_element / self.degree
        products = 3 * forward_flops(folded.graph, 1) / self.degree / self.rates.flops_per_s
        return (products + held / self.rates.memory_bytes_per_s) / max(held, 1.0)


@dataclass(frozen=True, slots=True)
class TensorLayouts:
    """The layouts of a whole model at one degree."""

    terms: Terms
    solution: Solution
    variants: tuple[int, ...]
    """The variant of each unit, in order of first use; units of one fold class with equal layouts share one."""

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first unit of every variant."""
        found: dict[int, int] = {}
        for unit, variant in enumerate(self.variants):
            found.setdefault(variant, unit)
        return tuple(found.values())

    def realised(self, unit: int) -> RealisedUnit:
        """All layouts of the first unit that is solved like this one."""
        return self.solution.units[unit].like


def choose(frame: Frame, terms: Terms, pins: Pins | None = None) -> TensorLayouts:
    """The layouts of least time and price. ``pins`` maps a parameter's tensor to its placement, None where it is free.

    Raises PlanError when the pins leave nothing that is legal.
    """
    folded = frame.folded
    found = solve_at(frame, terms.setting(), terms.price_s_per_byte(folded), pins)
    known: dict[object, int] = {}
    variants = tuple(
        known.setdefault((unit.fold_class, answer.like.unit, answer.chosen), len(known))
        for unit, answer in zip(folded.units, found.units, strict=True)
    )
    return TensorLayouts(terms, found, variants)


def choose_form(
    frame: Frame, terms: Terms, sequence_parallel: bool | None, pins: Pins | None = None
) -> tuple[TensorLayouts, tuple[tuple[str, str], ...]]:
    """The layouts of `choose`, with the sequence divided between units or not: as asked, or where that is better and
    the framework's runtime can do it. Also the (parameter, reason) of the pins that no op can use, which are left out.
    """
    if sequence_parallel is None and not frame.graph.capabilities.sequence_parallel:
        sequence_parallel = False
    forms = (False, True) if sequence_parallel is None else (sequence_parallel,)
    asked = [replace(terms, sequence_parallel=form) for form in forms]
    refused: tuple[tuple[str, str], ...] = ()
    try:
        found = [choose(frame, form, pins) for form in asked]
    except PlanError:
        bad = [tensor for tensor in pins or {} if not _is_possible(frame, asked[0], {tensor: (pins or {})[tensor]})]
        if not bad:
            raise
        refused = tuple((frame.graph.tensors[t].name, _no_op_uses((pins or {})[t])) for t in bad)
        found = [choose(frame, form, {t: p for t, p in (pins or {}).items() if t not in bad}) for form in asked]
    price = terms.price_s_per_byte(frame.folded)
    return min(found, key=lambda f: f.solution.time_s + price * f.solution.weight_bytes), refused


def _is_possible(frame: Frame, terms: Terms, pins: Pins) -> bool:
    try:
        choose(frame, terms, pins)
    except PlanError:
        return False
    return True


def _no_op_uses(places: tuple[Placement | None, ...]) -> str:
    return f"pinned at {', '.join(map(str, places))}, which an op that reads it cannot use: left to the solver"


def digest(layouts: Iterable[tuple[str, Layout]], sequence_parallel: bool) -> str:
    """A short hash of a plan's layouts on the tensor axis, so that measurements under them are recognised."""
    said = f"{sequence_parallel} {sorted((slot, str(layout)) for slot, layout in layouts)}"
    return hashlib.sha256(said.encode()).hexdigest()[:16]


# By slot ---------------------------------------------------------------------------------------------------------


def slot_layouts(frame: Frame, structure: Structure, chosen: TensorLayouts) -> tuple[tuple[str, Layout], ...]:
    """The layouts in slot dims: ``class/role`` as in the first unit of a structural class, ``@unit/role`` where another
    unit of it differs."""
    graph, folded = frame.graph, frame.folded
    first: dict[int, dict[str, Layout]] = {}
    found: dict[str, Layout] = {}
    for unit, structural, answer in zip(folded.units, structure.unit_classes, chosen.solution.units, strict=True):
        layouts = dict(answer.parameters)
        mine = {
            slot.role: in_slot_dims(layouts[graph.parameters[slot.parameter].tensor], slot.dims)
            for slot in frame.slots[unit.index]
        }
        usual = first.setdefault(structural, mine)
        if usual is mine:
            found.update((f"{structural}/{role}", layout) for role, layout in mine.items() if not layout.is_replicated)
        found.update((f"@{unit.index}/{role}", layout) for role, layout in mine.items() if layout != usual[role])
    return tuple(sorted(found.items()))


def pins_of(frame: Frame, structure: Structure, layouts: Mapping[str, Layout]) -> Pins:
    """The pins that reproduce a plan's layouts."""
    graph, folded = frame.graph, frame.folded
    found: dict[int, tuple[Placement | None, ...]] = {}
    for unit, structural in zip(folded.units, structure.unit_classes, strict=True):
        for slot in frame.slots[unit.index]:
            layout = in_own_dims(layout_of(layouts, unit.index, structural, slot.role), slot.dims)
            found[graph.parameters[slot.parameter].tensor] = (layout.on(AXIS),)
    return found


KEPT_ALTERNATIVES = 3
"""The number of other layouts of one parameter that a plan keeps."""

SlotAlternatives = tuple[tuple[str, tuple[Alternative, ...]], ...]
"""The other layouts of each ``class/role``, in slot dims, best first."""


def slot_alternatives(
    frame: Frame, structure: Structure, chosen: TensorLayouts, pins: Pins | None = None
) -> SlotAlternatives:
    """The other layouts of every parameter, as seen in the first unit of its structural class."""
    setting, price = chosen.terms.setting(), chosen.terms.price_s_per_byte(frame.folded)
    found: dict[str, tuple[Alternative, ...]] = {}
    seen: set[int] = set()
    for unit in frame.folded.units:
        structural = structure.unit_classes[unit.index]
        if structural in seen:
            continue
        seen.add(structural)
        others = alternatives(frame, setting, price, chosen.solution, unit.index, pins)
        for slot in frame.slots[unit.index]:
            known = others.get(frame.graph.parameters[slot.parameter].tensor, ())[:KEPT_ALTERNATIVES]
            in_slot = tuple(replace(a, layout=in_slot_dims(a.layout, slot.dims)) for a in known)
            if in_slot:
                found[f"{structural}/{slot.role}"] = in_slot
    return tuple(sorted(found.items()))


# What stays whole ------------------------------------------------------------------------------------------------


def unsplit(frame: Frame, structure: Structure, chosen: TensorLayouts) -> tuple[tuple[str, str], ...]:
    """The (``class/role``, reason) of every matrix that is whole on the tensor axis, and the (``class/kind of the op``,
    reason) of every product that each rank computes whole."""
    graph, degree = frame.graph, chosen.terms.degree
    found: dict[str, str] = {}
    for unit in (frame.folded.units[first] for first in chosen.firsts):
        structural = structure.unit_classes[unit.index]
        layouts = dict(chosen.solution.units[unit.index].parameters)
        whole = [
            (slot.role, graph.parameters[slot.parameter].tensor)
            for slot in frame.slots[unit.index]
            if len(slot.shape) > 1 and layouts[graph.parameters[slot.parameter].tensor].is_replicated
        ]
        groups = frame.groups(unit.index)
        for role, tensor in whole:
            found.setdefault(f"{structural}/{role}", _why_whole(groups, {tensor}, degree))
        like = chosen.realised(unit.index)
        for op, signatures in zip(graph.ops[unit.first_op : unit.end_op], like.signatures, strict=True):
            if op.kind not in PRODUCT_KINDS or any(
                isinstance(p, Split) for s in signatures for p in s.outputs + s.inputs
            ):
                continue
            uneven = [group for group in groups if group.divisor % degree]
            if reason := _why_whole(uneven, {*op.inputs, *op.outputs}, degree):
                found.setdefault(f"{structural}/{op.kind}", f"every rank computes {op.name} whole: {reason}")
    return tuple(sorted(found.items()))


def _why_whole(groups: Iterable[DimGroup], tensors: set[int], degree: int) -> str:
    def reason(group: DimGroup) -> str:
        if group.divisor % degree:
            padded = -(-group.divisor // degree) * degree
            return f"{degree} does not divide {group.divisor}: pad it to {padded}, or use a degree that divides it"
        return group.obstacle or "splitting it costs more than it saves"

    return "; ".join(dict.fromkeys(reason(g) for g in groups if any(t in tensors for t, _ in g.dims)))
