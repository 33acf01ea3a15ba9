"""Interleaved zero bubble: interleaved 1F1B with the backward split, weight gradients put off to fill the bubble.

Qi et al., arXiv 2401.10241: the memory-frugal schedule of section 2.1 with several stages per rank, as torch has it.
Rank r puts off its first r weight gradients; each later backward is followed by the oldest one still owed.
"""

from shardwright.core.schedule.families.alternating_passes import with_late_weights
from shardwright.core.schedule.families.interleaved_one_f_one_b import even_rounds, in_rounds, warmup_length
from shardwright.core.schedule.family import Family, Order, Sizes, by_rank
from shardwright.core.schedule.placement import looped


def rank_order(rank: int, sizes: Sizes) -> Order:
    return with_late_weights(*in_rounds(rank, sizes), warmup_length(sizes, rank, per_hop=1), late=rank)


INTERLEAVED_ZERO_BUBBLE = Family(
    "interleaved-zb", "arXiv 2401.10241, section 2.1", looped, by_rank(rank_order), even_rounds, takes_slices=True
)
