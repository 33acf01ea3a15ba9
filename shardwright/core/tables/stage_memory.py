"""The memory of every stage of a rank, counted from its units: the sizes that `core.schedule.peak_memory` uses.

Gradients and activations do not all exist at once: a backward goes unit by unit, and makes gradients while it frees
activations. So the first backward of every stage is counted unit by unit: the activations of the
units up to one, and beside them the gradients of that unit and those behind it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.schedule.peak_memory import StageMemory
from shardwright.core.tables.backward_halves import BackwardHalves, halves_of
from shardwright.core.tables.stage_working import working_of
from shardwright.core.tables.unit_table import UnitTable


def stage_memories(
    table: UnitTable,
    ends: Mapping[int, tuple[int, int]],
    first: Sequence[int],
    gradient_width: int,
    *,
    adds_at_once: bool = False,
) -> dict[int, StageMemory]:
    """The memory of each stage of a rank, with gradients of ``gradient_width`` bytes an entry. ``adds_at_once``:
    whether gradients of large weights are added to their sums as they are made.

    ``ends`` gives the (first unit, end) of every stage, and ``first`` the stages in the order of their first backward.
    A parameter that several stages use has one gradient, which the first of them makes.
    """
    found = {}
    for stage in ends:
        # A stage's bytes depend on no stages but those, so cuts that differ elsewhere share what was counted.
        before = sharing_before(table, ends, first, stage)
        key = ends[stage], before, gradient_width, adds_at_once
        if key not in table.stage_memories:
            made = _stage_memory(table, ends[stage], before, gradient_width)
            again = working_of(table).backward_again(*ends[stage]) if adds_at_once else None
            table.stage_memories[key] = replace(made, backward_again=again)
        found[stage] = table.stage_memories[key]
    return found


def sharing_before(
    table: UnitTable, ends: Mapping[int, tuple[int, int]], first: Sequence[int], stage: int
) -> tuple[tuple[int, int], ...]:
    """The stages whose first backward comes before that of a stage and that use a parameter of it; the arguments are
    those of `stage_memories`."""
    others = [ends[other] for other in first[: first.index(stage)]]
    return tuple(other for other in others if table.shares_parameters(ends[stage], other))


def backward_passes(table: UnitTable, units: tuple[int, int]) -> NDArray[np.float64]:
    """The bytes of activations and temporary values in the backward of each unit of a stage, in which those of the
    units behind it are gone."""
    (first, end), working = units, working_of(table)
    passes: NDArray[np.float64] = table.range_kept[first, first + 1 : end + 1] + working.beside_bytes[first:end]
    return passes + working.tie_sums(first, end) + working.given_bytes(first, end)


def _stage_memory(
    table: UnitTable,
    units: tuple[int, int],
    before: Sequence[tuple[int, int]],
    gradient_width: int,
) -> StageMemory:
    """The memory of one stage. ``before`` are other stages whose first backward comes before its own."""
    first, end = units
    made, halves = table.trained_from(first, end, before) * gradient_width, halves_of(table)
    return StageMemory(
        activations=int(table.range_kept[first, end]),
        working=int(working_of(table).range_working[first, end]),
        forward=working_of(table).forward_bytes(first, end),
        gradients=int(made[0]),
        first_backward=_first_backward(table, units, made, gradient_width),
        freed_by_input_grad=int(halves.range_freed[first, end] - halves.range_between[first, end]),
        **_halves(halves, units, before, made),
    )


def _first_backward(table: UnitTable, units: tuple[int, int], made: NDArray[np.float64], gradient_width: int) -> int:
    """The most bytes in the first backward of a stage, with the gradients that it makes; ``made`` are those of each
    unit and of the units behind it. Those of a unit that shares no parameters come call by call, where its phases are
    known."""
    first, end = units
    tied = {user for tie in table.ties if tie.is_trained for user in tie.users}
    passes, behind = backward_passes(table, units), [*made[1:], 0.0]
    most = 0.0
    for unit in range(first, end):
        at, cost = unit - first, table.units[unit]
        calls = table.calls[unit] if table.calls else ()
        own = [call.trained * gradient_width for call in reversed(calls)]
        at_once = float(passes[at] + made[at])
        by_call = 0.0
        if unit in tied or len(cost.phases) != len(own) + 2 or sum(own) != made[at] - behind[at]:
            by_call = at_once
        else:
            base = float(passes[at]) - cost.passing_bytes + behind[at]
            for phase, size in zip(cost.phases, (0, *own, 0), strict=True):
                by_call = max(by_call, base + phase.collecting, base + phase.ending + size)
                base += size
        most = max(most, min(at_once, by_call))
    return int(most)


def _halves(
    halves: BackwardHalves, units: tuple[int, int], before: Sequence[tuple[int, int]], made: NDArray[np.float64]
) -> dict[str, int]:
    """What the halves of a split backward hold for a while, where it is known; ``made`` are the gradients of each unit
    and of those behind it."""
    if not halves.is_known:
        return {}
    (first, end), table = units, halves.table
    passes = halves.weight_grad_passes(first, end)
    for tie in table.ties:  # the gradient of one use is added to that of another, which was made before
        here = [user for user in tie.users if first <= user < end]
        others = any(a <= user < b for user in tie.users for a, b in before)
        for user in here if others else here[:-1]:
            passes[user - first] += table.units[user].weight_grad_bytes
    return {
        "input_grad": int(halves.range_input_grad_working[units]),
        "weight_grad": halves.weight_grad_working(first, end),
        "first_weight_grad": int((passes + made).max()),
    }
