"""The plan file: JSON with a version and a schema. Data only: it is parsed and validated, never executed."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardwright.core.errors import PlanFileError, ShardwrightError
from shardwright.core.layout.placements import Layout, Partial, Placement, Split
from shardwright.core.model.fold import CallRef
from shardwright.core.model.structure import Binding, Structure, UnitBinding
from shardwright.core.plan import record
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.record import ClassCost, Costs, PlanRecord, Predicted, Provenance, RankCosts
from shardwright.core.plan.schema import FORMAT, VERSION, BindingFile, DecisionFile, PlacementFile, PlanFile, Section
from shardwright.core.solver import Alternative
from shardwright.core.solver.op_layouts import Rates
from shardwright.core.tables.memory import MemoryUse
from shardwright.core.text_files import write_text

MOST_VALUES = 2_000_000
"""Of a plan file: those of models with tens of thousands of parameters, in both frameworks, have fewer."""


def write(plan: PlanRecord, path: Path) -> None:
    """Write a plan. Keys stand in a fixed order and every unit on lines of its own, so that two plans diff well.

    Raises PlanFileError when the file cannot be written; what stood there before is left as it was."""
    write_text(path, to_text(plan), PlanFileError)


def to_text(plan: PlanRecord) -> str:
    """The text of a plan file."""
    return json.dumps(to_document(plan), indent=1, ensure_ascii=False) + "\n"


def to_document(plan: PlanRecord) -> dict[str, Any]:
    """The plan as plain JSON values."""
    d = plan.decision
    return {
        "format": FORMAT,
        "version": VERSION,
        "decision": {
            "pp": d.pp,
            "dp": d.dp,
            "tp": d.tp,
            "batch": d.batch,
            "microbatch": d.microbatch,
            "schedule": d.schedule,
            "virtual_stages": d.virtual_stages,
            "recompute": d.recompute,
            "kept_units": list(d.kept_units),
            "offloaded_units": list(d.offloaded_units),
            "shard": d.shard,
            "shard_group": d.shard_group,
            "precision": d.precision,
            "optimizer": d.optimizer,
            "loss_scope": d.loss_scope,
            "sequence_parallel": d.sequence_parallel,
            "gradient_precision": d.gradient_precision,
            "placement_order": d.placement_order,
            "generated": list(d.generated),
            "stage_starts": list(d.stage_starts),
            "layouts": {
                slot: {axis: _placement_out(placement) for axis, placement in layout.placements}
                for slot, layout in d.layouts
            },
        },
        "model": {
            "name": plan.model_name,
            "digest": plan.model.digest,
            "parameter_count": plan.model.parameter_count,
            "unit_classes": list(plan.model.unit_classes),
            "classes": [{role: list(shape) for role, shape in slots} for slots in plan.model.class_slots],
            "ties": [list(tie) for tie in plan.model.ties],
        },
        "bindings": {
            name: {
                "units": [
                    {
                        "calls": [[call.path, call.occurrence] for call in unit.calls],
                        "parameters": {
                            role: [own, [[list(d) for d in group] for group in dims]]
                            for role, own, dims in unit.parameters
                        },
                    }
                    for unit in binding.units
                ],
                "aliases": [list(names) for names in binding.aliases],
                "unused": list(binding.unused),
            }
            for name, binding in plan.bindings
        },
        "costs": {
            "unit_classes": list(plan.costs.unit_classes),
            "classes": [_fields(c) for c in plan.costs.classes],
            "boundary_bytes": list(plan.costs.boundary_bytes),
            "boundary_s": list(plan.costs.boundary_s),
            "rates": _fields(plan.costs.rates),
            "ranks": [
                {"classes": [_fields(c) for c in own.classes], "boundary_s": list(own.boundary_s)}
                for own in plan.costs.ranks
            ],
            "idle_lent": plan.costs.idle_lent,
        },
        "predicted": {
            "step_time_s": plan.predicted.step_time_s,
            "pipeline_s": plan.predicted.pipeline_s,
            "bubble_fraction": plan.predicted.bubble_fraction,
            "tensor_collective_s": plan.predicted.tensor_collective_s,
            "data_parallel_s": plan.predicted.data_parallel_s,
            "optimizer_s": plan.predicted.optimizer_s,
            "counted_for": plan.counted_for,
            "memory_by_stage_rank": [_fields(use) for use in plan.predicted.memory_by_stage_rank],
        },
        "alternatives": {
            "plans": [_fields(a) for a in plan.alternatives],
            "unsplit": dict(plan.unsplit),
            "layouts": {
                slot: [
                    {"layout": _layout_out(a.layout), "extra_s": a.extra_s, "extra_bytes": a.extra_bytes}
                    for a in others
                ]
                for slot, others in plan.layout_alternatives
            },
        },
        "provenance": {
            "shardwright": plan.provenance.shardwright,
            "captured_from": plan.provenance.captured_from,
            "cluster": plan.provenance.cluster,
            "world_size": plan.provenance.world_size,
            "device_memory_bytes": plan.provenance.device_memory_bytes,
            "pinned": list(plan.provenance.pinned),
            "left_out": plan.provenance.left_out,
        },
    }


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _layout_out(layout: Layout) -> dict[str, Any]:
    return {axis: _placement_out(placement) for axis, placement in layout.placements}


def _placement_out(placement: Placement) -> dict[str, Any]:
    if isinstance(placement, Split):
        return {"split": placement.dim} | ({"blocks": list(placement.blocks)} if placement.blocks else {})
    return {"partial": placement.op} if isinstance(placement, Partial) else {}


def from_text(text: str, source: str) -> PlanRecord:
    """The record in the text of a plan file; ``source`` names it in errors.

    Raises PlanFileError with the path inside the file of the first thing that is wrong."""
    document = _document(text, source)
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        raise PlanFileError(f"{source}: not a plan file: expected format: {FORMAT!r} at the top")
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise PlanFileError(f"{source}: version is {version!r}: expected a whole number, {VERSION}")
    if version != VERSION:
        age = "newer" if version > VERSION else "older"
        raise PlanFileError(
            f"{source}: version {version} is {age} than this Shardwright reads ({VERSION}): "
            f"{'upgrade Shardwright' if version > VERSION else 'plan again'}"
        )
    del document
    try:
        parsed = PlanFile.model_validate_json(text)
    except ValidationError as error:
        raise PlanFileError(f"{source}: {_first_problem(error)}") from error
    try:
        return _record(parsed)
    except ShardwrightError as error:
        raise PlanFileError(f"{source}: {error}") from error


def _document(text: str, source: str) -> Any:
    """The values of a JSON text. Raises PlanFileError for what is no JSON, or too large to be a plan."""
    if text.count(",") > MOST_VALUES:
        raise PlanFileError(f"{source}: more than {MOST_VALUES} values, and no plan has so many: is it another file?")
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise PlanFileError(f"{source}: not JSON at {where}: {error.msg}") from error
    except RecursionError as error:
        raise PlanFileError(f"{source}: not a plan file: its values are nested too deeply") from error
    except ValueError as error:
        raise PlanFileError(f"{source}: not a plan file: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a key that it has twice, of which readers take one or the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _first_problem(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"])
    given = first["input"]
    shown = f"{given[:80]!r}" if isinstance(given, str) else repr(given)[:80]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where}: {first['msg']}; given {shown}{more}"


def _record(file: PlanFile) -> PlanRecord:
    structure = Structure(
        tuple(file.model.unit_classes),
        tuple(tuple((role, tuple(shape)) for role, shape in slots.items()) for slots in file.model.classes),
        tuple(tuple(tie) for tie in file.model.ties),
    )
    decision = _decision_in(file.decision)
    _require_consistent(file, structure)
    return PlanRecord(
        decision=decision,
        model_name=file.model.name,
        model=structure,
        bindings=tuple((name, _binding_in(binding)) for name, binding in file.bindings.items()),
        costs=Costs(
            tuple(file.costs.unit_classes),
            tuple(ClassCost(**_fields_of(c)) for c in file.costs.classes),
            tuple(file.costs.boundary_bytes),
            tuple(file.costs.boundary_s),
            Rates(**_fields_of(file.costs.rates)),
            tuple(
                RankCosts(tuple(ClassCost(**_fields_of(c)) for c in own.classes), tuple(own.boundary_s))
                for own in file.costs.ranks
            ),
            file.costs.idle_lent,
        ),
        predicted=Predicted(
            step_time_s=file.predicted.step_time_s,
            pipeline_s=file.predicted.pipeline_s,
            bubble_fraction=file.predicted.bubble_fraction,
            tensor_collective_s=file.predicted.tensor_collective_s,
            data_parallel_s=file.predicted.data_parallel_s,
            optimizer_s=file.predicted.optimizer_s,
            memory_by_stage_rank=tuple(MemoryUse(**_fields_of(m)) for m in file.predicted.memory_by_stage_rank),
            mesh=decision.mesh,
        ),
        alternatives=tuple(record.Alternative(**_fields_of(a)) for a in file.alternatives.plans),
        unsplit=tuple(file.alternatives.unsplit.items()),
        layout_alternatives=tuple(
            (slot, tuple(Alternative(_layout_in(slot, a.layout), a.extra_s, a.extra_bytes) for a in others))
            for slot, others in file.alternatives.layouts.items()
        ),
        provenance=Provenance(**(_fields_of(file.provenance) | {"pinned": tuple(file.provenance.pinned)})),
        counted_for=file.predicted.counted_for,
    )


def _decision_in(d: DecisionFile) -> Decision:
    try:
        return Decision(
            pp=d.pp,
            dp=d.dp,
            tp=d.tp,
            batch=d.batch,
            microbatch=d.microbatch,
            schedule=d.schedule,
            stage_starts=tuple(d.stage_starts),
            layouts=tuple((slot, _layout_in(slot, placements)) for slot, placements in d.layouts.items()),
            virtual_stages=d.virtual_stages,
            recompute=d.recompute,
            kept_units=tuple(d.kept_units),
            offloaded_units=tuple(d.offloaded_units),
            shard=d.shard,
            shard_group=d.shard_group,
            precision=d.precision,
            optimizer=d.optimizer,
            loss_scope=d.loss_scope,
            sequence_parallel=d.sequence_parallel,
            gradient_precision=d.gradient_precision,
            placement_order=d.placement_order,
            generated=tuple(d.generated),
        )
    except ShardwrightError as error:
        raise PlanFileError(f"decision: {error}") from error


def _fields_of(section: Section) -> dict[str, Any]:
    return {name: getattr(section, name) for name in type(section).model_fields}


def _layout_in(slot: str, placements: Mapping[str, PlacementFile]) -> Layout:
    found: dict[str, Placement] = {}
    for axis, placement in placements.items():
        if placement.split is not None:
            found[axis] = Split(placement.split, tuple(placement.blocks or ()))
        elif placement.partial is not None:
            found[axis] = Partial(placement.partial)
        else:
            raise PlanFileError(f"decision.layouts.{slot}.{axis}: expected split or partial")
    return Layout.of(found)


def _binding_in(binding: BindingFile) -> Binding:
    return Binding(
        tuple(
            UnitBinding(
                tuple(CallRef(path, occurrence) for path, occurrence in unit.calls),
                tuple((role, name, tuple(map(tuple, dims))) for role, (name, dims) in unit.parameters.items()),
            )
            for unit in binding.units
        ),
        tuple(tuple(names) for names in binding.aliases),
        tuple(binding.unused),
    )


def _require_consistent(file: PlanFile, structure: Structure) -> None:
    """What pydantic cannot see: lengths and indices that must agree across sections."""
    units = len(structure.unit_classes)
    checks = [
        (units > 0, "model.unit_classes: expected at least one unit"),
        (
            all(c < len(file.model.classes) for c in file.model.unit_classes),
            f"model.unit_classes: names a class that the {len(file.model.classes)} in model.classes lack",
        ),
        (
            all(c < len(file.costs.classes) for c in file.costs.unit_classes),
            f"costs.unit_classes: names a class that the {len(file.costs.classes)} in costs.classes lack",
        ),
        *(
            (entries == units, f"{where}: {entries} entries, expected one per unit, {units}")
            for where, entries in (
                ("costs.unit_classes", len(file.costs.unit_classes)),
                ("costs.boundary_bytes", len(file.costs.boundary_bytes)),
                ("costs.boundary_s", len(file.costs.boundary_s)),
                *((f"bindings.{name}.units", len(binding.units)) for name, binding in file.bindings.items()),
            )
        ),
        (
            all(
                len(own.boundary_s) == units and len(own.classes) == len(file.costs.classes) for own in file.costs.ranks
            ),
            f"costs.ranks: expected {len(file.costs.classes)} classes and {units} boundary_s for each rank",
        ),
        (
            len(file.costs.ranks) in (0, file.decision.pp),
            f"costs.ranks: {len(file.costs.ranks)} entries, expected none or one per pipeline rank, {file.decision.pp}",
        ),
        (
            len(file.predicted.memory_by_stage_rank) == file.decision.pp,
            f"predicted.memory_by_stage_rank: {len(file.predicted.memory_by_stage_rank)} entries, expected one per "
            f"pipeline rank, {file.decision.pp}",
        ),
    ]
    for holds, message in checks:
        if not holds:
            raise PlanFileError(message)
    if structure.digest != file.model.digest:
        raise PlanFileError(
            f"model.digest: {file.model.digest!r} does not belong to this model section ({structure.digest!r}): the "
            f"section was edited; plan again, or restore it"
        )
    if structure.parameter_count != file.model.parameter_count:
        raise PlanFileError(
            f"model.parameter_count: {file.model.parameter_count}, and the slots in model.classes have "
            f"{structure.parameter_count}"
        )
    for name, binding in file.bindings.items():
        _require_bound(name, binding, structure)
    for slot in (*file.alternatives.unsplit, *file.alternatives.layouts):
        if slot not in structure.slot_shapes:
            raise PlanFileError(f"alternatives: name slot {slot!r}, which the model lacks")


def _require_bound(name: str, binding: BindingFile, structure: Structure) -> None:
    """Raise PlanFileError unless a binding names each slot of the structure, with dims that make it up, and names alike
    what is tied."""
    slots: dict[str, list[str]] = {}
    for unit, bound in enumerate(binding.units):
        where = f"bindings.{name}.units.{unit}.parameters"
        shapes = dict(structure.class_slots[structure.unit_classes[unit]])
        if set(bound.parameters) != set(shapes):
            raise PlanFileError(f"{where}: names {sorted(bound.parameters)}, expected {sorted(shapes)}")
        for role, (parameter, dims) in bound.parameters.items():
            slots.setdefault(parameter, []).append(f"{unit}/{role}")
            sizes = tuple(math.prod(size for _, size in group) for group in dims)
            own = [dim for group in dims for dim, _ in group]
            if sizes != shapes[role] or len(set(own)) != len(own):
                raise PlanFileError(
                    f"{where}.{role}: the dims {dims} (dim, size) make up a slot of shape {sizes}: expected "
                    f"{shapes[role]}, each dim once"
                )
    ties = {frozenset(tie) for tie in structure.ties}
    alike = {frozenset(places) for places in slots.values() if len(places) > 1}
    if ties != alike:
        odd = sorted(map(sorted, ties ^ alike))[0]
        raise PlanFileError(
            f"bindings.{name}: slots {', '.join(odd)} are one parameter in model.ties or by their name, and not in both"
        )
    for number, names in enumerate(binding.aliases):
        if len(names) < 2 or len(set(names)) != len(names):
            raise PlanFileError(f"bindings.{name}.aliases.{number}: expected two names or more, given {names}")
