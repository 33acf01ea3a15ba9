"""1F1B: after a warm-up of one forward per later rank, forwards and backwards alternate.

Narayanan et al., arXiv 1806.03377 (PipeDream), with the flush of arXiv 2006.09503 (PipeDream-Flush), section 2.2.
"""

from shardwright.core.schedule.actions import B, F, cell
from shardwright.core.schedule.family import Family, Order, Sizes, Table, one_stage_per_rank
from shardwright.core.schedule.placement import looped


def alternating(stage: int, microbatches: int, warmup: int) -> Order:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, microbatches)
    order = [cell(stage, F, mb) for mb in range(warmup)]
    for mb in range(microbatches - warmup):
        order += [cell(stage, F, warmup + mb), cell(stage, B, mb)]
    order += [cell(stage, B, mb) for mb in range(microbatches - warmup, microbatches)]
    return tuple(order)


def generate(sizes: Sizes) -> Table:
    return tuple(alternating(rank, sizes.microbatches, sizes.ranks - 1 - rank) for rank in range(sizes.ranks))


ONE_F_ONE_B = Family("1f1b", "arXiv 2006.09503, section 2.2", looped, generate, one_stage_per_rank)
