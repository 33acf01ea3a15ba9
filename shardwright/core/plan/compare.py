"""Two plans side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.core.checkpoint.name_map import NameMap
from shardwright.core.errors import PlanError
from shardwright.core.layout.placements import Layout
from shardwright.core.plan.name_alignment import unaligned_names
from shardwright.core.plan.plan import Plan, stale_note
from shardwright.core.plan.prediction_error import lead_error

FRAMEWORK_DIFFERENCES = {
    "model.name": "the two models are named differently",
    "bindings": "each framework names the parts in its own way",
    "programs": "the ops of the two frameworks differ",
    "provenance": "where and from which framework each plan was made",
    "predicted": "frameworks keep and move slightly different intermediates",
    "costs": "the same",
    "alternatives": "ordered by predicted times",
}
"""The closed list of parts that may differ between the plans of one model captured in two frameworks. `decision` and
the rest of `model` may not differ."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs; ``part`` is its section of the plan file."""

    part: str
    field: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two plans, the decision first."""

    first: Plan
    second: Plan
    differences: tuple[Difference, ...]

    @property
    def same_decision(self) -> bool:
        """Whether two plans of one structure have the same degrees, cuts, layouts, schedule and memory policy."""
        return not any(d.part in ("decision", "model") and d.field != "name" for d in self.differences)

    @property
    def unexpected(self) -> tuple[Difference, ...]:
        """The differences that the frameworks' own naming and arithmetic do not explain (`FRAMEWORK_DIFFERENCES`)."""
        allowed = FRAMEWORK_DIFFERENCES
        return tuple(d for d in self.differences if d.part not in allowed and f"{d.part}.{d.field}" not in allowed)

    @property
    def faster(self) -> str:
        """Which plan is the faster by a sample, and whether predictions can tell; empty where they are equal."""
        plans = (self.first, self.second)
        a, b = (plan.predicted.step_time_s / (plan.counted or plan.decision).batch for plan in plans)
        if a == b or not min(a, b) > 0:
            return ""
        lead = max(a, b) / min(a, b) - 1
        one, other = self.first, self.second
        alike = (
            one.model == other.model
            and one.provenance.captured_from == other.provenance.captured_from
            and one.provenance.cluster == other.provenance.cluster
            and one.predicted.error == other.predicted.error
        )
        bar = lead_error(one.predicted.error, other.predicted.error, alike=alike)
        name = "first" if a < b else "second"
        of = "between plans of one model on one cluster" if alike else "of the two together"
        if lead <= bar:
            return (
                f"The {name} is predicted to be {lead:.1%} faster for each sample, within the error {of} ({bar:.0%}): "
                f"predictions do not tell which is faster."
            )
        return f"The {name} is predicted to be {lead:.1%} faster for each sample; the error {of} is {bar:.0%}."

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be known of the figures: those of an edited plan are old."""
        found = {"the first plan": stale_note(self.first), "the second plan": stale_note(self.second)}
        return tuple(f"{which}: {note}" for which, note in found.items() if note is not None)

    def __str__(self) -> str:
        """The differences, one a line, and which plan is the faster."""
        lines = [f"{d.part}.{d.field}: {d.first or '-'} | {d.second or '-'}" for d in self.differences]
        lines += [self.faster] if self.faster else []
        return "\n".join([*(f"note: {note}" for note in self.notes), *(lines or ["no difference"])])


def compare(plan_a: Plan, plan_b: Plan, names: NameMap | Mapping[str, str] | str | Path | None = None) -> Comparison:
    """The differences between two plans: degrees, cuts, layouts, policies, structure, predictions.

    names: of twins in two frameworks, the map of their names by which checkpoints cross; where it relates other
        parameters than the plans have in the same place, that is a difference.

    Raises PlanError for an argument that is no plan, and with ``names`` for plans that are not of twins;
    CheckpointError where there is no such map.
    """
    for plan in (plan_a, plan_b):
        if not isinstance(plan, Plan):
            raise PlanError(f"compare takes two Plans, not a {type(plan).__name__}: Plan.load reads one")
    found: list[Difference] = []

    def note(part: str, field: str, first: object, second: object) -> None:
        if first != second:
            found.append(Difference(part, field, str(first), str(second)))

    a, b = plan_a.decision, plan_b.decision
    for field in a.__dataclass_fields__:
        if field == "layouts":
            mine, theirs = dict(a.layouts), dict(b.layouts)
            for slot in sorted(mine.keys() | theirs.keys()):
                note("decision", f"layouts.{slot}", mine.get(slot, Layout()), theirs.get(slot, Layout()))
        else:
            note("decision", field, getattr(a, field), getattr(b, field))
    note("model", "name", plan_a.model_name, plan_b.model_name)
    note("model", "structure", "", plan_a.model.difference(plan_b.model) or "")
    note("model", "parameter_count", plan_a.model.parameter_count, plan_b.model.parameter_count)
    for place, torch, jax in () if names is None else unaligned_names(plan_a, plan_b, NameMap.of_any(names)):
        found.append(Difference("names", place, torch, jax))
    note("bindings", "frameworks", [n for n, _ in plan_a.bindings], [n for n, _ in plan_b.bindings])
    programs, others = dict(plan_a.programs), dict(plan_b.programs)
    for name in sorted(programs.keys() | others.keys()):
        digests = [held[name].digest if name in held else "" for held in (programs, others)]
        note("programs", f"{name}.digest", *digests)
    p, q = plan_a.predicted, plan_b.predicted
    old = [" (before the edit)" * plan.is_stale for plan in (plan_a, plan_b)]
    for field in (
        "step_time_s", "pipeline_s", "bubble_fraction", "tensor_collective_s", "tensor_hidden_s", "data_parallel_s",
        "passes_wait_s", "data_parallel_hidden_s",
    ):  # fmt: skip
        note("predicted", field, f"{getattr(p, field):.4g}{old[0]}", f"{getattr(q, field):.4g}{old[1]}")
    note("predicted", "error", p.error, q.error)
    peaks = [f"{max(each.peak_memory_bytes)}{mark}" for each, mark in zip((p, q), old, strict=True)]
    note("predicted", "largest peak_memory_bytes", *peaks)
    for field in plan_a.provenance.__dataclass_fields__:
        note("provenance", field, getattr(plan_a.provenance, field), getattr(plan_b.provenance, field))
    for field in plan_a.run.__dataclass_fields__:
        note("run", field, getattr(plan_a.run, field), getattr(plan_b.run, field))
    return Comparison(plan_a, plan_b, tuple(found))
