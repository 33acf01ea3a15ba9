"""The passes that a rank runs between its stages' first forwards, and between their last backwards.

A stage's gradients are whole after its last backward, and its updated parameters are read by its first forward. Where a
rank has several stages, other microbatches pass between those (interleaved 1F1B, Narayanan et al., arXiv 2104.04473,
section 2.2), and traffic of the stages travels beside them.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from shardwright.core.schedule.actions import B, F, I, Kind, W
from shardwright.core.schedule.family import Order

Passes = tuple[tuple[int, Kind, int], ...]
"""Each a stage, a kind, and the number of such passes."""


@dataclass(frozen=True, slots=True)
class Between:
    """What a rank runs between two of its stages, one after the other in the model."""

    forwards: Passes
    """After the first forward of the earlier stage, before that of the later one."""
    backwards: Passes
    """After the last backward of the later stage, before that of the earlier one (without its first half, where it is
    split)."""


def passes_between(order: Order) -> tuple[Between, ...]:
    """One value for each pair of neighbours among the rank's stages; none where the stages do not begin in the order of
    the model, or end in another than the reverse of it."""
    parts = [part for action in order for part in action.flat if part.kind.is_compute]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, part in enumerate(parts):
        if part.kind is F:
            first.setdefault(part.stage, at)
        elif part.kind in (B, W):
            last[part.stage] = at
    stages = sorted(first)
    if stages != list(first) or stages[::-1] != sorted(last, key=lambda stage: last[stage]):
        return ()

    def counted(begin: int, end: int) -> Passes:
        between = [p for p in parts[begin + 1 : end] if p != parts[end].as_kind(I)]
        many = Counter((part.stage, part.kind) for part in between)
        return tuple((stage, kind, number) for (stage, kind), number in sorted(many.items()))

    return tuple(
        Between(counted(first[earlier], first[later]), counted(last[later], last[earlier]))
        for earlier, later in pairwise(stages)
    )
