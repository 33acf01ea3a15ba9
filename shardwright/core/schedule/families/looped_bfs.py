"""Looped BFS: several stages per rank, every microbatch through one stage before the next: breadth first.

Lamy-Poirier, arXiv 2211.05953, section 4. Backwards take stages and microbatches from the last to the first, as torch's
do.
"""

from shardwright.core.schedule.actions import B, F, cell
from shardwright.core.schedule.family import Family, Sizes, Table
from shardwright.core.schedule.placement import looped


def generate(sizes: Sizes) -> Table:
    table = []
    for rank in range(sizes.ranks):
        visits = [(stage, mb) for stage in range(rank, sizes.stages, sizes.ranks) for mb in range(sizes.microbatches)]
        forwards = [cell(stage, F, mb) for stage, mb in visits]
        backwards = [cell(stage, B, mb) for stage, mb in reversed(visits)]
        table.append(tuple(forwards + backwards))
    return tuple(table)


LOOPED_BFS = Family("looped-bfs", "arXiv 2211.05953, section 4", looped, generate, lambda sizes: None)
