"""Gradients and activations are not all there at once: the first backward makes gradients as it gives activations up.

A prediction that adds up the most of each is too high for steps of few microbatches, and too low where gradients travel
to other replicas in copies. Here one rank's actions are gone through in order, the first and the last backward of every
stage unit by unit, the gradients of one unit, and the copies of those behind it, beside its activations.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from shardwright.core.schedule.actions import Action, B, F, I, W
from shardwright.core.tables.unit_table import StageBytes, UnitTable


def stages_bytes(
    table: UnitTable,
    ends: Mapping[int, tuple[int, int]],
    first: Sequence[int],
    last: Sequence[int],
    gradient_width: int,
) -> dict[int, StageBytes]:
    """What each of a rank's stages holds, its gradients ``gradient_width`` bytes an entry.

    ``ends`` are the (first unit, end) of every stage, ``first`` the stages in the order of their first backward,
    ``last`` from the one that is done last to the one that is done first. A parameter that several of them use has one
    gradient, which the first of them makes and the last makes whole.
    """

    def that_share(stage: int, others: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Of ``others`` those that use a trained parameter of ``stage`` too, each by its (first unit, end): a stage's
        bytes depend on no others, so that cuts which differ elsewhere share what was counted."""
        return tuple(ends[other] for other in others if table.shares_parameters(ends[stage], ends[other]))

    found = {}
    for stage in ends:
        before, after = that_share(stage, first[: first.index(stage)]), that_share(stage, last[: last.index(stage)])
        key = ends[stage], before, after, gradient_width
        if key not in table.stages_bytes:
            table.stages_bytes[key] = _stage_bytes(table, ends[stage], before, after, gradient_width)
        found[stage] = table.stages_bytes[key]
    return found


def _stage_bytes(
    table: UnitTable,
    units: tuple[int, int],
    before: Sequence[tuple[int, int]],
    after: Sequence[tuple[int, int]],
    gradient_width: int,
) -> StageBytes:
    """One of them; of the others those whose first backward comes ``before`` its own, and the last one ``after``."""
    first, end = units
    kept = table.range_kept[first, first + 1 : end + 1]
    made = table.trained_from(first, end, before) * gradient_width
    whole = table.trained_from(first, end, after) * gradient_width
    passes = kept + table.beside_bytes[first:end] + table.given_bytes(first, end)
    copied = np.append(whole[1:], 0)
    return StageBytes(
        int(kept[-1]),
        int(table.range_working[first, end]),
        int(made[0]),
        int(whole[0]),
        int((passes + made).max()),
        int((passes + copied).max()),
        int((passes + made + copied).max()),
        table.given_up_bytes(first, end),
    )


def apart_bytes(order: Sequence[Action], stages: Mapping[int, StageBytes], bucket_bytes: int = 0) -> int:
    """By how much the peak of one rank is lower than all gradients, the most activations and the most under way
    together; negative where copies of gradients make it higher.

    ``stages`` are those that the rank holds; ``bucket_bytes`` as in `Capabilities`, 0 where no gradients travel.
    """
    working = max(held.working for held in stages.values())
    copied = sum(held.copies for held in stages.values()) if bucket_bytes else 0
    at_once = copied > bucket_bytes
    """Copies leave as gradients are whole; else all at the end."""
    last = {part.stage: n for n, action in enumerate(order) for part in action.flat if part.kind in (B, W)}
    live = most = peak = gradients = sent = 0
    made: set[int] = set()
    for number, action in enumerate(order):
        freed = 0
        for part in action.flat:
            held = stages[part.stage]
            if part.kind is F:
                live += held.kept
            elif part.kind is I:
                freed += held.given_up
            elif part.kind is B or part.kind is W:
                freed += held.kept - (held.given_up if part.kind is W else 0)
        most = max(most, live)
        now = live + gradients + working + sent
        if action.kind is B:
            held = stages[action.stage]
            leaves = at_once and last[action.stage] == number
            others = live - held.kept + gradients + sent
            if action.stage not in made:
                now = others + (held.only_backward if leaves else held.first_backward)
            elif leaves:
                now = max(now, others + held.last_backward)
        peak = max(peak, now)
        live -= freed
        for part in action.flat:
            if part.kind in (B, W) and part.stage not in made:
                made.add(part.stage)
                gradients += stages[part.stage].gradients
            if at_once and part.kind in (B, W) and last[part.stage] == number:
                sent += stages[part.stage].copies
        peak = max(peak, live + gradients + sent)
    peak = max(peak, gradients + copied)
    return gradients + most + working - peak
