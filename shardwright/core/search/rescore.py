"""An edited plan, counted anew from what its file holds: the same as planning with its decision pinned.

Everything in the decision is pinned, as edited, but for what follows from an edit: a cut into another number of stages,
layouts on another tensor axis, sizes that a plan derives. That is found as the search finds it.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from shardwright.core.errors import PlanError, PlanWarning, nearest
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.layout.placements import Layout
from shardwright.core.model.graph import Graph
from shardwright.core.model.structure import Structure, in_own_dims, layout_of
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.plan import Plan, require_slot_layout
from shardwright.core.plan.plan_input import PlanInput
from shardwright.core.plan.prediction_error import MEMORY
from shardwright.core.search.options import Options
from shardwright.core.search.request import Request, beside_decision, request_for
from shardwright.core.search.search import make_plan, tables_of
from shardwright.core.solver.op_layouts import AXIS
from shardwright.core.tables.graph_reading import read, unknown_memory_of, unpriced_of
from shardwright.core.values.fields import fields_of

FOLLOWS: dict[str, tuple[str, ...]] = {
    "stage_starts": ("pp", "virtual_stages"),
    "layouts": ("tp",),
    "sequence_parallel": ("tp",),
    "kept_units": ("recompute",),
    "offloaded_units": ("recompute",),
    "other_recompute": ("recompute",),
    "other_units": ("recompute",),
    "shard_group": ("shard",),
    "gathered_stages": ("shard",),
    "look_ahead": ("shard",),
    "reduce_after": ("shard",),
}
"""The parts of a decision that are found anew where one of these others is edited, unless they are edited too: they
were chosen for the value before."""
NAMED_UNITS = ("kept_units", "offloaded_units", "other_units")
"""The parts of a decision that are sets of units, in any order."""
DERIVED = ("hierarchical_gathers", "whole_below_bytes")
"""The options that a plan derives from the rest of its decision, unless they are given."""
EDIT = "an edit of the plan"
PROGRAM_FIELDS = ("tp", "layouts", "sequence_parallel", "precision", "optimizer", "gradient_precision")
"""The parts of a decision that a framework's program on the tensor axis depends on."""


def rescore(plan: Plan, **changes: Any) -> Plan:
    """A plan with all figures counted anew for its decision, without the model: costs, predicted time and memory, work,
    layouts on another tensor axis, programs. It is what `plan()` says with this decision pinned.

    Args:
        plan: a plan, edited or not; its file holds the captured graph and the devices.
        changes: edits by name, of the fields of ``plan.decision``: ``microbatch=4``. ``layouts`` maps slots
            (``class/role``, ``@unit/role``) to layouts, and leaves other slots as they are. Where ``pp`` or ``tp``
            change alone, the cut and the layouts are found anew.

    Raises:
        PlanError: an unknown name, slot or unit (with the nearest), a value that the field may not have, degrees that
            do not multiply to the devices, a decision that does not fit the memory (by how much) or cannot be carried
            out as edited (what would come out).
        LayoutError: layouts that contradict each other.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"rescore takes a Plan, not a {type(plan).__name__}: Plan.load reads one")
    if plan.input is None:
        raise PlanError("this plan was put together without the graph that it is of: rescore what plan() returns")
    before = plan.counted or plan.decision
    wanted = _wanted(plan, changes)
    edited = {name for name, value in wanted.items() if value != getattr(before, name)} | set(changes)
    found_anew = {
        name for name, causes in FOLLOWS.items() if name not in edited and any(cause in edited for cause in causes)
    }
    found_anew |= {name for name in DERIVED if name not in edited and not plan.is_pinned(name)}
    _require_devices(plan, wanted)
    _require_runtimes(plan)
    for slot, layout in wanted["layouts"] if "layouts" in changes else ():
        require_slot_layout(slot, layout, plan.model.slot_shapes[slot], Mesh((AXIS,), (wanted["tp"],)))
    graph = plan.input.graph()
    _require_same_model(plan, graph, before.precision)
    for said in (unpriced_of(graph), unknown_memory_of(graph)):
        if said is not None:
            warnings.warn(f"{graph.model_name}: {said}", stacklevel=2)
    request = _request(plan.input, {name: value for name, value in wanted.items() if name not in found_anew})
    if "layouts" not in found_anew and wanted["tp"] > 1:
        request = _with_layouts(plan, graph, request, dict(wanted["layouts"]))
    found = make_plan(graph, plan.input.cluster, request)
    _require_kept(plan, found, {name: wanted[name] for name in _kept(wanted, edited, found_anew)})
    return _completed(plan, found, edited)


def _wanted(plan: Plan, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The decision as edited, by field. Raises PlanError for changes of what a decision has not, and for values that a
    field may not have."""
    known = {field.name: field for field in fields_of(Decision)}
    wanted = {name: getattr(plan.decision, name) for name in known}
    for name, value in changes.items():
        if name not in known:
            raise PlanError(f"{name}={value!r}: no part of a decision is called so: {nearest(name, known)}")
        if name == "layouts":
            wanted[name] = _merged(plan, value)
            continue
        given = tuple(value) if isinstance(value, list) else value
        known[name].require(given, PlanError)
        wanted[name] = given
    return wanted


def _require_devices(plan: Plan, wanted: Mapping[str, Any]) -> None:
    """Raise PlanError, with the nearest degree, unless the degrees multiply to the plan's devices."""
    world = plan.provenance.world_size
    degrees = {name: int(wanted[name]) for name in ("pp", "dp", "tp")}
    if (ranks := math.prod(degrees.values())) == world:
        return
    said = " × ".join(f"{name} {degree}" for name, degree in degrees.items())
    fits = [f"{name}={world * degree // ranks}" for name, degree in degrees.items() if world * degree % ranks == 0]
    raise PlanError(
        f"{said} are {ranks} ranks, and the plan is for the {world} devices of {plan.provenance.cluster}: "
        f"take {' or '.join(fits) or f'degrees that multiply to {world}'}"
    )


def _require_runtimes(plan: Plan) -> None:
    """Raise PlanError for a runtime of a framework that is not known and that the plan is not bound to: how much memory
    it leaves free by default could be anything."""
    assert plan.input is not None
    known = {name for name, _ in plan.bindings} | set(MEMORY)
    for number, runtime in enumerate(plan.input.runtimes):
        if runtime.framework not in known:
            raise PlanError(
                f"input.runtimes.{number}.framework={runtime.framework!r} is not known: "
                f"{nearest(runtime.framework, known)}"
            )


def _merged(plan: Plan, given: Any) -> tuple[tuple[str, Layout], ...]:
    """The layouts of a plan with some of them changed. Raises PlanError for slots that the model lacks."""
    if not isinstance(given, Mapping):
        raise PlanError(f"layouts={given!r}: expected a dict of slot → Layout, as {{'0/w0': Layout.of(tp=Split(1))}}")
    slots = plan.model.slot_shapes
    for slot, layout in given.items():
        if slot not in slots:
            raise PlanError(f"layouts name slot {slot!r}, which the model lacks: {nearest(str(slot), slots)[:400]}")
        if not isinstance(layout, Layout):
            raise PlanError(f"layouts give {slot} {layout!r}: expected a Layout, as Layout.of(tp=Split(1))")
    return tuple(sorted((dict(plan.decision.layouts) | dict(given)).items()))


def _request(given: PlanInput, decided: Mapping[str, Any]) -> Request:
    """The request that pins what is decided. Raises PlanError for a combination that no plan has, and for options in
    the plan's input that there are not."""
    options = {field.name for field in fields_of(Options) if field.option is not None}
    for name, _ in given.options:
        if name not in options:
            raise PlanError(f"input.options: {name!r} is no option of plan(): {nearest(name, options)}")
        if name not in beside_decision():
            raise PlanError(
                f"input.options: {name!r} stands elsewhere in the file, in decision, input.cluster, input.pins or "
                f"input.runtimes: edit it there, and leave it out here"
            )
    pins = {name: value for name, value in decided.items() if name in options and name != "layouts"}
    # What a request says with another value than a decision, in which None means what is usual.
    if "gathered_stages" in pins:
        pins["gathered_stages"] = pins["gathered_stages"] or 0
    for name in NAMED_UNITS:
        pins[name] = pins.get(name) or None
    beside = dict(given.options)
    if "stage_starts" in pins:  # the cut is given, and there is none to find
        beside.pop("partitioner", None)
        beside.pop("memory_weight", None)
    asked = Options(**{**beside, **pins, "devices": "all"})
    return replace(request_for(asked, given.pins, given.runtimes), sums_as_level="reduce_after" in decided)


def _with_layouts(plan: Plan, graph: Graph, request: Request, layouts: Mapping[str, Layout]) -> Request:
    """The request with these layouts pinned, unless they are what comes out of it anyway."""
    tables = tables_of(graph, _cluster(plan), request)
    found = dict(tables.layouts(request.tp or 1))
    wanted = _by_parameter(plan, graph, layouts)
    if wanted == _by_parameter(plan, graph, found):
        return request
    pins = tuple(Pin(name, layout, EDIT, (AXIS,)) for (_, name), layout in wanted.items())
    return replace(request, pins=pins)


def _cluster(plan: Plan) -> Any:
    assert plan.input is not None
    return plan.input.cluster


def _by_parameter(plan: Plan, graph: Graph, layouts: Mapping[str, Layout]) -> dict[tuple[int, str], Layout]:
    """The layout of every parameter in each unit that uses it, in the captured framework's own dims."""
    units = plan.binding(graph.framework).units
    return {
        (unit, name): in_own_dims(layout_of(layouts, unit, plan.model.unit_classes[unit], role), dims)
        for unit, bound in enumerate(units)
        for role, name, dims in bound.parameters
    }


def _require_same_model(plan: Plan, graph: Graph, precision: str) -> None:
    """Raise PlanError unless the graph in the plan's input is that of its model, with the names that it binds."""
    reading = read(graph.for_precision(precision))
    structure: Structure = reading.structure
    if (difference := plan.model.difference(structure)) is not None:
        raise PlanError(
            f"input.graphs hold another model than the plan's: {difference} (plan against graph): plan again, or "
            f"restore the section"
        )
    if plan.binding(graph.framework) != reading.binding:
        raise PlanError(
            f"bindings.{graph.framework} name other parts than the captured graph in input: restore the section, or "
            f"plan again"
        )


def _kept(wanted: Mapping[str, Any], edited: set[str], found_anew: set[str]) -> list[str]:
    """The fields of a decision that must come out as asked for: those that a request pins, and edited ones."""
    options = {field.name for field in fields_of(Options)}
    return [name for name in wanted if name in edited or (name in options and name not in found_anew)]


def _require_kept(plan: Plan, found: Plan, wanted: Mapping[str, Any]) -> None:
    """Raise PlanError for the first part of a decision that is not as edited: nothing is changed in silence."""
    for name, value in wanted.items():
        own = getattr(found.decision, name)
        if name == "layouts":
            _require_layouts(plan, found, dict(value))
        elif own != value and not (name in NAMED_UNITS and sorted(own) == sorted(value)):
            raise PlanError(
                f"{name}={_shown(value)}: with the rest of the decision as it is, a plan has {name}={_shown(own)} "
                f"and no other: leave {name} out of the edit, or edit what it follows from"
            )


def _shown(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 200 else f"{text[:197]}…"


def _require_layouts(plan: Plan, found: Plan, wanted: Mapping[str, Layout]) -> None:
    graph = found.bindings[0][0]
    units = plan.binding(graph).units
    have = dict(found.decision.layouts)
    for unit, bound in enumerate(units):
        own = plan.model.unit_classes[unit]
        for role, name, dims in bound.parameters:
            asked, came = (in_own_dims(layout_of(of, unit, own, role), dims) for of in (wanted, have))
            if asked != came:
                slot = f"@{unit}/{role}" if f"@{unit}/{role}" in wanted else f"{own}/{role}"
                reason = dict(found.unsplit).get(f"{own}/{role}", "no op that reads it can use it")
                raise PlanError(
                    f"layout of {slot} ({name}): {asked} cannot be carried out at tp={found.decision.tp}, {came} "
                    f"would come out: {reason}"
                )


def _completed(plan: Plan, found: Plan, edited: set[str]) -> Plan:
    """The plan that was found, with what the plan before says beside its figures: who pinned what, the devices left
    out, the names and programs of other frameworks."""
    own = found.bindings[0][0]
    same_program = found.costs.rates == plan.costs.rates and all(
        getattr(found.decision, name) == getattr(plan.counted or plan.decision, name) for name in PROGRAM_FIELDS
    )
    others = {name: program for name, program in plan.programs if name != own and found.decision.tp > 1}
    if others and not same_program:
        warnings.warn(
            f"the programs of {', '.join(others)} on the tensor axis were of the plan before: plan.rebind(graph) makes "
            f"them anew",
            PlanWarning,
            stacklevel=3,
        )
        others = {}
    names = {field.name for field in fields(Decision)} & edited
    pinned = [said for said in plan.provenance.pinned if said.partition("=")[0] not in names]
    pinned += [f"{name}={getattr(found.decision, name)}" for name in _in_order(names - {"batch", "layouts"})]
    changed = dict(found.decision.layouts).items() ^ dict((plan.counted or plan.decision).layouts).items()
    sources = dict(plan.provenance.pinned_layouts)
    if "layouts" in names:
        pinned += [f"layouts of {len({slot for slot, _ in changed})} slots by {EDIT}"]
        sources |= {slot: EDIT for slot, _ in changed}
    layouts = [(slot, sources.get(slot, said)) for slot, said in found.provenance.pinned_layouts]
    return replace(
        found,
        counted_for="",
        counted=None,
        bindings=tuple(sorted((dict(plan.bindings) | dict(found.bindings)).items())),
        programs=tuple(sorted((others | dict(found.programs)).items())),
        provenance=replace(
            found.provenance,
            pinned=tuple(pinned),
            pinned_layouts=tuple((slot, said) for slot, said in layouts if said != EDIT or slot in sources),
            left_out=plan.provenance.left_out,
            slices=plan.provenance.slices if found.decision == (plan.counted or plan.decision) else "",
        ),
        input=plan.input,
    )


def _in_order(names: set[str]) -> list[str]:
    return [field.name for field in fields(Decision) if field.name in names]
