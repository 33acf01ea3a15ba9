"""V-Min: two stages per rank, down and back up, in a third of 1F1B's memory (Qi et al., arXiv 2405.15362, section 3).

The block goes down and up, twice, at one rank every slot: the shortest there is. It holds floor((p + 4) / 3)
microbatches on the fullest rank, and leaves the largest bubble of its kind.
"""

from shardwright.core.schedule.families.building_block import repeat
from shardwright.core.schedule.family import Family, Sizes, Table, two_stages_per_rank
from shardwright.core.schedule.placement import vee


def generate(sizes: Sizes) -> Table:
    p = sizes.ranks
    shift = 0 if p % 3 else 2  # Without it the backwards of a multiple of three ranks fall on slots of the forwards.
    block = [(i, 2 * p - 1 - i, 2 * p + shift + i, 4 * p - 1 + shift - i) for i in range(p)]
    return repeat(block, sizes)


V_MIN = Family("v-min", "arXiv 2405.15362, section 3", vee, generate, two_stages_per_rank)
