"""The options of `plan()` on the command line: each as `Options` describes it, read from text."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer

from shardwright.core.errors import ShardwrightError
from shardwright.core.layout.placements import Layout, Split
from shardwright.core.search.options import Options
from shardwright.core.values.fields import Field, fields_of

_PANEL = "Decision"
_REQUIRED = "batch"
_LAYOUT = "PATTERN=DIM"


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter ``options`` is one command-line option for each of `plan()`, read and checked."""
    own = inspect.signature(command)
    asked = [field for field in fields_of(Options) if field.option is not None]
    defaults = {each.name: None if each.default is MISSING else each.default for each in fields(Options)}
    made = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.name == _REQUIRED else defaults[field.name],
            annotation=_annotation(field),
        )
        for field in asked
    ]

    def run(**given: Any) -> None:
        read = {field.name: _read(field, given.pop(field.name)) for field in asked}
        command(**given, options=Options(**read))

    hints = get_type_hints(command, include_extras=True)
    kept = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in own.parameters.items()
        if name != "options"
    ]
    first = [parameter for parameter in kept if parameter.default is inspect.Parameter.empty]
    rest = [parameter for parameter in kept if parameter.default is not inspect.Parameter.empty]
    parameters = [*first, *made, *rest]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = command.__doc__
    return run


def _annotation(field: Field) -> Any:
    assert field.option is not None
    flag = field.name.replace("_", "-")
    text = field.option.means[0].upper() + field.option.means[1:].replace("``", "").replace("`", "") + "."
    if field.option.without:
        text = f"{text[:-1]}; by default {field.option.without}."
    names: list[str] = [f"--{flag}"]
    kind: Any = str
    metavar = None
    match field.name:
        case "layouts":
            names, kind, metavar = ["--layout"], list[str], _LAYOUT
            text = (
                f"Parameters whose layout on the tensor axis is pinned: {_LAYOUT} splits dim DIM of the parameters "
                f"that the regular expression matches, as 'mlp.c_fc.weight=1'; PATTERN=whole keeps them whole. The "
                f"first that matches counts; may be given several times."
            )
        case "frameworks":
            names, kind = ["--framework"], list[str]
            text += " May be given twice."
        case _ if field.kind is tuple:
            text = text[:-1] + ", as 0,5,9."
        case _ if field.kind is bool:
            names, kind = [f"--{flag}/--no-{flag}"], bool
        case "tokens" | "price" | "budget" | "headroom" | "memory_weight":
            kind = float
        case _ if field.kind is int and field.words is None:
            kind = int
    option = typer.Option(*names, help=text, metavar=metavar, show_default=not field.optional, rich_help_panel=_PANEL)
    return Annotated[kind if field.name == _REQUIRED else kind | None, option]


def _read(field: Field, given: Any) -> Any:
    """The value of an option, from the command line's own."""
    if field.name == "layouts":
        return [_layout(text) for text in given or ()] or None
    if field.name == "frameworks":
        return given or None
    if field.kind is tuple and given is not None:
        return _units(field, given)
    return int(given) if field.kind is int and isinstance(given, str) and given.isdecimal() else given


def _units(field: Field, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        name = field.name.replace("_", "-")
        raise ShardwrightError(f"--{name} {text!r}: expected whole numbers with commas between them, as 0,5,9")
    return tuple(map(int, parts))


def _layout(text: str) -> tuple[str, Layout]:
    pattern, _, dim = text.rpartition("=")
    if not pattern or not (dim.isdecimal() or dim == "whole"):
        raise ShardwrightError(f"--layout {text!r}: expected {_LAYOUT}, as 'mlp.c_fc.weight=1', or PATTERN=whole")
    return pattern, Layout() if dim == "whole" else Layout.of(tp=Split(int(dim)))
