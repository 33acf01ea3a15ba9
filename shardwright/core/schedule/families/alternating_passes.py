"""Orders in which a rank alternates between forwards and backwards, after a warm-up of forwards alone."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from shardwright.core.schedule.actions import Action, B, F, I, W, cell
from shardwright.core.schedule.family import Order, Sizes

Visit = tuple[int, int] | tuple[int, int, int]
"""A stage and a microbatch, and a slice of it where there are several."""


def passes_of(stage: int, microbatches: Iterable[int], slices: int) -> tuple[list[Visit], list[Visit]]:
    """The forwards of some microbatches on one stage, in order, and their backwards: slices from the last to the first,
    as each gives gradients to those before it."""
    if slices == 1:
        visits: list[Visit] = [(stage, mb) for mb in microbatches]
        return visits, visits
    order = range(slices)
    both = [([(stage, mb, k) for k in order], [(stage, mb, k) for k in reversed(order)]) for mb in microbatches]
    return [one for forwards, _ in both for one in forwards], [one for _, backwards in both for one in backwards]


def on_one_stage(rank: int, sizes: Sizes) -> tuple[list[Visit], list[Visit]]:
    """The forwards and the backwards of a rank that has one stage, in order."""
    return passes_of(rank, range(sizes.microbatches), sizes.slices)


def alternating(forwards: Sequence[Visit], backwards: Sequence[Visit], warmup: int) -> Order:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    return _alternated(forwards, [[cell(stage, B, *of)] for stage, *of in backwards], warmup)


def with_late_weights(forwards: Sequence[Visit], backwards: Sequence[Visit], warmup: int, late: int) -> Order:
    """The same with backwards split, each weight gradient behind the input gradient `late` places further on."""
    passes = [[cell(stage, I, *of)] for stage, *of in backwards]
    for count, (stage, *of) in enumerate(backwards):
        passes[min(count + late, len(passes) - 1)].append(cell(stage, W, *of))
    return _alternated(forwards, passes, warmup)


def _alternated(forwards: Sequence[Visit], backwards: Sequence[Sequence[Action]], warmup: int) -> Order:
    ahead = [cell(stage, F, *of) for stage, *of in forwards]
    order = ahead[:warmup]
    for forward, backward in zip_longest(ahead[warmup:], backwards):
        order += [forward, *backward] if forward is not None else backward
    return tuple(order)
