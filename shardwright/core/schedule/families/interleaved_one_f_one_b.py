"""Interleaved 1F1B: several stages per rank, one forward and one backward in turn, depth first.

Narayanan et al., arXiv 2104.04473, section 2.2. Microbatches go through in rounds: a rank runs a whole round on one of
its stages before the next stage takes it up. The paper's rounds have as many microbatches as there are ranks; here, as
in torch, m // p rounds share the microbatches evenly, so m need be a multiple of the number of rounds only.
"""

from shardwright.core.schedule.families.alternating_passes import Visit, alternating, passes_of
from shardwright.core.schedule.family import Family, Order, Sizes, by_rank
from shardwright.core.schedule.placement import looped


def round_size(sizes: Sizes) -> int:
    """The number of microbatches in a round."""
    return sizes.microbatches // max(1, sizes.microbatches // sizes.ranks)


def even_rounds(sizes: Sizes) -> str | None:
    """The refusal of the families that go in rounds."""
    ranks, batches = sizes.ranks, sizes.microbatches
    rounds = max(1, batches // ranks)
    if batches % rounds == 0:
        return None
    fits = [m for m in range(1, 2 * batches + ranks) if m % max(1, m // ranks) == 0]
    below, above = max(m for m in fits if m < batches), min(m for m in fits if m > batches)
    return (
        f"{batches} microbatches do not divide into {rounds} even rounds (microbatches // ranks of them); "
        f"microbatches={below} and microbatches={above} would"
    )


def in_rounds(rank: int, sizes: Sizes) -> tuple[list[Visit], list[Visit]]:
    """The forwards of a rank, in order, and its backwards: the same with the rank's last stage first."""
    size, stages = round_size(sizes), range(rank, sizes.stages, sizes.ranks)
    rounds = [range(first, first + size) for first in range(0, sizes.microbatches, size)]
    forwards, backwards = (
        [visit for round_ in rounds for stage in order for visit in passes_of(stage, round_, sizes.slices)[way]]
        for way, order in enumerate((stages, stages[::-1]))
    )
    return forwards, backwards


def warmup_length(sizes: Sizes, rank: int, per_hop: int) -> int:
    """The number of forwards before the first backward: all rounds but the last stage's, and some for each rank still
    to pass."""
    first = (sizes.virtual_stages - 1) * round_size(sizes) * sizes.slices + per_hop * (sizes.ranks - 1 - rank)
    return min(first + sizes.slices - 1, sizes.microbatches * sizes.slices * sizes.virtual_stages)


def rank_order(rank: int, sizes: Sizes) -> Order:
    return alternating(*in_rounds(rank, sizes), warmup_length(sizes, rank, per_hop=2))


INTERLEAVED_ONE_F_ONE_B = Family(
    "interleaved-1f1b",
    "arXiv 2104.04473, section 2.2",
    looped,
    by_rank(rank_order),
    even_rounds,
    takes_slices=True,
)
