"""The output of every command: people read tables, programs read JSON, and errors are one message."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from shardwright.core.errors import ShardwrightError
from shardwright.core.values.text_files import UNPRINTABLE, visible

USER_ERROR = 2
"""The exit code when what was given is wrong."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file.", show_default=False)]


class PlainConsole(Console):
    """A terminal that is sent no escape codes but rich's own. Those in names and messages are written out."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def print_json(document: Any) -> None:
    """Print the only thing on stdout under --json."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    # JSON leaves some control characters as they are. All of these stand inside strings.
    typer.echo(UNPRINTABLE.sub(lambda found: f"\\u{ord(found.group()):04x}", text))


def print_view(*views: RenderableType) -> None:
    """Print tables and lines for people. Lines are left whole, so that a long path can be copied."""
    console = PlainConsole(highlight=False, markup=False)
    for view in views:
        if isinstance(view, str):
            console.print(Text(view), soft_wrap=True)
        else:
            console.print(view)


def view_width() -> int:
    """The number of letters that a line of a drawing may have."""
    return min(Console().width, 120)


def print_error(message: str, kind: str, as_json: bool) -> None:
    """Print one message on stderr, or ``{"error": …}`` on stdout, where whoever asked for JSON reads."""
    if as_json:
        print_json({"error": {"kind": kind, "message": message}})
    else:
        line = Text("error: ", style="bold red").append(message, style="not bold default")
        PlainConsole(stderr=True, highlight=False, soft_wrap=True).print(line)


def require_folder(path: Path | None) -> None:
    """Raise ShardwrightError unless a file can be written there: asked before the work, not after it."""
    if path is not None and not path.parent.is_dir():
        raise ShardwrightError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    if path is not None and path.is_dir():
        raise ShardwrightError(f"{path} cannot be written: it is a folder; name a file in it")
