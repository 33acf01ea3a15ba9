"""Two modes of recompute in one plan: where one is too little for all units, as many of them as have room have another.

Of all sets of modules whose products may be kept (`kept_products`), one mode for all units leaves room that is too
little for the next one. A mix of two has the times between (of units that are alike, the best mix of any number of
modes for a budget is one of two), which no single mode has. The cut stays that of the best plan with one mode.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from shardwright.core.capabilities import Capabilities
from shardwright.core.plan.decision import Decision
from shardwright.core.search.unit_labels import again_in_turns
from shardwright.core.tables.memory import MemoryUse
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.values.recompute_modes import Recompute

Choice = TypeVar("Choice")
Kept = tuple[int, ...]
"""Units that keep everything."""


class Mixer(Protocol[Choice]):
    """What tells a choice with another mix of modes beside units that are ``kept`` (`Scorer.mixed`), or None where it
    is no faster."""

    def __call__(self, choice: Choice, mode: Recompute, other: Recompute, kept: Kept, /) -> Choice | None: ...


def with_two_modes(
    choice: Choice,
    modes: Sequence[Recompute],
    mixed: Mixer[Choice],
    kept_of: Callable[[Choice], tuple[Kept, ...]],
    runtimes: Sequence[Capabilities],
) -> Choice:
    """The fastest of a choice with one mode and its mixes with others.

    Args:
        choice: what one mode comes to.
        modes: those that a search may choose from, the one that keeps most first.
        mixed: tells what a mix comes to.
        kept_of: the units that may keep everything, in several ways, given the best choice with one mode and some kept.
        runtimes: where not all of them mix modes, units are kept beside one mode.
    """
    if "none" in modes:
        for mode in modes:
            if mode != "none":
                choice = mixed(choice, mode, "none", ()) or choice
    able = [mode for mode in modes if all(runtime.lack_of_modes(mode) is None for runtime in runtimes)]
    for kept in kept_of(choice):
        for number, other in enumerate(able):
            for mode in able[number + 1 :]:
                choice = mixed(choice, mode, other, kept) or choice
    return choice


def as_many_in_another_mode(
    decision: Decision,
    ranked: RankTables,
    live: Sequence[int],
    memory_of: Callable[[Decision, RankTables, Sequence[int]], tuple[MemoryUse, ...]],
    mode: Recompute,
    below_s: float,
) -> tuple[RankTables, tuple[MemoryUse, ...]] | None:
    """As many units in another ``mode``, which is faster, as fit, but not all, with the memory of the ranks: the last
    ones of every stage, because a backward finds the units after it finished. None where no number of them takes less
    than ``below_s`` on the slowest rank and fits. More units are taken to need more memory."""
    starts, placement = decision.stage_starts, decision.stage_ranks
    turns = again_in_turns(ranked, starts)

    def mixed(count: int) -> RankTables:
        return ranked.keeping(turns[:count]) if mode == "none" else ranked.mixing(mode, turns[:count])

    counts = range(1, len(turns))
    count = 1 + bisect_left(counts, True, key=lambda count: mixed(count).slowest_s(starts, placement) < below_s)
    found: tuple[RankTables, tuple[MemoryUse, ...]] | None = None
    fit, too_many = 0, len(turns)
    while count < too_many:  # the fewest that gain something first, which mostly do not fit
        tables = mixed(count)
        memory = memory_of(decision, tables, live)
        if not tables.over_bytes(memory):
            found, fit = (tables, memory), count
        elif found is None:
            return None
        else:
            too_many = count
        count = max(fit + 1, (fit + too_many) // 2)
    return found
