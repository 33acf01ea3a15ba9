"""A plan in words: what was decided, what it costs, and why a parameter lies as it does."""

from shardwright.core.amounts import bytes_text, seconds_text
from shardwright.core.errors import PlanError, nearest
from shardwright.core.picture import picture
from shardwright.core.plan import Plan
from shardwright.core.structure import SlotDims, in_own_dims, layout_of


def explain(plan: Plan, parameter: str | None = None) -> str:
    """The plan in a few lines, or one parameter of it (by the name that any bound framework gives it).

    Raises PlanError for a parameter that no binding knows, with the nearest.
    """
    return _plan_text(plan) if parameter is None else _parameter_text(plan, parameter)


def _plan_text(plan: Plan) -> str:
    p = plan.predicted
    lines = [
        f"{plan.model_name} on {plan.provenance.cluster}: {plan.summary()}",
        f"step {seconds_text(p.step_time_s)} = pipeline {seconds_text(p.pipeline_s)} (bubble {p.bubble_fraction:.1%}, "
        f"tensor collectives {seconds_text(p.tensor_collective_s)}) + gradient reduction "
        f"{seconds_text(p.data_parallel_s)} + optimizer {seconds_text(p.optimizer_s)}",
    ]
    for rank, use in enumerate(p.memory_by_stage_rank):
        lines.append(
            f"pipeline rank {rank}: {bytes_text(use.total_bytes)} (parameters {bytes_text(use.parameters_bytes)}, "
            f"gradients {bytes_text(use.gradients_bytes)}, optimizer {bytes_text(use.optimizer_bytes)}, activations "
            f"{bytes_text(use.activations_bytes)}, buffers {bytes_text(use.buffers_bytes)})"
        )
    lines += [f"not chosen: {a.summary}: {a.reason}" for a in plan.alternatives]
    lines += [f"whole on the tensor axis: {slot}: {reason}" for slot, reason in plan.unsplit]
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
    lines = []
    unsplit = dict(plan.unsplit)
    decided = dict(plan.decision.layouts)
    others = dict(plan.layout_alternatives)
    schedule = plan.build_schedule()
    for framework, unit, role in known[parameter]:
        stage = next(s for s, units in enumerate(plan.stage_units) if unit in units)
        slot = f"{plan.model.unit_classes[unit]}/{role}"
        shape = dict(plan.model.class_slots[plan.model.unit_classes[unit]])[role]
        lines.append(f"{parameter} ({framework}): unit {unit}, stage {stage}, slot {slot}, shape (in, out) {shape}")
        layout = layout_of(decided, unit, plan.model.unit_classes[unit], role)
        if not layout.is_replicated:
            lines.append(f"  layout {layout} in slot dims")
        else:
            why = unsplit.get(slot) or (
                "tp is 1" if plan.decision.tp == 1 else "no axis that it could be split on pays"
            )
            lines.append(f"  replicated: {why}")
        lines += [
            f"  not {a.layout}: {_signed(a.extra_s * 1e6, 'µs')} for each sample and unit, and "
            f"{_signed(a.extra_bytes / 2**20, 'MiB')} held, at the rates of large work"
            for a in others.get(slot, ())
            if a.layout != layout
        ]
        slots = plan.binding(framework).units[unit].parameters
        name, dims = next((name, dims) for held, name, dims in slots if held == role)
        own = in_own_dims(layout, dims)
        rank = schedule.stage_to_rank(stage)
        where = f", on pipeline rank {rank}" if plan.decision.pp > 1 else ""
        whole = _own_shape(dims)
        lines.append(f"  {name} {whole} as {framework} has it{where}:")
        lines += [f"    {line}" for line in picture(whole, own, plan.mesh, pp=rank).splitlines()]
    return "\n".join(lines)


def _own_shape(dims: SlotDims) -> tuple[int, ...]:
    """The shape that a framework gives a parameter, from the dims that each slot dim is made of."""
    sizes = {dim: size for group in dims for dim, size in group}
    return tuple(sizes[dim] for dim in sorted(sizes))


def _signed(value: float, unit: str) -> str:
    return f"{value:+.4g} {unit}"
