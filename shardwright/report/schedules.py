"""Schedules as tables for the terminal: the ranks of one, and several side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shardwright.core.schedule import Schedule
from shardwright.core.timeline import Timeline


def ranks_view(schedule: Schedule, timeline: Timeline) -> Table:
    """What each rank of a schedule does and holds."""
    table = Table()
    for head in ("rank", "stages", "idle", "bubble s", "most live", "most bytes"):
        table.add_column(head, justify="right")
    for rank in range(timeline.ranks):
        table.add_row(
            str(rank),
            " ".join(map(str, schedule.stages_of(rank))),
            f"{timeline.bubble_fraction[rank]:.1%}",
            f"{timeline.bubble_s[rank]:.6g}",
            str(timeline.peak_live_activations[rank]),
            str(timeline.peak_activation_bytes[rank]),
        )
    return table


def comparison_view(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Schedules side by side: rows as `shardwright schedule --all --json` gives them."""
    table = Table()
    for head in ("schedule", "makespan s", "longest bubble s", "idle at most", "most live", "most bytes"):
        table.add_column(head, justify="left" if head == "schedule" else "right")
    table.add_column("why not", overflow="fold")
    for row in rows:
        if "refused" in row:
            reason = str(row["refused"]).removeprefix(f"{row['name']} does not admit these sizes: ")
            table.add_row(str(row["name"]), *[""] * 5, Text(reason))
            continue
        table.add_row(
            str(row["name"]),
            f"{row['makespan_s']:.6g}",
            f"{max(row['bubble_s']):.6g}",
            f"{max(row['bubble_fraction']):.1%}",
            str(max(row["peak_live_activations"])),
            str(max(row["peak_activation_bytes"])),
            "",
        )
    return table
