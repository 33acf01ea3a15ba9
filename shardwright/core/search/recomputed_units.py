"""Which units are recomputed where that is left open: as few as memory asks for, and some are offloaded instead.

As KARMA does (arXiv 2008.11421): a unit whose activations fit is kept; of those that do not fit the first ones go to
the host and back, where that is faster than computing them again.
"""

from collections.abc import Callable, Sequence

from shardwright.core.plan.decision import Decision
from shardwright.core.tables.memory import MemoryUse
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.tables.unit_table import MemoryRequest

MOST_GIVEN_UP = 3
"""Of every stage's kept units, how many may give their memory to what is on its way to the host or back."""

Memory = Callable[[Decision, RankTables, Sequence[int]], tuple[MemoryUse, ...]]
"""What the ranks hold, for a decision and how many microbatches are live on each."""
Kept = tuple[RankTables, tuple[int, ...], tuple[MemoryUse, ...]]
"""What units cost then, those that are kept, and what the ranks hold."""


def as_few_as_memory_asks_for(
    decision: Decision,
    ranked: RankTables,
    live: Sequence[int],
    request: MemoryRequest,
    memory_of: Memory,
    *,
    may_offload: bool,
) -> Kept:
    """Of a decision that fits with every unit recomputed, as many units kept as fit."""
    starts, placement = decision.stage_starts, decision.stage_ranks
    kept = ranked.kept_units(starts, placement, live, request)
    while True:
        keeping = ranked.keeping(kept) if kept else ranked
        memory = memory_of(decision, keeping, live)
        left = keeping.kept_but_one(kept, starts, placement, memory)
        if left == kept:
            break
        kept = left
    found = keeping, kept, memory
    return _offloading(decision, found, live, memory_of) if may_offload else found


def _offloading(decision: Decision, found: Kept, live: Sequence[int], memory_of: Memory) -> Kept:
    """The same with some units offloaded, where that is faster and fits: what is on its way takes memory, for which
    units that would be kept may have to go."""
    starts, placement = decision.stage_starts, decision.stage_ranks
    keeping, kept, _ = best = found
    least = max(work.seconds for work in keeping.work(starts, placement))
    ends = keeping.ends(starts)
    for fewer in range(MOST_GIVEN_UP + 1):
        left = tuple(unit for a, b in ends for unit in [u for u in kept if a <= u < b][fewer:])
        away = keeping.keeping(left).offloaded_units(starts, placement)
        while away:
            tried = keeping.keeping(left, away)
            use = memory_of(decision, tried, live)
            if not tried.over_bytes(use):
                seconds = max(work.seconds for work in tried.work(starts, placement))
                if seconds < least * (1 - 1e-9):
                    best, least = (tried, left, use), seconds
                break
            # One less of every stage.
            away = tuple(u for a, b in ends for u in [v for v in away if a <= v < b][:-1])
    return best
