"""ZB-V: two stages per rank, down and back up; no bubble and 1F1B's memory when F, I and W take as long.

Qi et al., arXiv 2401.10241, section 6. Each rank falls into the cycle F0 I0 W0 F1 I1 W1, where 0 is its stage on the
way down and 1 the one on the way up. With fewer than 2p - 1 microbatches the phases are those of 2p - 1, shortened.
"""

from shardwright.core.schedule.families.two_stage_phases import Tape
from shardwright.core.schedule.family import Family, Order, Sizes, by_rank, two_stages_per_rank
from shardwright.core.schedule.placement import vee


def rank_order(rank: int, sizes: Sizes) -> Order:
    ranks = sizes.ranks
    full = max(sizes.microbatches, 2 * ranks - 1)
    below = ranks - rank
    tape = Tape((rank, 2 * ranks - 1 - rank))
    tape.play(2 * below - 1, "F0")
    tape.play(rank, "F1 F0")
    tape.play(below, "F1 I1 W1")
    fresh = full - (2 * ranks - 1 - rank)
    tape.play(fresh, "F0 I0 W0 F1 I1 W1")
    tape.play(full - ranks - fresh, "I0 W0 F1 I1 W1")
    tape.play(rank, "I0 I1")
    tape.play(below, "I0 W0")
    tape.play(rank, "W1")
    tape.play(rank, "W0")
    return tape.finish(sizes.microbatches)


ZERO_BUBBLE_V = Family("zbv", "arXiv 2401.10241, section 6", vee, by_rank(rank_order), two_stages_per_rank)
