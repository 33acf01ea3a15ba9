"""The study around a plan, as tables for a terminal and as plain values."""

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.search.study import Study
from shardwright.core.values.amounts import bytes_text, seconds_text
from shardwright.report.tables import new_table

BAR = 24


def study_view(study: Study) -> RenderableType:
    """The tables of a study: what binds, what changes would bring, sizes and the front."""
    binds = study.binds
    over = f" over {binds.link}" if binds.link else ""
    lines = [
        f"memory: pipeline rank {binds.memory_rank} is filled to {binds.memory_share:.0%}, most of it "
        f"{binds.memory_part}, {binds.memory_when}",
        f"time: beside computing most goes to {binds.term}{over}, {seconds_text(binds.term_s)} a step",
    ]
    parts: list[RenderableType] = [Text("\nWhat binds", style="bold"), *(Text(f"  {line}") for line in lines)]
    changes = new_table("What a change would bring", "change", ">step", ">gain", "plan")
    for change in study.changes:
        if change.step_time_s is None:
            changes.add_row(change.name, "", "", Text(change.note))
        else:
            changes.add_row(change.name, seconds_text(change.step_time_s), f"{change.gain:+.1%}", Text(change.summary))
    parts.append(changes)
    parts.append(_sizes(study))
    front = new_table(
        "Time, memory and price", ">devices", ">step", "", ">peak memory", ">USD a step", ">per device", "plan"
    )
    slowest = max((point.step_time_s for point in study.front), default=1.0)
    for point in study.front:
        price = "" if point.usd_per_step is None else f"{point.usd_per_step:.3g}"
        front.add_row(
            str(point.devices),
            seconds_text(point.step_time_s),
            "█" * max(1, round(BAR * point.step_time_s / slowest)),
            bytes_text(point.peak_memory_bytes),
            price,
            f"{point.efficiency:.0%}",
            Text(point.summary),
        )
    parts.append(front)
    return Group(*parts)


def _sizes(study: Study) -> RenderableType:
    """The table of the numbers of devices that are worth using."""
    sizes = new_table("How many devices are worth using", ">devices", "of them", ">step", ">USD a step", ">per device")
    for point in study.sizes:
        price = "" if point.usd_per_step is None else f"{point.usd_per_step:.3g}"
        row = (seconds_text(point.step_time_s), price, f"{point.efficiency:.0%}")
        sizes.add_row(str(point.devices), Text(point.cluster), *row)
    fastest = min(study.sizes, key=lambda p: (p.step_time_s, p.devices), default=None)
    if fastest is None:
        return sizes
    said = f"  fastest: {fastest.devices} devices ({fastest.cluster})"
    cheapest = min(study.sizes, key=lambda p: (p.usd_per_step or 0.0, p.step_time_s))
    if cheapest.usd_per_step is not None:
        said += f"; cheapest a step: {cheapest.devices} ({cheapest.cluster})"
    return Group(sizes, Text(said))


def study_document(study: Study) -> dict[str, Any]:
    """The study without its plan, as plain values."""
    return {
        "binds": asdict(study.binds),
        "changes": [asdict(change) for change in study.changes],
        "front": [asdict(point) for point in study.front],
        "sizes": [asdict(point) for point in study.sizes],
    }
