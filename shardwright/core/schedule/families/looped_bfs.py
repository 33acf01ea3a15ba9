"""Looped BFS: several stages per rank, every microbatch through one stage before the next: breadth first.

Lamy-Poirier, arXiv 2211.05953, section 4. Backwards take stages and microbatches from the last to the first, as torch's
do.
"""

from shardwright.core.schedule.families.alternating_passes import alternating, passes_of
from shardwright.core.schedule.family import Family, Order, Sizes, by_rank
from shardwright.core.schedule.placement import looped


def rank_order(rank: int, sizes: Sizes) -> Order:
    stages, every = range(rank, sizes.stages, sizes.ranks), range(sizes.microbatches)
    visits = [visit for stage in stages for visit in passes_of(stage, every, sizes.slices)[0]]
    return alternating(visits, visits[::-1], len(visits))


LOOPED_BFS = Family(
    "looped-bfs",
    "arXiv 2211.05953, section 4",
    looped,
    by_rank(rank_order),
    lambda sizes: None,
    takes_slices=True,
)
