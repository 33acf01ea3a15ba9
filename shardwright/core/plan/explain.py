"""A plan in words: its decisions, their costs, and the reason for a parameter's layout."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.errors import PlanError, nearest
from shardwright.core.layout.picture import picture
from shardwright.core.layout.placements import Layout, Split
from shardwright.core.model.structure import SlotDims, in_own_dims, layout_of
from shardwright.core.plan.plan import Plan, stale_note
from shardwright.core.values.amounts import bytes_text, seconds_text


def explain(plan: Plan, parameter: str | None = None) -> str:
    """The plan in a few lines, or one parameter of it (by the name that any bound framework gives it).

    Raises PlanError for a parameter that no binding knows, with the nearest.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"explain takes a Plan, not a {type(plan).__name__}: Plan.load reads one")
    if parameter is not None and not isinstance(parameter, str):
        raise PlanError(f"parameter={parameter!r}: expected the name of a parameter")
    return _plan_text(plan) if parameter is None else _parameter_text(plan, parameter)


BEFORE = "before the edit: "
"""The mark of figures of an edited plan, which are those of the decision before."""


def _note(plan: Plan) -> list[str]:
    """The line about the figures of an edited plan."""
    note = stale_note(plan)
    return [] if note is None else [f"note: {note}"]


def _plan_text(plan: Plan) -> str:
    p, old = plan.predicted, BEFORE * plan.is_stale
    lines = [
        f"{plan.model_name} on {plan.provenance.cluster}: {plan.summary()}",
        *_note(plan),
        f"{old}step {seconds_text(p.step_time_s)} = pipeline {seconds_text(p.pipeline_s)} "
        f"(bubble {p.bubble_fraction:.1%}, tensor collectives {seconds_text(p.tensor_collective_s)}, waiting for "
        f"sharded parameters {seconds_text(p.passes_wait_s)}) + traffic over the data axis "
        f"{seconds_text(p.data_parallel_s)} + optimizer {seconds_text(p.optimizer_s)}; hidden behind computing: "
        f"{seconds_text(p.data_parallel_hidden_s)} over the data axis, {seconds_text(p.tensor_hidden_s)} of tensor "
        f"collectives, as {plan.costs.execution.system} overlaps",
    ]
    for rank, use in enumerate(p.memory_by_stage_rank):
        sizes = ", ".join(f"{name} {bytes_text(size)}" for name, size in use.classes.items())
        apart = f", never there at once {bytes_text(use.apart_bytes)}" if use.apart_bytes else ""
        lines.append(f"{old}pipeline rank {rank}: {bytes_text(use.total_bytes)} ({sizes}{apart})")
    lines += _fp8_lines(plan)
    if plan.provenance.pinned:
        lines.append(f"pinned: {', '.join(plan.provenance.pinned)}")
    if plan.provenance.slices:
        lines.append(f"{old}{plan.provenance.slices}")
    lines += [f"{old}not chosen: {a.summary}: {a.reason}" for a in plan.alternatives]
    lines += [f"{old}whole on the tensor axis: {slot}: {reason}" for slot, reason in plan.unsplit]
    return "\n".join(lines)


def _parameter_text(plan: Plan, parameter: str) -> str:
    known: dict[str, list[tuple[str, int, str]]] = {}
    for framework, binding in plan.bindings:
        first_name = {alias: names[0] for names in binding.aliases for alias in names}
        for unit, bound in enumerate(binding.units):
            for role, name, _ in bound.parameters:
                places = [alias for alias, first in first_name.items() if first == name] or [name]
                for place in places:
                    known.setdefault(place, []).append((framework, unit, role))
    if parameter not in known:
        raise PlanError(f"the plan has no parameter {parameter!r}: {nearest(parameter, known)[:400]}")
    lines = _note(plan)
    unsplit = dict(plan.unsplit)
    decided = dict(plan.decision.layouts)
    schedule = plan.build_schedule()
    uses: dict[str, list[_Use]] = {}
    for framework, unit, role in known[parameter]:
        stage = next(s for s, units in enumerate(plan.stage_units) if unit in units)
        slot = f"{plan.model.unit_classes[unit]}/{role}"
        shape = dict(plan.model.class_slots[plan.model.unit_classes[unit]])[role]
        lines.append(f"{parameter} ({framework}): unit {unit}, stage {stage}, slot {slot}, shape (in, out) {shape}")
        layout = layout_of(decided, unit, plan.model.unit_classes[unit], role)
        if not layout.is_replicated:
            lines.append(f"  layout {layout} in slot dims{_meaning(layout, role)}")
        else:
            why = unsplit.get(slot) or (
                "tp is 1" if plan.decision.tp == 1 else "no axis that it could be split on pays"
            )
            lines.append(f"  replicated: {why}")
        if slot in plan.decision.fp8_weights:
            lines.append("  its products are computed in fp8")
        elif slot in dict(plan.not_in_fp8):
            lines.append(f"  its products stay in bf16: {dict(plan.not_in_fp8)[slot]}")
        if (source := dict(plan.provenance.pinned_layouts).get(slot)) is not None:
            lines.append(f"  pinned by {source}")
        slots = plan.binding(framework).units[unit].parameters
        name, dims = next((name, dims) for held, name, dims in slots if held == role)
        others = [a for a in dict(plan.layout_alternatives).get(slot, ()) if a.layout != layout]
        if others:
            lines.append(f"  {BEFORE * plan.is_stale}what others would add in this unit, at the rates of large work:")
        lines += [f"  not {a.layout}: {_cost(a.extra_s, a.extra_bytes)}{_meaning(a.layout, role)}" for a in others]
        own = in_own_dims(layout, dims)
        uses.setdefault(framework, []).append(
            _Use(own, {in_own_dims(a.layout, dims): (a.extra_s, a.extra_bytes) for a in others})
        )
        rank = schedule.stage_to_rank(stage)
        where = f", on pipeline rank {rank}" if plan.decision.pp > 1 else ""
        whole = _own_shape(dims)
        lines.append(f"  {name} {whole} as {framework} has it{where}:")
        lines += [f"    {line}" for line in picture(whole, own, plan.mesh, pp=rank).splitlines()]
    for framework, found in uses.items():
        lines += _together(framework, found)
    return "\n".join(lines)


def _fp8_lines(plan: Plan) -> list[str]:
    """The weights whose products are computed in fp8, and those that stay in bf16, by a name of each."""
    framework, binding = plan.bindings[0]
    names: dict[str, str] = {}
    for unit, of_class in zip(binding.units, plan.model.unit_classes, strict=True):
        for role, name, _ in unit.parameters:
            names.setdefault(f"{of_class}/{role}", name)
    lines = []
    if plan.decision.fp8_weights:
        said = ", ".join(f"{slot} ({names[slot]})" for slot in plan.decision.fp8_weights)
        count = len(plan.fp8_parameters(framework))
        lines.append(f"products in fp8: those of {count} weights, with one scale for each operand: {said}")
    return lines + [f"products in bf16: {slot} ({names[slot]}): {why}" for slot, why in plan.not_in_fp8]


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of a parameter: its layout, and the extra cost of other layouts there, all in its own dims."""

    layout: Layout
    others: dict[Layout, tuple[float, float]]


def _together(framework: str, uses: Sequence[_Use]) -> list[str]:
    """The lines about the cost of other layouts of a tied parameter over all of its uses. One use alone may be better
    off with another layout. The bytes are those of one array."""
    if len(uses) < 2:
        return []
    common = [layout for layout in uses[0].others if all(layout in use.others for use in uses)]
    if not common:
        return []
    lines = [f"all {len(uses)} uses together, as {framework} has it ({uses[0].layout}):"]
    for layout in common:
        seconds = sum(use.others[layout][0] for use in uses)
        held = max(use.others[layout][1] for use in uses)
        lines.append(f"  not {layout}: {_cost(seconds, held)}")
    return lines


def _meaning(layout: Layout, role: str) -> str:
    """The slot dim of a matrix that is split, in words."""
    split = next((place for _, place in layout.placements if isinstance(place, Split)), None)
    if split is None or not role.startswith("w"):
        return ""
    what = ("what is summed over or looked up", "what comes out")[split.dim]
    return f" ({what} is split{', block by block' if split.blocks else ''})"


def _cost(extra_s: float, extra_bytes: float) -> str:
    time, held = _signed(extra_s * 1e6, "µs"), _signed(extra_bytes / 2**20, "MiB")
    return f"{time} a sample, {held} held"


def _own_shape(dims: SlotDims) -> tuple[int, ...]:
    """The shape that a framework gives a parameter, from the dims that make up each slot dim."""
    sizes = {dim: size for group in dims for dim, size in group}
    return tuple(sizes[dim] for dim in sorted(sizes))


def _signed(value: float, unit: str) -> str:
    return f"{value:+.4g} {unit}"
