"""Eager 1F1B: twice the warm-up of 1F1B, so that transfers have a forward's time to pass unseen.

Zhuang et al., arXiv 2211.05322, section 4: rank i of p holds up to 2(p - i) - 1 microbatches, where 1F1B holds p - i.
"""

from shardwright.core.schedule.families.alternating_passes import alternating, on_one_stage
from shardwright.core.schedule.family import Family, Order, Sizes, by_rank, one_stage_per_rank
from shardwright.core.schedule.placement import looped


def rank_order(rank: int, sizes: Sizes) -> Order:
    return alternating(*on_one_stage(rank, sizes), 2 * (sizes.ranks - 1 - rank) + sizes.slices - 1)


EAGER_ONE_F_ONE_B = Family(
    "eager-1f1b", "arXiv 2211.05322, section 4", looped, by_rank(rank_order), one_stage_per_rank, takes_slices=True
)
