"""SageMaker's two pipelines, `simple` and `interleaved`, bounded by `active_microbatches` (arXiv 2111.05972).

`simple` finishes the forwards before it starts the backwards; when fewer microbatches may be active than there are, it
does so in waves. `interleaved` runs a backward as soon as there is one. Which one there is depends on the times of
actions, so it is built by playing it through: with the costs given, or with a backward of twice a forward. A microbatch
is active from the start of its first forward until the end of its last backward. Default: ranks + 2.
"""

import math
from itertools import chain

from shardwright.core.schedule.actions import Action, B, F, Kind, cell
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.families.alternating_passes import alternating, on_one_stage
from shardwright.core.schedule.family import Family, Order, Sizes, Table, by_rank, one_stage_per_rank
from shardwright.core.schedule.placement import looped

_MORE_THAN_RANKS = 2  # SageMaker's default for active_microbatches is the pipeline's degree and two more.


def active(sizes: Sizes) -> int:
    return min(sizes.active_microbatches or sizes.ranks + _MORE_THAN_RANKS, sizes.microbatches)


def simple_order(rank: int, sizes: Sizes) -> Order:
    (visits, _), wave = on_one_stage(rank, sizes), active(sizes)
    waves = [visits[first : first + wave] for first in range(0, len(visits), wave)]
    return tuple(chain.from_iterable(alternating(batches, batches, wave) for batches in waves))


def generate_interleaved(sizes: Sizes) -> Table:
    costs = sizes.costs or StageCosts.uniform(sizes.ranks)
    limit, last, m = active(sizes), sizes.ranks - 1, sizes.microbatches
    backward_s = costs.backward_s
    table: list[list[Action]] = [[] for _ in range(sizes.ranks)]
    clock = [0.0] * sizes.ranks
    done = {F: [0] * sizes.ranks, B: [0] * sizes.ranks}  # Microbatches go through every rank in order.
    arrival: dict[tuple[Kind, int, int], float] = {(F, 0, mb): 0.0 for mb in range(limit)}

    def next_of(rank: int) -> tuple[float, bool, int, int]:
        """The first action that a rank can start, as (start, whether a forward, minus the rank, microbatch). At the
        same moment a backward comes before a forward, and later ranks come first."""
        options = [
            (max(clock[rank], arrival[(kind, rank, mb)]), kind is F, -rank, mb)
            for kind in (B, F)
            if (mb := done[kind][rank]) < m and (kind, rank, mb) in arrival
        ]
        return min(options, default=(math.inf, True, -rank, m))

    waiting = [next_of(rank) for rank in range(sizes.ranks)]
    for _ in range(2 * m * sizes.ranks):
        start, forward, negated, mb = min(waiting)
        rank, kind = -negated, F if forward else B
        seconds = costs.forward_s[rank] if forward else backward_s[rank]
        clock[rank] = end = start + seconds
        done[kind][rank] += 1
        table[rank].append(cell(rank, kind, mb))
        if forward:
            to, direction = (rank + 1, F) if rank < last else (rank, B)
            arrival[(direction, to, mb)] = end + (costs.transfer_s[rank] if rank < last else 0.0)
        elif rank:
            arrival[(B, rank - 1, mb)] = end + costs.transfer_s[rank - 1]
        elif mb + limit < m:
            arrival[(F, 0, mb + limit)] = end
        for other in range(max(0, rank - 1), min(last, rank + 1) + 1):
            waiting[other] = next_of(other)
    return tuple(tuple(order) for order in table)


SIMPLE = Family("simple", "arXiv 2111.05972, section 3", looped, by_rank(simple_order), one_stage_per_rank, True)
INTERLEAVED = Family(
    "interleaved",
    "arXiv 2111.05972, section 3",
    looped,
    generate_interleaved,
    one_stage_per_rank,
    bounds_active=True,
    follows_costs=True,
)
