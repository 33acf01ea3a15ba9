"""The files that commands leave of a schedule: its table, a picture of its timeline, a trace."""

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwright.core.errors import ShardwrightError
from shardwright.core.schedule import Schedule
from shardwright.core.schedule.files import to_csv
from shardwright.core.schedule.timeline import Timeline
from shardwright.core.values.text_files import write_text

CsvOption = Annotated[
    Path | None, typer.Option(help="Save the table there, as torch's runtime reads it.", show_default=False)
]
SvgOption = Annotated[Path | None, typer.Option(help="Save a picture of the timeline there.", show_default=False)]
TraceOption = Annotated[
    Path | None, typer.Option(help="Save a trace there that ui.perfetto.dev opens.", show_default=False)
]


def save_schedule(
    schedule: Schedule, timeline: Timeline, title: str, *, csv: Path | None, svg: Path | None, trace: Path | None
) -> dict[str, str]:
    """Write the files that were asked for, and return their paths by kind."""
    saved: dict[str, str] = {}
    if csv is not None:
        write_text(csv, to_csv(schedule), ShardwrightError)
        saved["csv"] = str(csv)
    if svg is not None:
        from shardwright.report.svg import timeline_svg

        write_text(svg, timeline_svg(timeline, title=title), ShardwrightError)
        saved["svg"] = str(svg)
    if trace is not None:
        from shardwright.report.perfetto import perfetto_trace

        write_text(trace, json.dumps(perfetto_trace(timeline)), ShardwrightError)
        saved["trace"] = str(trace)
    return saved
