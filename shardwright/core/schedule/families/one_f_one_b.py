"""1F1B: after a warm-up of one forward per later rank, forwards and backwards alternate.

Narayanan et al., arXiv 1806.03377 (PipeDream), with the flush of arXiv 2006.09503 (PipeDream-Flush), section 2.2. With
slices of sequences the warm-up has one forward more for each slice but the last, as a microbatch's backward begins with
its last slice (Sun et al., arXiv 2406.03488, section 3).
"""

from shardwright.core.schedule.families.alternating_passes import alternating, on_one_stage
from shardwright.core.schedule.family import Family, Order, Sizes, by_rank, one_stage_per_rank
from shardwright.core.schedule.placement import looped


def rank_order(rank: int, sizes: Sizes) -> Order:
    return alternating(*on_one_stage(rank, sizes), sizes.ranks - 1 - rank + sizes.slices - 1)


ONE_F_ONE_B = Family(
    "1f1b", "arXiv 2006.09503, section 2.2", looped, by_rank(rank_order), one_stage_per_rank, takes_slices=True
)
