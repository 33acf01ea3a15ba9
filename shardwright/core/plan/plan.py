"""The plan: the division of a model over devices, its predicted cost, and the frameworks' names for its parts."""

import hashlib
import warnings
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TypeVar

from shardwright.core.errors import LayoutError, PlanError, PlanFileError, PlanWarning, ShardwrightError, nearest
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout, Split
from shardwright.core.model.fold import CallRef, fold
from shardwright.core.model.fp8_products import require_fp8
from shardwright.core.model.graph import Graph
from shardwright.core.model.structure import (
    Binding,
    in_own_dims,
    in_slot_dims,
    layout_of,
    require_names,
    structure_of,
)
from shardwright.core.plan import file
from shardwright.core.plan.decision import Decision, summarize
from shardwright.core.plan.realised_layouts import program_for
from shardwright.core.plan.record import PlanRecord
from shardwright.core.plan.throughput import Throughput, throughput
from shardwright.core.plan.training_run import Training
from shardwright.core.schedule import Schedule, StageCosts
from shardwright.core.schedule.simulate import Costs as PassCosts
from shardwright.core.tables.memory import modes_of, recomputable_units, require_recomputable
from shardwright.core.values.amounts import bytes_text, seconds_text
from shardwright.core.values.recompute_modes import Mode
from shardwright.core.values.text_files import path_of, read_text


@dataclass(frozen=True, repr=False)
class Plan(PlanRecord):
    """A decision about one model on one cluster. It is saved as JSON; `docs/plan-file.md` describes the file."""

    def __post_init__(self) -> None:
        if self.counted is None:
            object.__setattr__(self, "counted", self.decision)
        if not self.counted_for:
            object.__setattr__(self, "counted_for", self._basis())
        if self.mesh.size != self.provenance.world_size:
            d = self.decision
            raise PlanError(
                f"pp {d.pp} × dp {d.dp} × tp {d.tp} are {self.mesh.size} ranks, and the plan was made for the "
                f"{self.provenance.world_size} devices of {self.provenance.cluster}: plan again for the other number"
            )
        units = len(self.model.unit_classes)
        if self.decision.stage_starts[-1] >= units:
            raise PlanError(f"stage_starts {self.decision.stage_starts} name units that the model's {units} lack")
        for name in ("kept_units", "offloaded_units", "other_units"):
            named = getattr(self.decision, name)
            if any(not 0 <= unit < units for unit in named):
                raise PlanError(f"{name} {named} name units that the model's {units} lack")
        require_recomputable(self.decision.other_units, recomputable_units(self.model.unit_classes))
        shapes = self.model.slot_shapes
        for slot, layout in self.decision.layouts:
            if slot not in shapes:
                raise PlanError(f"a layout is given for {slot!r}, which the model lacks: {nearest(slot, shapes)}")
            require_slot_layout(slot, layout, shapes[slot], self.mesh)
        matrices = {slot for slot, shape in shapes.items() if len(shape) == 2}
        matrices |= self._stacks() if self.decision.fp8_weights else set()
        for slot in self.decision.fp8_weights:
            if slot not in matrices or slot.startswith("@"):
                raise PlanError(f"fp8_weights name {slot!r}, which is no matrix of the model: {nearest(slot, shapes)}")
        for framework, _ in self.bindings:
            self.parameter_layouts(framework)

    @property
    def is_stale(self) -> bool:
        """Whether the figures were counted for another decision, or they or their input were edited."""
        return self.counted != self.decision or self.counted_for != self._basis()

    @property
    def as_counted(self) -> "Plan":
        """The plan with the decision that its figures are of: this one, unless it is stale."""
        return self if self.counted in (None, self.decision) else replace(self, decision=self.counted)

    def _basis(self) -> str:
        given, said, where = self.input, self.alternatives, self.provenance
        asked = () if given is None else (given.digest, given.cluster_text, given.options, given.pins, given.runtimes)
        counted = self.costs, self.predicted, self.work, self.run, said, self.layout_alternatives
        origin = (
            where.captured_from, where.cluster, where.device_memory_bytes, where.peak_flops_per_s, where.left_out,
            where.headroom,
        )  # fmt: skip
        figures = self.model.digest, self.unsplit, self.not_in_fp8, *map(_plain, (*counted, *origin))
        return hashlib.sha256(repr((self.counted, *figures, *asked)).encode()).hexdigest()[:16]

    # What runtimes ask -------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The axes over the ranks, in the decision's placement order."""
        return self.decision.mesh

    @property
    def stages(self) -> int:
        return self.decision.stages

    @property
    def microbatches(self) -> int:
        return self.decision.microbatches

    @property
    def stage_units(self) -> tuple[range, ...]:
        """The units of every stage."""
        starts = self.decision.stage_starts
        ends = (*starts[1:], len(self.model.unit_classes))
        return tuple(range(a, b) for a, b in zip(starts, ends, strict=True))

    @property
    def unit_modes(self) -> tuple[Mode, ...]:
        """The treatment of each unit's activations."""
        decision, recomputable = self.decision, recomputable_units(self.model.unit_classes)
        other = decision.other_recompute, decision.other_units
        kept, away = decision.kept_units, decision.offloaded_units
        return tuple(modes_of(decision.recompute, recomputable, kept, away, other))

    @property
    def recomputed_units(self) -> tuple[int, ...]:
        """The units that are recomputed whole: under full recompute those that may be (`recomputable_units`), except
        units that keep or offload their activations."""
        return tuple(unit for unit, mode in enumerate(self.unit_modes) if mode == "full")

    def is_pinned(self, name: str) -> bool:
        """Whether the user gave this part of the decision, rather than leaving it to the search."""
        return any(pin.startswith(f"{name}=") for pin in self.provenance.pinned)

    def build_schedule(self) -> Schedule:
        """The table of actions. Raises ScheduleError when the schedule does not admit the sizes."""
        knows = len(self.costs.slices) == self.decision.slice_count
        return self.decision.build_schedule(self.pass_costs() if knows else self.stage_costs())

    def pass_costs(self) -> PassCosts:
        """The seconds and bytes of every stage for one microbatch; where its sequences run in slices, of each slice."""
        whole = self.stage_costs()
        if self.decision.slice_count == 1:
            return whole
        if len(self.costs.slices) != self.decision.slice_count:
            raise PlanError(
                f"costs are counted for {max(1, len(self.costs.slices))} slices, and the plan was edited to have "
                f"{self.decision.slice_count}: count them anew with shardwright rescore"
            )
        return tuple(
            replace(
                whole,
                **{field.name: getattr(own, field.name) for field in fields(own)},
                freed_by_input_grad_bytes=None,
            )
            for own in self.costs.slices
        )

    def stage_costs(self) -> StageCosts:
        """The seconds and bytes of every stage for one microbatch of whole sequences, from the folded costs."""
        forward, input_grad, weight_grad, transfer, kept = [], [], [], [], []
        waits = self.costs.waits_s if len(self.costs.waits_s) == self.stages else ((0.0, 0.0),) * self.stages
        for stage, (units, rank) in enumerate(zip(self.stage_units, self.decision.stage_ranks, strict=True)):
            costs = self.costs.on_rank(rank)
            held = [costs.classes[costs.unit_classes[unit]] for unit in units]
            swapped = sum(c.swapped_s for c in held)
            weights = sum(c.weight_grad_s for c in held)
            ahead, behind = waits[stage]
            forward.append(max(sum(c.forward_s for c in held), swapped) + ahead)
            input_grad.append(max(sum(c.input_grad_s for c in held), swapped - weights) + behind)
            weight_grad.append(weights)
            kept.append(sum(c.activation_bytes for c in held))
            if stage:
                transfer.append(costs.boundary_s[units[0]])
        return StageCosts(
            tuple(forward),
            tuple(input_grad),
            tuple(weight_grad),
            tuple(transfer),
            tuple(kept),
            idle_lent=self.costs.idle_lent,
            sender_waits=not self.costs.execution.sends,
        )

    def binding(self, framework: str) -> Binding:
        """The framework's names. Raises PlanError when the plan is not bound to it."""
        bound = dict(self.bindings)
        if framework not in bound:
            raise PlanError(
                f"this plan is bound to {', '.join(bound)}, not to {framework}: capture the model in {framework} and "
                f"call plan.rebind(graph)"
            )
        return bound[framework]

    def stage_calls(self, framework: str) -> tuple[tuple[CallRef, ...], ...]:
        """The outermost module calls that are wholly in the units of each stage, in order."""
        units = self.binding(framework).units
        return tuple(tuple(call for u in held for call in units[u].calls) for held in self.stage_units)

    def parameter_stages(self, framework: str) -> dict[str, tuple[int, ...]]:
        """The stages that use each parameter, by its first name."""
        units = self.binding(framework).units
        found: dict[str, dict[int, None]] = {}
        for stage, held in enumerate(self.stage_units):
            for unit in held:
                for _, name, _ in units[unit].parameters:
                    found.setdefault(name, {})[stage] = None
        return {name: tuple(stages) for name, stages in found.items()}

    def parameter_layouts(self, framework: str) -> dict[str, Layout]:
        """The layout of each parameter, by its first name, in the framework's own dims. Raises PlanError for a tied
        parameter whose slots differ in layout."""
        decided = dict(self.decision.layouts)
        found: dict[str, tuple[str, Layout]] = {}
        for unit, bound in enumerate(self.binding(framework).units):
            fold_class = self.model.unit_classes[unit]
            for role, name, dims in bound.parameters:
                layout = layout_of(decided, unit, fold_class, role)
                slot = f"@{unit}/{role}" if f"@{unit}/{role}" in decided else f"{fold_class}/{role}"
                own = in_own_dims(layout, dims)
                first, before = found.setdefault(name, (slot, own))
                if before != own:
                    raise PlanError(
                        f"tied parameter {name} has two layouts: slot {first} puts it at {before} in its own dims, "
                        f"slot {slot} at {own}: it is one array, so write {in_slot_dims(before, dims)} for {slot}, or "
                        f"change {first}"
                    )
        return {name: layout for name, (_, layout) in found.items()}

    def _stacks(self) -> set[str]:
        """The slots that are several matrices in one array, in some framework: a row of it for each unit."""
        return {
            f"{c}/{role}"
            for _, bound in self.bindings
            for unit, c in zip(bound.units, self.model.unit_classes, strict=True)
            for role, _, dims in unit.parameters
            if len(dims) == 1 and len(dims[0]) == 3
        }

    def fp8_parameters(self, framework: str) -> frozenset[str]:
        """The first names of the weights whose products are computed in fp8."""
        units = zip(self.binding(framework).units, self.model.unit_classes, strict=True)
        slots = set(self.decision.fp8_weights)
        return frozenset(name for unit, c in units for role, name, _ in unit.parameters if f"{c}/{role}" in slots)

    def require_model(self, framework: str, names: tuple[str, ...], model_name: str) -> None:
        """Raise PlanError, naming the parameters that differ, unless ``names`` are the plan's."""
        require_names(self.binding(framework), names, model_name)

    def require_world(self, world_size: int) -> None:
        """Raise PlanError unless ``world_size`` is the number of the plan's ranks."""
        if world_size != self.mesh.size:
            d = self.decision
            raise PlanError(
                f"the plan is for {self.mesh.size} ranks (pp {d.pp} × dp {d.dp} × tp {d.tp}), and {world_size} are "
                f"running: start {self.mesh.size} of them, or plan for {world_size}"
            )

    # What users ask ----------------------------------------------------------------------------------------------

    def rebind(self, graph: Graph) -> "Plan":
        """This plan with the names of another capture of the same model, perhaps in the other framework, and with the
        program of its ops on the tensor axis.

        Raises PlanError that names the first difference when the structures do not match, MissingCapabilityError for
        products in fp8 that the framework's runtime does not compute.
        """
        graph.capabilities.require_precision(self.decision.precision)
        graph = graph.for_precision(self.decision.precision)
        folded = fold(graph)
        structure, binding = structure_of(folded)
        difference = self.model.difference(structure)
        if difference is not None:
            raise PlanError(
                f"this plan is for {self.model_name}, which {graph.model_name} in {graph.framework} does not match: "
                f"{difference} (plan against model)"
            )
        if self.decision.fp8_weights:
            require_fp8(self.decision.fp8_weights, folded, structure)
        name, programs = graph.framework, dict(self.programs)
        if self.decision.tp > 1:
            programs[name] = program_for(graph, structure, self.decision, self.costs.rates)
        bindings = dict(self.bindings) | {name: binding}
        return replace(self, bindings=tuple(sorted(bindings.items())), programs=tuple(sorted(programs.items())))

    def save(self, path: str | Path) -> None:
        """Write the plan file (JSON), completely or not at all. Raises PlanFileError when it cannot be written."""
        file.write(self, path_of(path, PlanFileError))

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan file. Raises PlanFileError with the path inside the file of the first error."""
        at = path_of(path, PlanFileError)
        return cls.from_text(read_text(at, PlanFileError, "plan file"), str(at))

    @classmethod
    def from_text(cls, text: str, source: str = "plan") -> "Plan":
        """The plan in the text of a plan file; ``source`` names it in errors."""
        plan = _from_text(text, source, cls)
        if (note := stale_note(plan)) is not None:
            warnings.warn(f"{source}: {note}", PlanWarning, stacklevel=3)
        return plan

    @property
    def throughput(self) -> Throughput:
        """Samples, tokens and FLOPs per second by the predicted step, and MFU."""
        return throughput(
            self.work,
            (self.counted or self.decision).batch,
            self.predicted.step_time_s,
            self.mesh.size,
            dict(self.provenance.peak_flops_per_s),
        )

    @property
    def training(self) -> Training | None:
        """The length and the price of the training that the plan is for; None where its length was not said."""
        counted = self.counted or self.decision
        return self.run.taking(self.predicted.step_time_s, counted.batch, self.work.tokens)

    def summary(self) -> str:
        """The degrees in one line."""
        return summarize(self.decision)

    def __repr__(self) -> str:
        predicted, where = self.predicted, self.provenance
        uses = zip(predicted.memory_by_stage_rank, where.device_memory_bytes, strict=True)
        fullest, limit = max(((use.total_bytes, limit) for use, limit in uses), key=lambda pair: pair[0] / pair[1])
        return (
            f"<Plan of {self.model_name} on {where.cluster}: {self.summary()}; {'before an edit ' * self.is_stale}step "
            f"{seconds_text(predicted.step_time_s)}, at most {bytes_text(fullest)} of a device's {bytes_text(limit)}>"
        )


RESCORE = "`shardwright rescore PLAN.json -o NEW.json` or shardwright.rescore(plan)"
"""The fix for a plan whose figures are those of another decision."""


def stale_note(plan: Plan) -> str | None:
    """The note beside the figures of an edited plan: which are old, by which edits, and what counts them anew. None for
    a plan whose figures are its own."""
    if not plan.is_stale:
        return None
    if plan.counted in (None, plan.decision):
        return (
            f"step time, memory, costs, throughput and alternatives do not belong together: some of them were edited, "
            f"or the devices or the model that they were counted for: count them anew with {RESCORE}"
        )
    what = ", ".join(edits(plan.counted, plan.decision))
    return (
        f"step time, memory, costs, throughput and alternatives are old: they were counted for another decision than "
        f"this one, which was edited since ({what}): count them anew with {RESCORE}"
    )


PlanT = TypeVar("PlanT", bound=Plan)


def load_to_rescore(path: Path) -> Plan:
    """The plan of a file, for counting it anew: as `Plan.load`, without its warning about an edited plan."""
    return _from_text(read_text(path, PlanFileError, "plan file"), str(path), Plan)


def _from_text(text: str, source: str, kind: type[PlanT]) -> PlanT:
    plan = file.from_text(text, source, kind)
    try:
        _ = plan.as_counted
    except ShardwrightError as error:
        raise PlanFileError(f"{source}: predicted.decision: {error}") from error
    return plan


def edits(before: Decision, after: Decision) -> tuple[str, ...]:
    """The differences between two decisions in words, such as ``microbatch 1 → 2``."""
    found = []
    for field in fields(Decision):
        one, other = getattr(before, field.name), getattr(after, field.name)
        if field.name == "layouts":
            mine, theirs = dict(one), dict(other)
            slots = [slot for slot in sorted(mine.keys() | theirs.keys()) if mine.get(slot) != theirs.get(slot)]
            found += [f"layout of {slot} {mine.get(slot, 'whole')} → {theirs.get(slot, 'whole')}" for slot in slots]
        elif one != other:
            found.append(f"{field.name} {_shown(one)} → {_shown(other)}")
    return tuple(found)


def _shown(value: object) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def require_slot_layout(slot: str, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> None:
    """Raise PlanError for a layout that no parameter can have: parameters are split, and only on the tensor axis.
    Raise LayoutError for one that a slot of this shape cannot have on the mesh. Both name the slot."""
    for axis, placement in layout.placements:
        if axis in ("pp", "dp"):
            raise PlanError(
                f"layout {layout} of {slot} lies on axis {axis!r}: parameters are laid out on 'tp'; stages are cut by "
                f"stage_starts, and what replicas share is said by shard"
            )
        if not isinstance(placement, Split):
            raise PlanError(f"layout {layout} of {slot}: a parameter is split or whole, not partial")
    try:
        layout.check(shape, mesh)
    except ShardwrightError as error:
        raise LayoutError(f"layout {layout} of {slot}: {error}") from error


def _plain(value: object) -> object:
    """The value with dataclasses as tuples and numbers as floats, so that a value read back from a file is the same."""
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(_plain(getattr(value, name)) for name in value.__dataclass_fields__)
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, int | float) else value
