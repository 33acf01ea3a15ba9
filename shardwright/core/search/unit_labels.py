"""Which units of a cut give up their activations: those that are kept although others are recomputed, and those that
are offloaded."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import zip_longest

from shardwright.core.tables.memory import MemoryUse
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.values.recompute_modes import is_computed_again


def again_in_turns(ranked: RankTables, starts: Sequence[int]) -> list[int]:
    """The units that are computed again, the last one of every stage first, then the last but one of each."""
    modes = ranked.tables[0].modes
    turns = zip_longest(
        *([u for u in reversed(range(a, b)) if is_computed_again(modes[u])] for a, b in ranked.ends(starts))
    )
    return [unit for turn in turns for unit in turn if unit is not None]


def kept_units(
    ranked: RankTables, starts: Sequence[int], placement: Sequence[int], live: Sequence[int], request: MemoryRequest
) -> tuple[int, ...]:
    """The units that need no recomputing, for a cut that fits with every unit recomputed: on every rank the last
    repeated units of its stages, as many as there is room for. (The last ones, because a backward finds the units
    after it finished.) Copies of gradients are left out: they appear when activations are gone."""
    memory, found = ranked.total_bytes(starts, placement, live, request.without_buckets), []
    stages = ranked.stages_of_ranks(starts, placement)
    rows = zip(ranked.tables, stages, memory, ranked.limits_bytes, live, strict=True)
    for table, held, (size, _), limit, count in rows:
        modes, room = table.modes, limit - size
        # Activations of a rank are counted by its fullest stage: units are kept stage by stage, in turns.
        turns = zip_longest(*([u for u in reversed(range(a, b)) if modes[u] == "full"] for a, b in held))
        for turn in turns:
            chosen = [unit for unit in turn if unit is not None]
            more = max(table.units[u].saved_bytes - table.units[u].entering_bytes for u in chosen)
            room -= max(0, more) * count
            if room < 0:
                break
            found += chosen
    return tuple(sorted(found))


def kept_but_one(
    ranked: RankTables,
    kept: tuple[int, ...],
    starts: Sequence[int],
    placement: Sequence[int],
    memory: Sequence[MemoryUse],
) -> tuple[int, ...]:
    """The kept units without the first one on every rank that has too little memory."""
    rank_of = {unit: placement[bisect_right(starts, unit) - 1] for unit in kept}
    first: dict[int, int] = {}
    for unit, rank in rank_of.items():
        if memory[rank].total_bytes > ranked.limits_bytes[rank]:
            first.setdefault(rank, unit)
    return tuple(unit for unit in kept if first.get(rank_of[unit]) != unit)


def offloaded_units(ranked: RankTables, starts: Sequence[int], placement: Sequence[int]) -> tuple[int, ...]:
    """The recomputed units of a cut that are better offloaded: of every stage the first ones, whose activations are
    needed last, as many as make its passes shortest (KARMA, arXiv 2008.11421)."""
    found: list[int] = []
    for stage, (a, b) in enumerate(ranked.ends(starts)):
        table = ranked.tables[placement[stage]]
        again = [u for u in range(a, b) if table.modes[u] == "full"]
        forward, backward = table.passes_s(a, b)
        swapped, best, count = 0.0, forward + backward, 0
        for number, unit in enumerate(again, 1):
            swapped += table.units[unit].saved_bytes / table.host_bytes_per_s
            backward -= float(table.again_s[unit])
            both = table.with_swaps(forward, swapped) + table.with_swaps(backward, swapped)
            if both < best * (1 - 1e-9):
                best, count = both, number
        found += again[:count]
    return tuple(found)
