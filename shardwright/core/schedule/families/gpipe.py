"""GPipe: every forward, then every backward (Huang et al., arXiv 1811.06965, section 2.3)."""

from shardwright.core.schedule.families.alternating_passes import alternating, on_one_stage
from shardwright.core.schedule.family import Family, Order, Sizes, by_rank, one_stage_per_rank
from shardwright.core.schedule.placement import looped


def rank_order(rank: int, sizes: Sizes) -> Order:
    forwards, backwards = on_one_stage(rank, sizes)
    return alternating(forwards, backwards, len(forwards))


GPIPE = Family(
    "gpipe", "arXiv 1811.06965, section 2.3", looped, by_rank(rank_order), one_stage_per_rank, takes_slices=True
)
