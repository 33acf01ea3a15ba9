"""ZB-H1: 1F1B's memory and a third of its bubble, by putting off weight gradients (Qi et al., arXiv 2401.10241, 2.1).

One stage per rank; rank i warms up with p - i forwards and puts off i weight gradients, so that every rank holds p
microbatches at its fullest.
"""

from shardwright.core.schedule.families.alternating_passes import on_one_stage, with_late_weights
from shardwright.core.schedule.family import Family, Order, Sizes, by_rank, one_stage_per_rank
from shardwright.core.schedule.placement import looped


def rank_order(rank: int, sizes: Sizes) -> Order:
    return with_late_weights(*on_one_stage(rank, sizes), sizes.ranks - 1 - rank + sizes.slices - 1, late=rank)


ZERO_BUBBLE_H1 = Family(
    "zb-h1", "arXiv 2401.10241, section 2.1", looped, by_rank(rank_order), one_stage_per_rank, takes_slices=True
)
