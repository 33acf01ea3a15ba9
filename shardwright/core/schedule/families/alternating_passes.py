"""Orders in which a rank alternates between forwards and backwards, after a warm-up of forwards alone."""

from collections.abc import Sequence
from itertools import zip_longest

from shardwright.core.schedule.actions import Action, B, F, I, W, cell
from shardwright.core.schedule.family import Order, Sizes

Visit = tuple[int, int]
"""A stage and a microbatch."""


def on_one_stage(rank: int, sizes: Sizes) -> list[Visit]:
    """The microbatches of a rank that has one stage, in order."""
    return [(rank, mb) for mb in range(sizes.microbatches)]


def alternating(forwards: Sequence[Visit], backwards: Sequence[Visit], warmup: int) -> Order:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    return _alternated(forwards, [[cell(stage, B, mb)] for stage, mb in backwards], warmup)


def with_late_weights(forwards: Sequence[Visit], backwards: Sequence[Visit], warmup: int, late: int) -> Order:
    """The same with backwards split, each weight gradient behind the input gradient `late` places further on."""
    passes = [[cell(stage, I, mb)] for stage, mb in backwards]
    for count, (stage, mb) in enumerate(backwards):
        passes[min(count + late, len(passes) - 1)].append(cell(stage, W, mb))
    return _alternated(forwards, passes, warmup)


def _alternated(forwards: Sequence[Visit], backwards: Sequence[Sequence[Action]], warmup: int) -> Order:
    ahead = [cell(stage, F, mb) for stage, mb in forwards]
    order = ahead[:warmup]
    for forward, backward in zip_longest(ahead[warmup:], backwards):
        order += [forward, *backward] if forward is not None else backward
    return tuple(order)
