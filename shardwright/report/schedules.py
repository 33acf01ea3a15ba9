"""Schedules as tables for the terminal: the ranks of one, and several side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from shardwright.core.schedule import Schedule
from shardwright.core.schedule.timeline import Timeline
from shardwright.report.tables import new_table


def ranks_view(schedule: Schedule, timeline: Timeline) -> Table:
    """A table of the ranks of a schedule: their stages, idle share and live activations."""
    table = new_table("Ranks", ">rank", ">stages", ">idle", ">bubble s", ">most live", ">most bytes")
    peaks = zip(timeline.peak_live_activations, timeline.peak_activation_bytes, strict=True)
    for rank, (live, size) in enumerate(peaks):
        table.add_row(
            str(rank),
            " ".join(map(str, schedule.stages_of(rank))),
            f"{timeline.bubble_fraction[rank]:.1%}",
            f"{timeline.bubble_s[rank]:.6g}",
            str(live),
            str(size),
        )
    return table


def comparison_view(rows: Sequence[Mapping[str, Any]]) -> Group:
    """Tables of schedules side by side, and of the reasons why others are not among them. ``rows`` are those of
    `shardwright schedule --all --json`."""
    ran = new_table("Schedules", "schedule", ">makespan s", ">bubble s", ">idle", ">most live", ">most bytes")
    refused = new_table("Not for these sizes", "schedule", "why")
    for row in rows:
        if "refused" in row:
            reason = str(row["refused"]).removeprefix(f"{row['name']} does not admit these sizes: ")
            refused.add_row(str(row["name"]), Text(reason))
            continue
        ran.add_row(
            str(row["name"]),
            f"{row['makespan_s']:.6g}",
            f"{max(row['bubble_s']):.6g}",
            f"{max(row['bubble_fraction']):.1%}",
            str(max(row["peak_live_activations"])),
            str(max(row["peak_activation_bytes"])),
        )
    return Group(*(table for table in (ran, refused) if table.row_count))
