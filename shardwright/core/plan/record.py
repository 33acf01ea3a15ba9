"""The record of a plan, as its file holds it: decision, model, names, costs, predictions, alternatives, provenance."""

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Le

from shardwright.core.layout.mesh import Mesh
from shardwright.core.model.structure import Binding, Structure
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.program import Program
from shardwright.core.solver.op_layouts import Rates, SlotAlternatives
from shardwright.core.tables.memory import MemoryUse
from shardwright.core.values.fields import Amount, Count, Seconds, Share


@dataclass(frozen=True, slots=True)
class ClassCost:
    """One microbatch of one class of unit, recompute and tensor collectives included. Seconds and bytes per rank."""

    forward_s: Seconds
    input_grad_s: Seconds
    weight_grad_s: Seconds
    activation_bytes: Amount
    parameter_elements: Amount
    trained_elements: Amount
    """Of the parameters' entries, those that have gradients."""
    swapped_s: Seconds = 0.0
    """That its activations take to the host, and back; beside the passes of the stage."""
    collective_s: Seconds = 0.0
    """Of the passes, collectives over the tensor axis."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What units cost, folded."""

    unit_classes: tuple[Amount, ...]
    classes: tuple[ClassCost, ...]
    boundary_bytes: tuple[Amount, ...]
    """For every unit, the bytes of activations that enter it from before: what a cut there sends."""
    boundary_s: tuple[Seconds, ...]
    """Seconds to send them to the next stage."""
    rates: Rates
    """What the tensor layouts were chosen by: those of another framework are completed by the same."""
    ranks: tuple["RankCosts", ...] = ()
    """For every pipeline rank its own seconds, where devices or links differ; empty where all ranks cost the same."""
    idle_lent: Share = 0.0
    """As of `StageCosts`."""

    def on_rank(self, rank: int) -> "Costs":
        """What units cost on one pipeline rank."""
        own = self.ranks[rank]
        return replace(self, classes=own.classes, boundary_s=own.boundary_s, ranks=())


@dataclass(frozen=True, slots=True)
class RankCosts:
    """What units cost on one pipeline rank; the fields are those of `Costs`."""

    classes: tuple[ClassCost, ...]
    boundary_s: tuple[Seconds, ...]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one step will take."""

    step_time_s: Seconds
    pipeline_s: Seconds
    """Of it, the pipeline's forward and backward passes, bubbles included."""
    bubble_fraction: Seconds
    """Idle share of the pipeline time, averaged over ranks, without what those at work were lent of it."""
    tensor_collective_s: Seconds
    """Of the pipeline time, communication on the tensor axis on the slowest stage."""
    data_parallel_s: Seconds
    """Of the step, the gradient reduction that nothing hides."""
    optimizer_s: Seconds
    memory_by_stage_rank: tuple[MemoryUse, ...]
    """One per coordinate on pp: ranks that differ in dp or tp only hold the same amounts."""


@dataclass(frozen=True, slots=True)
class Predicted(StepFigures):
    """What one step will take, on the ranks of a mesh."""

    mesh: Mesh

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        """One per rank."""
        near = self.mesh.stride("pp")
        once = tuple(use for use in self.memory_by_stage_rank for _ in range(near))
        return once * (self.mesh.size // len(once))

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """One per rank."""
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
    """Where a plan comes from."""

    shardwright: str
    captured_from: str
    cluster: str
    world_size: Count
    device_memory_bytes: Annotated[int, Ge(1), Le(1 << 62)]
    pinned: tuple[str, ...]
    pinned_layouts: tuple[tuple[str, str], ...] = ()
    """``class/role`` of every slot with a pinned layout, and what pinned it."""
    left_out: str = ""
    """Devices that were given and are not worth using; ``cluster`` and ``world_size`` are of the rest."""


@dataclass(frozen=True, repr=False)
class PlanRecord:
    """The fields of a plan."""

    decision: Decision
    model_name: str
    model: Structure
    bindings: tuple[tuple[str, Binding], ...]
    costs: Costs
    predicted: Predicted
    alternatives: tuple[Alternative, ...]
    unsplit: tuple[tuple[str, str], ...]
    """``class/role`` of the matrices that stay whole on the tensor axis, and why."""
    layout_alternatives: SlotAlternatives
    """For every slot the next best layouts, and what they would have cost."""
    provenance: Provenance
    programs: tuple[tuple[str, Program], ...] = ()
    """For every framework that the plan is bound to, how the model runs there on the tensor axis; none without one."""
    counted_for: str = ""
    """A digest of the decision, the model and the costs that ``predicted`` was counted for; by default, of this
    plan's own. After an edit it is that of the plan before (`is_stale`)."""
