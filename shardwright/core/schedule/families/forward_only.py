"""Forward only: inference and evaluation, microbatches in order and no backward."""

from shardwright.core.schedule.actions import F, cell
from shardwright.core.schedule.family import Family, Order, Sizes, by_rank, one_stage_per_rank
from shardwright.core.schedule.placement import looped


def rank_order(rank: int, sizes: Sizes) -> Order:
    return tuple(cell(rank, F, mb) for mb in range(sizes.microbatches))


FORWARD_ONLY = Family(
    "forward-only",
    "the forward half of arXiv 1811.06965",
    looped,
    by_rank(rank_order),
    one_stage_per_rank,
    trains=False,
)
