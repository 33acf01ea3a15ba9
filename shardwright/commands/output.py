"""What every command prints with: people read tables, programs read JSON, and errors are one message."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from shardwright.core.errors import ShardwrightError

USER_ERROR = 2
"""Exit code when what was given is wrong."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file.", show_default=False)]


def print_json(document: Any) -> None:
    """The only thing on stdout under --json."""
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False))


def print_view(*views: RenderableType) -> None:
    """Tables and lines for people. Lines are left whole, so that a long path can be copied."""
    console = Console(highlight=False)
    for view in views:
        if isinstance(view, str):
            console.print(Text(view), soft_wrap=True)
        else:
            console.print(view)


def view_width() -> int:
    """How many letters a line of a drawing may have."""
    return min(Console().width, 120)


def print_error(message: str, kind: str, as_json: bool) -> None:
    """One message on stderr, or ``{"error": …}`` on stdout, where whoever asked for JSON reads."""
    if as_json:
        print_json({"error": {"kind": kind, "message": message}})
    else:
        line = Text("error: ", style="bold red").append(message, style="not bold default")
        Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def require_folder(path: Path | None) -> None:
    """Raise ShardwrightError unless a file can be written there: asked before the work, not after it."""
    if path is not None and not path.parent.is_dir():
        raise ShardwrightError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    if path is not None and path.is_dir():
        raise ShardwrightError(f"{path} cannot be written: it is a folder; name a file in it")
