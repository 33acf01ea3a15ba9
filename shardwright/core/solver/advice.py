"""Warnings about axes that cost more than they save."""

from dataclasses import replace

from shardwright.core.cost.work import WorkCounter
from shardwright.core.fold import Folded
from shardwright.core.solver.chain import solve
from shardwright.core.solver.prices import Setting


def slow_axes(folded: Folded, setting: Setting, *, memory_limit_bytes: float = float("inf")) -> tuple[str, ...]:
    """For every axis without which a microbatch would be no slower on each rank: what it costs, with figures. The usual
    cause is a tensor axis that runs across nodes."""
    counter = WorkCounter(folded.graph)
    whole = solve(folded, setting, memory_limit_bytes=memory_limit_bytes, counter=counter)
    found: list[str] = []
    for axis in setting.axes:
        if axis.size == 1:
            continue
        rest = tuple(a for a in setting.axes if a is not axis) or (replace(axis, size=1),)
        without = solve(folded, replace(setting, axes=rest), counter=counter)
        split = any(name == axis.name for layout in whole.layouts().values() for name, _ in layout.placements)
        if without.time_s <= whole.time_s and (split or not found):
            found.append(
                f"axis {axis.name!r} of {axis.size} ranks at {axis.bandwidth_bytes_per_s / 1e9:.3g} GB/s makes a "
                f"microbatch take {whole.time_s * 1e3:.3g} ms; {without.time_s * 1e3:.3g} ms without it. Keep the axis "
                "inside a node, where links are faster, or use its ranks for data parallelism"
            )
    return tuple(found)
