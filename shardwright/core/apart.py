"""Gradients and activations are not all there at once: the first backward makes gradients as it gives activations up.

A prediction that adds up the most of each is too high for steps of few microbatches. Here one rank's actions are gone
through in order, the first backward of every stage unit by unit, the gradients of one unit beside its activations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.schedule.actions import Action, B, F, W
from shardwright.core.stages import UnitTable


@dataclass(frozen=True, slots=True)
class StageBytes:
    """One stage of a rank, in bytes."""

    kept: int
    """Activations of one microbatch."""
    working: int
    """What the passes of one microbatch hold beside them."""
    gradients: int
    first_backward: int
    """The most of activations, of what is under way and of gradients together while the first backward makes them."""


def stage_bytes(table: UnitTable, first: int, end: int, gradient_width: int) -> StageBytes:
    """What a stage of units ``first`` … ``end`` - 1 holds, its gradients ``gradient_width`` bytes an entry."""
    kept = table.range_kept[first, first + 1 : end + 1]
    made = table.range_elements[first:end, end] * gradient_width
    return StageBytes(
        int(kept[-1]),
        int(table.range_working[first, end]),
        int(made[0]),
        int((kept + table.beside_bytes[first:end] + made).max()),
    )


def apart_bytes(order: Sequence[Action], stages: Mapping[int, StageBytes]) -> int:
    """By how much the peak of one rank is lower than all gradients, the most activations and the most under way
    together. ``stages`` are those that the rank holds."""
    working = max(held.working for held in stages.values())
    live = most = peak = gradients = 0
    made: set[int] = set()
    for action in order:
        freed = 0
        for part in action.parts or (action,):
            held = stages[part.stage]
            if part.kind is F:
                live += held.kept
            elif part.kind is B or part.kind is W:
                freed += held.kept
        most = max(most, live)
        now = live + gradients + working
        if action.kind is B and action.stage not in made:
            held = stages[action.stage]
            now = live - held.kept + gradients + held.first_backward
        peak = max(peak, now)
        live -= freed
        for part in action.parts or (action,):
            if part.kind in (B, W) and part.stage not in made:
                made.add(part.stage)
                gradients += stages[part.stage].gradients
        peak = max(peak, live + gradients)
    return max(0, gradients + most + working - peak)
