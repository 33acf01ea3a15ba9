"""V-Half: two stages per rank, down and back up, in half of 1F1B's memory (Qi et al., arXiv 2405.15362, section 3).

The block goes down at one rank every two slots and comes back up at one every slot, and so holds floor((p + 2) / 2)
microbatches on the fullest rank.
"""

from shardwright.core.schedule.families.building_block import repeat
from shardwright.core.schedule.family import Family, Sizes, Table, two_stages_per_rank
from shardwright.core.schedule.placement import vee


def generate(sizes: Sizes) -> Table:
    p = sizes.ranks
    shift = 0 if p % 2 else 3  # Without it the backwards of an even number of ranks fall on slots of the forwards.
    block = [(2 * i, 3 * p - 2 - i, 3 * p - 1 + shift + 2 * i, 6 * p - 2 + shift - i) for i in range(p)]
    return repeat(block, sizes)


V_HALF = Family("v-half", "arXiv 2405.15362, section 3", vee, generate, two_stages_per_rank)
