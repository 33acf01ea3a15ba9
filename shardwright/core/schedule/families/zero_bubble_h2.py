"""ZB-H2: no bubble when forward, input gradient and weight gradient take as long (Qi et al., arXiv 2401.10241, 2.2).

Rank i warms up with 2(p - i) - 1 forwards, which fills the time until its first backward, and puts off the last 2i
weight gradients before its forwards run out, so that the ranks above get their gradients as fast as they can use them;
what was put off fills the end. Every rank holds 2p - 1 microbatches at its fullest.
"""

from itertools import count

from shardwright.core.schedule.actions import F, I, Kind, W, cell
from shardwright.core.schedule.family import Family, Order, Sizes, by_rank, one_stage_per_rank
from shardwright.core.schedule.placement import looped


def rank_order(rank: int, sizes: Sizes) -> Order:
    m = sizes.microbatches
    warmup = min(2 * (sizes.ranks - rank) - 1, m)
    steady = m - warmup
    put_off_from = max(0, steady - 2 * rank)
    kinds: list[Kind] = [F] * warmup
    for mb in range(steady):
        kinds += [I] + [W] * (mb < put_off_from) + [F]
    for _ in range(warmup):
        kinds += [I, W]
    kinds += [W] * (steady - put_off_from)
    microbatch = {F: count(), I: count(), W: count()}
    return tuple(cell(rank, kind, next(microbatch[kind])) for kind in kinds)


ZERO_BUBBLE_H2 = Family("zb-h2", "arXiv 2401.10241, section 2.2", looped, by_rank(rank_order), one_stage_per_rank)
