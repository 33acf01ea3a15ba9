"""ZB-H1: 1F1B's memory and a third of its bubble, by putting off weight gradients (Qi et al., arXiv 2401.10241, 2.1).

One stage per rank; rank i warms up with p - i forwards and puts off i weight gradients, so that every rank holds p
microbatches at its fullest.
"""

from shardwright.core.schedule.actions import F, I, Kind, W, cell
from shardwright.core.schedule.family import Family, Order, Sizes, Table, one_stage_per_rank
from shardwright.core.schedule.placement import looped


def rank_order(rank: int, sizes: Sizes) -> Order:
    m = sizes.microbatches
    warmup = min(sizes.ranks - 1 - rank, m)
    kinds: list[Kind] = [F] * warmup
    for count in range(m):
        kinds += [F] * (warmup + count < m) + [I] + [W] * (count >= rank)
    kinds += [W] * min(rank, m)
    return numbered(rank, kinds)


def numbered(stage: int, kinds: list[Kind]) -> Order:
    """The actions of one stage, each kind taking the microbatches in order."""
    done = {F: 0, I: 0, W: 0}
    order = []
    for kind in kinds:
        order.append(cell(stage, kind, done[kind]))
        done[kind] += 1
    return tuple(order)


def generate(sizes: Sizes) -> Table:
    return tuple(rank_order(rank, sizes) for rank in range(sizes.ranks))


ZERO_BUBBLE_H1 = Family("zb-h1", "arXiv 2401.10241, section 2.1", looped, generate, one_stage_per_rank)
