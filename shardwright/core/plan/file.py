"""The plan file: JSON with a version and a schema. It is data only: it is parsed and validated, never executed."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError

from shardwright.core.errors import PlanError, PlanFileError, ShardwrightError
from shardwright.core.model.graph import OpKind
from shardwright.core.model.structure import Binding, Structure
from shardwright.core.plan.record import PlanRecord
from shardwright.core.plan.schema import VERSION, PlanDocument, PlanT
from shardwright.core.plan.sections import from_section, section_of, to_section
from shardwright.core.values.text_files import write_text

FORMAT = "shardwright-plan"
MOST_VALUES = 2_000_000
"""The most values of a plan file. Models with tens of thousands of parameters, in both frameworks, have fewer."""
ROW_LETTERS = 110
"""The most letters of a list that stands on one line of the input's tables."""


def write(plan: PlanRecord, path: Path) -> None:
    """Write a plan. Keys are in a fixed order and every unit has lines of its own, so that two plans diff well.

    Raises PlanFileError when the file cannot be written; an existing file is then left as it was.
    """
    write_text(path, to_text(plan), PlanFileError)


def to_text(plan: PlanRecord) -> str:
    """The text of a plan file. The tables of its input, which nobody edits, have a row of numbers on a line."""
    document = to_document(plan)
    told = json.dumps({**document, "input": None}, indent=1, ensure_ascii=False)
    return told.removesuffix("null\n}") + _in_rows(document["input"], " ") + "\n}\n"


def _in_rows(value: Any, indent: str) -> str:
    """The text of JSON values, with lists that fit on a line on one."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or (isinstance(value, list) and len(flat) <= ROW_LETTERS):
        return flat
    if isinstance(value, dict):
        inside = [
            f"{json.dumps(key, ensure_ascii=False)}: {_in_rows(held, indent + ' ')}" for key, held in value.items()
        ]
    else:
        inside = [_in_rows(held, indent + " ") for held in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{indent} " + f",\n{indent} ".join(inside) + f"\n{indent}{closing}"


def to_document(plan: PlanRecord) -> dict[str, Any]:
    """The plan as plain JSON values."""
    document: dict[str, Any] = to_section(PlanDocument.of(plan))
    return document


def from_text(text: str, source: str, kind: type[PlanT]) -> PlanT:
    """The plan in the text of a plan file, of a class of plans; ``source`` names it in errors.

    Raises PlanFileError with the path inside the file of the first thing that is wrong.
    """
    document = json_of(text, source)
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
    if "input" not in document:
        raise PlanFileError(
            f"{source}: input: the file lacks the captured graph and the devices, from which an edited plan is counted "
            f"anew: plan again, or restore the section"
        )
    del document
    try:
        section = section_of(PlanDocument).model_validate_json(text)
    except ValidationError as error:
        raise PlanFileError(f"{source}: {problem_of(error)}") from error
    try:
        parsed = _parsed(section)
        _require_consistent(parsed)
        return parsed.plan(kind)
    except ShardwrightError as error:
        raise PlanFileError(f"{source}: {error}") from error


def _parsed(section: Any) -> PlanDocument:
    """The document of a section. Raises PlanFileError that names the key whose values conflict."""
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(PlanDocument, include_extras=True).items():
        try:
            values[name] = from_section(getattr(section, name), hint)
        except ShardwrightError as error:
            raise PlanFileError(f"{name}: {error}") from error
    return PlanDocument(**values)


def json_of(text: str, source: str) -> Any:
    """The values of a JSON text. Raises PlanFileError for a text that is not JSON, or is too large to be a plan."""
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
    """A JSON object. Raises ValueError for a key that it has twice, because readers differ in which one they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def problem_of(error: ValidationError) -> str:
    """The first problem of a file's values: where, what, and what was given."""
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"])
    given = first["input"]
    shown = f"{given[:80]!r}" if isinstance(given, str) else repr(given)[:80]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where}: {first['msg']}; given {shown}{more}"


def _require_consistent(file: PlanDocument) -> None:
    """Raise PlanFileError for errors that a schema cannot show: lengths and indices that must agree across sections."""
    structure, bindings, counted = file.structure, dict(file.bindings), file.predicted.decision
    units = len(structure.unit_classes)
    checks = [
        (units > 0, "model.unit_classes: expected at least one unit"),
        (file.predicted.step_time_s > 0, "predicted.step_time_s: 0 seconds, and rates are of a step that takes time"),
        (
            all(c < len(file.model.classes) for c in file.model.unit_classes),
            f"model.unit_classes: names a class that the {len(file.model.classes)} in model.classes lack",
        ),
        (
            all(c < len(file.costs.classes) for c in file.costs.unit_classes),
            f"costs.unit_classes: names a class that the {len(file.costs.classes)} in costs.classes lack",
        ),
        *((name in bindings, f"programs: {name!r} is not among the bindings") for name, _ in file.programs),
        *(
            (entries == units, f"{where}: {entries} entries, expected one per unit, {units}")
            for where, entries in (
                ("costs.unit_classes", len(file.costs.unit_classes)),
                ("costs.boundary_bytes", len(file.costs.boundary_bytes)),
                ("costs.boundary_s", len(file.costs.boundary_s)),
                *((f"bindings.{name}.units", len(binding.units)) for name, binding in bindings.items()),
                *((f"programs.{name}.units", len(program.units)) for name, program in file.programs),
            )
        ),
        (
            all(
                len(own.boundary_s) == units and len(own.classes) == len(file.costs.classes) for own in file.costs.ranks
            ),
            f"costs.ranks: expected {len(file.costs.classes)} classes and {units} boundary_s for each rank",
        ),
        (
            len(file.costs.ranks) in (0, counted.pp),
            f"costs.ranks: {len(file.costs.ranks)} entries, expected none or one per pipeline rank, {counted.pp}",
        ),
        (
            len(file.predicted.memory_by_stage_rank) == counted.pp,
            f"predicted.memory_by_stage_rank: {len(file.predicted.memory_by_stage_rank)} entries, expected one per "
            f"pipeline rank of predicted.decision, {counted.pp}",
        ),
        (
            file.input.cluster.world_size == file.provenance.world_size,
            f"input.cluster: {file.input.cluster} has {file.input.cluster.world_size} devices, and "
            f"provenance.world_size is {file.provenance.world_size}",
        ),
        (
            len(file.provenance.device_memory_bytes) == file.predicted.decision.pp,
            f"provenance.device_memory_bytes: {len(file.provenance.device_memory_bytes)} entries, expected one per "
            f"pipeline rank of predicted.decision, {file.predicted.decision.pp}",
        ),
    ]
    for holds, message in checks:
        if not holds:
            raise PlanFileError(message)
    try:
        file.input.require_intact()
    except PlanError as error:
        raise PlanFileError(f"input.{error}") from error
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
    for name, binding in bindings.items():
        _require_bound(name, binding, structure)
    said = file.alternatives
    products = {f"{number}/{kind}" for number in range(len(file.model.classes)) for kind in get_args(OpKind)}
    for slot in (*sorted(set(dict(said.unsplit)) - products), *dict(said.not_in_fp8), *dict(said.layouts)):
        if slot not in structure.slot_shapes:
            raise PlanFileError(f"alternatives: name slot {slot!r}, which the model lacks")


def _require_bound(name: str, binding: Binding, structure: Structure) -> None:
    """Raise PlanFileError unless a binding names each slot of the structure, with the dims that make it up, and gives
    tied slots one name."""
    slots: dict[str, list[str]] = {}
    for unit, bound in enumerate(binding.units):
        where = f"bindings.{name}.units.{unit}.parameters"
        shapes = dict(structure.class_slots[structure.unit_classes[unit]])
        roles = {role for role, _, _ in bound.parameters}
        if roles != set(shapes):
            raise PlanFileError(f"{where}: names {sorted(roles)}, expected {sorted(shapes)}")
        for role, parameter, dims in bound.parameters:
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
