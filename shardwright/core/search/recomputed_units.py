"""The choice of recomputed units where it is left open: as few as memory requires, some of them offloaded instead.

It follows KARMA (arXiv 2008.11421): a unit whose activations fit is kept. The first of those that do not fit are
offloaded to the host and fetched back, where that is faster than computing them again. Of a stage of few units, and of
a model on one rank, the labels of all units are chosen together by the timeline of their passes and copies
(`labelled_units`); there units that have no others like them may be offloaded too.
"""

from collections.abc import Sequence

from shardwright.core.plan.decision import Decision
from shardwright.core.search.labelled_units import Kept, Memory, labelled
from shardwright.core.search.unit_labels import kept_but_one, kept_units, offloaded_units
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_tables import RankTables

MOST_GIVEN_UP = 3
"""The most kept units of each stage that may give their memory to activations on the way to the host or back."""


def as_few_as_memory_asks_for(
    decision: Decision,
    ranked: RankTables,
    live: Sequence[int],
    request: MemoryRequest,
    memory_of: Memory,
    *,
    may_offload: bool,
) -> Kept:
    """As many units kept as fit, for a decision that fits with every unit recomputed."""
    starts, placement = decision.stage_starts, decision.stage_ranks
    kept = kept_units(ranked, starts, placement, live, request)
    while True:
        keeping = ranked.keeping(kept) if kept else ranked
        memory = memory_of(decision, keeping, live)
        left = kept_but_one(keeping, kept, starts, placement, memory)
        if left == kept:
            break
        kept = left
    found = keeping, kept, memory
    if not may_offload:
        return found
    return labelled(decision, ranked, live, memory_of, _offloading(decision, found, live, memory_of)) or found


def _offloading(decision: Decision, found: Kept, live: Sequence[int], memory_of: Memory) -> Kept:
    """The same with some units offloaded, where that is faster and fits. Activations on their way take memory, so units
    that would be kept may have to be given up."""
    starts, placement = decision.stage_starts, decision.stage_ranks
    keeping, kept, _ = best = found
    least = max(work.seconds for work in keeping.work(starts, placement))
    ends = keeping.ends(starts)
    for fewer in range(MOST_GIVEN_UP + 1):
        left = tuple(unit for a, b in ends for unit in [u for u in kept if a <= u < b][fewer:])
        away = offloaded_units(keeping.keeping(left), starts, placement)
        while away:
            tried = keeping.keeping(left, away)
            use = memory_of(decision, tried, live)
            if not tried.over_bytes(use):
                seconds = max(work.seconds for work in tried.work(starts, placement))
                if seconds < least * (1 - 1e-9):
                    best, least = (tried, left, use), seconds
                break
            # One unit less in every stage.
            away = tuple(u for a, b in ends for u in [v for v in away if a <= v < b][:-1])
    return best
