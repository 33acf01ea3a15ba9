"""Eager 1F1B: twice the warm-up of 1F1B, so that transfers have a forward's time to pass unseen.

Zhuang et al., arXiv 2211.05322, section 4: rank i of p holds up to 2(p - i) - 1 microbatches, where 1F1B holds p - i.
"""

from shardwright.core.schedule.families.one_f_one_b import alternating
from shardwright.core.schedule.family import Family, Sizes, Table, one_stage_per_rank
from shardwright.core.schedule.placement import looped


def generate(sizes: Sizes) -> Table:
    return tuple(alternating(rank, sizes.microbatches, 2 * (sizes.ranks - 1 - rank)) for rank in range(sizes.ranks))


EAGER_ONE_F_ONE_B = Family("eager-1f1b", "arXiv 2211.05322, section 4", looped, generate, one_stage_per_rank)
