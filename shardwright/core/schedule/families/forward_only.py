"""Forward only: inference and evaluation, microbatches in order and no backward."""

from shardwright.core.schedule.actions import F, cell
from shardwright.core.schedule.family import Family, Sizes, Table, one_stage_per_rank
from shardwright.core.schedule.placement import looped


def generate(sizes: Sizes) -> Table:
    return tuple(tuple(cell(rank, F, mb) for mb in range(sizes.microbatches)) for rank in range(sizes.ranks))


FORWARD_ONLY = Family(
    "forward-only", "the forward half of arXiv 1811.06965", looped, generate, one_stage_per_rank, trains=False
)
