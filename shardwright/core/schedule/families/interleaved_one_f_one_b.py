"""Interleaved 1F1B: several stages per rank, one forward and one backward in turn, depth first.

Narayanan et al., arXiv 2104.04473, section 2.2. Microbatches go through in rounds: a rank runs a whole round on one of
its stages before the next stage takes it up. The paper's rounds have as many microbatches as there are ranks; here, as
in torch, m // p rounds share the microbatches evenly, so m need be a multiple of the number of rounds only.
"""

from shardwright.core.schedule.actions import B, F, cell
from shardwright.core.schedule.family import Family, Sizes, Table
from shardwright.core.schedule.placement import looped

Visit = tuple[int, int]  # (index among the rank's stages, microbatch)


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


def forward_visits(sizes: Sizes) -> list[Visit]:
    """The forwards of any rank, in order."""
    size = round_size(sizes)
    starts = range(0, sizes.microbatches, size)
    chunks = range(sizes.virtual_stages)
    return [(chunk, first + k) for first in starts for chunk in chunks for k in range(size)]


def backward_visits(sizes: Sizes) -> list[Visit]:
    """The backwards of any rank, in order: those of the forwards, with the rank's last stage first."""
    return [(sizes.virtual_stages - 1 - chunk, mb) for chunk, mb in forward_visits(sizes)]


def warmup_length(sizes: Sizes, rank: int, per_hop: int) -> int:
    """The number of forwards before the first backward: all rounds but the last stage's, and some for each rank still
    to pass."""
    first = (sizes.virtual_stages - 1) * round_size(sizes) + per_hop * (sizes.ranks - 1 - rank)
    return min(first, sizes.microbatches * sizes.virtual_stages)


def generate(sizes: Sizes) -> Table:
    table = []
    for rank in range(sizes.ranks):
        forwards = [cell(rank + chunk * sizes.ranks, F, mb) for chunk, mb in forward_visits(sizes)]
        backwards = [cell(rank + chunk * sizes.ranks, B, mb) for chunk, mb in backward_visits(sizes)]
        warmup = warmup_length(sizes, rank, per_hop=2)
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [forward, backward]
        table.append(tuple(order + backwards[len(forwards) - warmup :]))
    return tuple(table)


INTERLEAVED_ONE_F_ONE_B = Family("interleaved-1f1b", "arXiv 2104.04473, section 2.2", looped, generate, even_rounds)
