"""`shardwright rescore`: a plan file's figures, counted anew for its decision, edited or changed here."""

import json as json_text
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.commands.output import JsonOption, PlanArgument, print_json, print_view, require_folder
from shardwright.core.errors import ShardwrightError, nearest
from shardwright.core.layout.placements import Layout, placement_of
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.plan import load_to_rescore
from shardwright.core.search.rescore import rescore
from shardwright.core.solver.op_layouts import AXIS
from shardwright.core.values.fields import Field, fields_of

_SET = "NAME=VALUE"
_LAYOUT = "layouts."


def rescore_command(
    plan: PlanArgument,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar=_SET,
            help="A part of the decision to change, as microbatch=4, stage_starts=0,5,9, shard_group=null, or "
            "layouts.1/w0=S1 (R: whole); may be given several times.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to save the plan file; may be the same.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Count all figures of an edited plan anew, without its model: what `plan` says with this decision pinned."""
    require_folder(output)
    counted = rescore(load_to_rescore(plan), **read_changes(changes or ()))
    if output is not None:
        counted.save(output)
    if json:
        from shardwright.core.plan.file import to_document

        print_json(to_document(counted))
        return
    from shardwright.report.tables import plan_view

    saved = f"saved to {output}" if output is not None else "not saved: give -o plan.json to keep it"
    print_view(plan_view(counted), saved)


def read_changes(given: list[str] | tuple[()]) -> dict[str, Any]:
    """The changes that ``--set`` gives, by field of the decision. Raises ShardwrightError for a text that is none, for
    an unknown name (with the nearest), and for one that is given twice."""
    known = {field.name: field for field in fields_of(Decision)}
    found: dict[str, Any] = {}
    layouts: dict[str, Layout] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ShardwrightError(f"--set {text!r}: expected {_SET}, as microbatch=4")
        slot = name.removeprefix(_LAYOUT) if name.startswith(_LAYOUT) else None
        if name in found or slot in layouts:
            raise ShardwrightError(f"--set {name} is given twice: leave out one of them")
        if slot is not None:
            layouts[slot] = Layout.of({AXIS: placement_of(value)})
        elif name == "layouts":
            raise ShardwrightError(f"--set {text!r}: expected one slot at a time, as layouts.1/w0=S1")
        elif name not in known:
            raise ShardwrightError(f"--set {text!r}: no part of a decision is called so: {nearest(name, known)}")
        else:
            found[name] = _value(known[name], value)
    return found | ({"layouts": layouts} if layouts else {})


def _value(field: Field, text: str) -> Any:
    """The value of a field from text; what cannot be read stays text, which the field refuses."""
    if text == "null":
        return None
    if field.kind is tuple:
        parts = [part.strip() for part in text.strip("[]").split(",") if part.strip()]
        if not all(part.isdecimal() for part in parts):
            raise ShardwrightError(
                f"--set {field.name}={text}: expected whole numbers with commas between them, as 0,5,9"
            )
        return tuple(map(int, parts))
    if field.kind is bool and text in ("true", "false"):
        return text == "true"
    if field.kind is None:
        try:
            return json_text.loads(text)
        except ValueError:
            return text
    return int(text) if text.isascii() and text.isdecimal() else text
