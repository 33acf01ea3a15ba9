"""The plan in the form of its file: the sections, whose schema follows from the classes of their values."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import MinLen

from shardwright.core.errors import PlanFileError
from shardwright.core.model.structure import Binding, Structure
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.plan_input import InputDocument
from shardwright.core.plan.program import Program
from shardwright.core.plan.record import Alternative, Costs, PlanRecord, Predicted, Provenance, StepFigures
from shardwright.core.plan.sections import section_of
from shardwright.core.plan.throughput import StepWork
from shardwright.core.plan.training_run import TrainingRun
from shardwright.core.solver.op_layouts import SlotAlternatives
from shardwright.core.values.fields import Amount, Count

VERSION = 23
PlanT = TypeVar("PlanT", bound=PlanRecord)


@dataclass(frozen=True, slots=True)
class ModelSection:
    """The model's structure, with a digest that shows whether it was edited."""

    name: str
    digest: str
    parameter_count: Amount
    unit_classes: tuple[Amount, ...]
    classes: tuple[tuple[tuple[str, tuple[Count, ...]], ...], ...]
    ties: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class PredictedSection(StepFigures):
    """The predicted figures of one step, the work in it, the decision that they and the costs are of, and a digest of
    all figures and of what they were counted for."""

    work: StepWork
    counted_for: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class AlternativesSection:
    """The alternatives that were not chosen: whole plans, matrices that stay whole or out of fp8, other layouts of
    parameters."""

    plans: tuple[Alternative, ...]
    unsplit: tuple[tuple[str, str], ...]
    not_in_fp8: tuple[tuple[str, str], ...]
    layouts: SlotAlternatives


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """One plan file."""

    format: Literal["shardwright-plan"]
    version: int
    decision: Decision
    model: ModelSection
    bindings: Annotated[tuple[tuple[str, Binding], ...], MinLen(1)]
    programs: tuple[tuple[str, Program], ...]
    costs: Costs
    predicted: PredictedSection
    run: TrainingRun
    alternatives: AlternativesSection
    provenance: Provenance
    input: InputDocument

    @classmethod
    def of(cls, plan: PlanRecord) -> "PlanDocument":
        """The file of a plan. Raises PlanFileError for a plan whose input is not known."""
        model = plan.model
        if plan.input is None:
            raise PlanFileError("this plan was put together without the graph that it is of: save what plan() returns")
        return cls(
            "shardwright-plan",
            VERSION,
            plan.decision,
            ModelSection(
                plan.model_name, model.digest, model.parameter_count, model.unit_classes, model.class_slots, model.ties
            ),
            plan.bindings,
            plan.programs,
            plan.costs,
            PredictedSection(
                **_figures(plan.predicted),
                work=plan.work,
                counted_for=plan.counted_for,
                decision=plan.counted or plan.decision,
            ),
            plan.run,
            AlternativesSection(plan.alternatives, plan.unsplit, plan.not_in_fp8, plan.layout_alternatives),
            plan.provenance,
            plan.input.document(),
        )

    @property
    def structure(self) -> Structure:
        """The model's structure."""
        return Structure(self.model.unit_classes, self.model.classes, self.model.ties)

    def plan(self, kind: type[PlanT]) -> PlanT:
        """The plan of the file, of a class of plans."""
        return kind(
            decision=self.decision,
            model_name=self.model.name,
            model=self.structure,
            bindings=self.bindings,
            programs=self.programs,
            costs=self.costs,
            predicted=Predicted(**_figures(self.predicted), mesh=self.predicted.decision.mesh),
            alternatives=self.alternatives.plans,
            unsplit=self.alternatives.unsplit,
            not_in_fp8=self.alternatives.not_in_fp8,
            layout_alternatives=self.alternatives.layouts,
            provenance=self.provenance,
            work=self.predicted.work,
            run=self.run,
            counted_for=self.predicted.counted_for,
            counted=self.predicted.decision,
            input=self.input.input(),
        )


def _figures(held: StepFigures) -> dict[str, Any]:
    return {field.name: getattr(held, field.name) for field in fields(StepFigures)}


def schema() -> dict[str, Any]:
    """The JSON schema of the plan file."""
    return section_of(PlanDocument).model_json_schema()
