"""GPipe: every forward, then every backward (Huang et al., arXiv 1811.06965, section 2.3)."""

from shardwright.core.schedule.actions import B, F, cell
from shardwright.core.schedule.family import Family, Sizes, Table, one_stage_per_rank
from shardwright.core.schedule.placement import looped


def generate(sizes: Sizes) -> Table:
    batches = range(sizes.microbatches)
    return tuple(
        tuple(cell(stage, F, mb) for mb in batches) + tuple(cell(stage, B, mb) for mb in batches)
        for stage in range(sizes.ranks)
    )


GPIPE = Family("gpipe", "arXiv 1811.06965, section 2.3", looped, generate, one_stage_per_rank)
