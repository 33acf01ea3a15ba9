"""Forward only: inference and evaluation, microbatches in order and no backward."""

from shardwright.core.schedule.actions import F, cell
from shardwright.core.schedule.families.alternating_passes import on_one_stage
from shardwright.core.schedule.family import Family, Order, Sizes, by_rank, one_stage_per_rank
from shardwright.core.schedule.placement import looped


def rank_order(rank: int, sizes: Sizes) -> Order:
    forwards, _ = on_one_stage(rank, sizes)
    return tuple(cell(stage, F, *of) for stage, *of in forwards)


FORWARD_ONLY = Family(
    "forward-only",
    "the forward half of arXiv 1811.06965",
    looped,
    by_rank(rank_order),
    one_stage_per_rank,
    trains=False,
    takes_slices=True,
)
