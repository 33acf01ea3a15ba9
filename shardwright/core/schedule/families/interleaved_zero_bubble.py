"""Interleaved zero bubble: interleaved 1F1B with the backward split, weight gradients put off to fill the bubble.

Qi et al., arXiv 2401.10241: the memory-frugal schedule of section 2.1 with several stages per rank, as torch has it.
Rank r puts off its first r weight gradients; each later backward is followed by the oldest one still owed.
"""

from shardwright.core.schedule.actions import F, I, W, cell
from shardwright.core.schedule.families.interleaved_one_f_one_b import (
    backward_visits,
    even_rounds,
    forward_visits,
    warmup_length,
)
from shardwright.core.schedule.family import Family, Sizes, Table
from shardwright.core.schedule.placement import looped


def generate(sizes: Sizes) -> Table:
    table = []
    for rank in range(sizes.ranks):
        forwards = [cell(rank + chunk * sizes.ranks, F, mb) for chunk, mb in forward_visits(sizes)]
        backwards = [(rank + chunk * sizes.ranks, mb) for chunk, mb in backward_visits(sizes)]
        warmup = warmup_length(sizes, rank, per_hop=1)
        order, owed = forwards[:warmup], 0
        for count, (stage, mb) in enumerate(backwards):
            order += forwards[warmup + count : warmup + count + 1]
            order.append(cell(stage, I, mb))
            if count >= rank:
                order.append(cell(backwards[owed][0], W, backwards[owed][1]))
                owed += 1
        order += [cell(stage, W, mb) for stage, mb in backwards[owed:]]
        table.append(tuple(order))
    return tuple(table)


INTERLEAVED_ZERO_BUBBLE = Family("interleaved-zb", "arXiv 2401.10241, section 2.1", looped, generate, even_rounds)
