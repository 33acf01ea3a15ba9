"""The record of a plan, as in its file: decision, model, names, costs, predictions, alternatives, provenance."""

from dataclasses import dataclass, field, replace
from typing import Annotated

from annotated_types import Ge, Le

from shardwright.core.errors import PlanError
from shardwright.core.execution import PLAIN, Execution
from shardwright.core.layout.mesh import Mesh
from shardwright.core.model.structure import Binding, Structure
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.plan_input import PlanInput
from shardwright.core.plan.prediction_error import PredictionError
from shardwright.core.plan.program import Program
from shardwright.core.plan.throughput import StepWork
from shardwright.core.plan.training_run import UNSAID, TrainingRun
from shardwright.core.solver.op_layouts import Rates, SlotAlternatives
from shardwright.core.tables.memory import MemoryUse
from shardwright.core.values.fields import Amount, Count, Rate, Seconds, Share


@dataclass(frozen=True, slots=True)
class ClassCost:
    """The cost of one microbatch of one class of unit, with recompute and tensor collectives, per rank."""

    forward_s: Seconds
    input_grad_s: Seconds
    weight_grad_s: Seconds
    activation_bytes: Amount
    parameter_elements: Amount
    trained_elements: Amount
    """The parameter entries that have gradients."""
    swapped_s: Seconds = 0.0
    """The seconds that its activations take to the host, and again back, beside the passes of the stage."""
    collective_s: Seconds = 0.0
    """The seconds of the passes that are collectives over the tensor axis."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of units, folded."""

    unit_classes: tuple[Amount, ...]
    classes: tuple[ClassCost, ...]
    boundary_bytes: tuple[Amount, ...]
    """The bytes of activations that enter each unit from before, which a cut there sends."""
    boundary_s: tuple[Seconds, ...]
    """The seconds to send them to the next stage."""
    rates: Rates
    """The rates by which the tensor layouts were chosen; those of another framework are completed by the same rates."""
    ranks: tuple["RankCosts", ...] = ()
    """The costs of each pipeline rank where devices or links differ; empty where all ranks cost the same."""
    idle_lent: Share = 0.0
    """The share of idle time that is lent, as in `StageCosts`."""
    waits_s: tuple[tuple[Seconds, Seconds], ...] = ()
    """The seconds that a forward and a backward of each stage wait for traffic over the data axis; empty: none."""
    execution: Execution = PLAIN
    """What the system overlaps that the plan was counted for, and how it makes kernels."""
    slices: tuple["SliceCosts", ...] = ()
    """The costs of each slice of a sequence; empty where sequences are whole."""

    def on_rank(self, rank: int) -> "Costs":
        """The costs of units on one pipeline rank. Raises PlanError for a rank that a plan had not before it was
        edited."""
        if not self.ranks:
            return self
        if rank >= len(self.ranks):
            raise PlanError(
                f"costs are counted for {len(self.ranks)} unlike pipeline ranks, and the plan was edited to have more: "
                f"count them anew with shardwright rescore"
            )
        own = self.ranks[rank]
        return replace(self, classes=own.classes, boundary_s=own.boundary_s, ranks=())


@dataclass(frozen=True, slots=True)
class RankCosts:
    """The costs of units on one pipeline rank; the fields are those of `Costs`."""

    classes: tuple[ClassCost, ...]
    boundary_s: tuple[Seconds, ...]


@dataclass(frozen=True, slots=True)
class SliceCosts:
    """The costs of one slice of a microbatch's sequence on every stage; the fields are those of `StageCosts`."""

    forward_s: tuple[Seconds, ...]
    input_grad_s: tuple[Seconds, ...]
    weight_grad_s: tuple[Seconds, ...]
    transfer_s: tuple[Seconds, ...]
    activation_bytes: tuple[Amount, ...]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The predicted figures of one step."""

    step_time_s: Seconds
    pipeline_s: Seconds
    """The part of the step that is the pipeline's forward and backward passes, bubbles included."""
    bubble_fraction: Seconds
    """The idle share of the pipeline time, averaged over ranks, without what was lent of it to busy ranks."""
    tensor_collective_s: Seconds
    """The part of the pipeline time that is communication on the tensor axis, on the slowest stage."""
    data_parallel_s: Seconds
    """The part of the step after the pipeline that waits for gradients, updated parameters and what was measured beside
    microbatches."""
    optimizer_s: Seconds
    memory_by_stage_rank: tuple[MemoryUse, ...]
    """The memory of each coordinate on pp; ranks that differ only in dp or tp hold the same amounts."""
    passes_wait_s: Seconds
    """The part of the pipeline time that passes wait for traffic over the data axis, on the rank that waits most."""
    data_parallel_hidden_s: Seconds
    """The traffic over the data axis that computing and idle time hide, on the rank that hides most."""
    tensor_hidden_s: Seconds
    """The collectives on the tensor axis that computing hides, on the rank that hides most."""
    error: PredictionError = field(default=PredictionError(), kw_only=True)
    """How far predictions of this kind are off."""


@dataclass(frozen=True, slots=True)
class Predicted(StepFigures):
    """The predicted figures of one step, on the ranks of a mesh."""

    mesh: Mesh

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        """The memory of each rank."""
        near = self.mesh.stride("pp")
        once = tuple(use for use in self.memory_by_stage_rank for _ in range(near))
        return once * (self.mesh.size // len(once))

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """The peak memory of each rank, in bytes."""
        return tuple(use.total_bytes for use in self.memory)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was scored and not chosen."""

    summary: str
    step_time_s: Seconds
    peak_memory_bytes: Amount
    reason: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of a plan."""

    shardwright: str
    captured_from: str
    cluster: str
    world_size: Count
    device_memory_bytes: tuple[Annotated[int, Ge(1), Le(1 << 62)], ...]
    """The memory that a model may use on each coordinate on pp: that of the smallest device there."""
    peak_flops_per_s: tuple[tuple[str, Rate], ...]
    """The peak of matrix products of one device in each precision, the mean over the devices."""
    pinned: tuple[str, ...]
    pinned_layouts: tuple[tuple[str, str], ...] = ()
    """The ``class/role`` of every slot with a pinned layout, and the source of its pin."""
    left_out: str = ""
    """The devices that were given and are not worth using; ``cluster`` and ``world_size`` are of the rest."""
    headroom: Share = 0.0
    """The share of each device's memory that the plan leaves free, as asked for or by default."""
    slices: str = ""
    """The reason why sequences go through the pipeline in slices, or whole, where that was searched."""


@dataclass(frozen=True, repr=False)
class PlanRecord:
    """The fields of a plan."""

    decision: Decision
    model_name: str
    model: Structure
    bindings: tuple[tuple[str, Binding], ...]
    costs: Costs
    predicted: Predicted
    work: StepWork
    """What a step does, on all devices together."""
    alternatives: tuple[Alternative, ...]
    unsplit: tuple[tuple[str, str], ...]
    """The ``class/role`` of the matrices that stay whole on the tensor axis, and the reason."""
    layout_alternatives: SlotAlternatives
    """The next best layouts of each slot, with the cost that they would have had."""
    provenance: Provenance
    programs: tuple[tuple[str, Program], ...] = ()
    """The program on the tensor axis for each framework that the plan is bound to; empty without a tensor axis."""
    counted_for: str = ""
    """A digest of all figures and of what they were counted for; by default, that of this plan. After an edit it is
    that of the plan before (`is_stale`)."""
    run: TrainingRun = UNSAID
    """The training that the plan is for, and the price of its devices."""
    counted: Decision | None = None
    """The decision that costs, predictions and alternatives are of; by default, this plan's."""
    input: PlanInput | None = None
    """What the figures were counted from, for counting them anew. None: not known, and the plan cannot be saved."""
    not_in_fp8: tuple[tuple[str, str], ...] = ()
    """Under precision "fp8", the ``class/role`` of the matrices whose products stay in bf16, and the reason."""
