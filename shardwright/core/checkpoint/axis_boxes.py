"""Boxes of a tensor whose dims are groups of named axes: how the same entries lie in another order of those axes.

A fused weight ``[d, (part head size)]`` and three weights ``[d, head, size]`` have the same axes ``d part head size``;
what is a box of one is a few boxes of the other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from shardwright.core.checkpoint.boxes import Box, range_boxes

Dims = tuple[tuple[str, ...], ...]
"""The axes of every dim of a tensor, the outermost first; none for a dim of size 1."""
Ranges = Mapping[str, tuple[int, int]]
"""For every axis the first index and the number of indices."""


@dataclass(frozen=True, slots=True)
class Run:
    """A box of a tensor, and the ranges of axes that it holds."""

    box: Box
    ranges: dict[str, tuple[int, int]]


def sizes_of(dims: Dims, axes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor of such dims."""
    return tuple(math.prod(axes[axis] for axis in group) for group in dims)


def runs_in(dims: Dims, axes: Mapping[str, int], box: Box) -> Iterator[Run]:
    """The ranges of axes that make up a box of a tensor, each with its part of the box.

    Args:
        axes: the size of every axis.
        box: of the tensor.
    """
    found = []
    for group, start, size in zip(dims, box.start, box.shape, strict=True):
        own = [axes[axis] for axis in group]
        held = []
        for part in range_boxes(own, start, start + size):
            first = _place(part.start, own)
            held.append((first, part.entries, dict(zip(group, zip(part.start, part.shape, strict=True), strict=True))))
        found.append(held)
    yield from _joined(found)


def runs_of(dims: Dims, axes: Mapping[str, int], ranges: Ranges) -> Iterator[Run]:
    """The boxes of a tensor that hold ranges of its axes, each with the ranges in it: the inverse of `runs_in`."""
    found = []
    for group in dims:
        own = [axes[axis] for axis in group]
        # From the innermost axis on, whole axes and the first one that is not lie beside each other.
        beside = len(group)
        while beside and (beside == len(group) or ranges[group[beside]] == (0, own[beside])):
            beside -= 1
        held = []
        outer = [range(ranges[axis][0], sum(ranges[axis])) for axis in group[:beside]]
        for indices in product(*outer):
            inner = [ranges[axis] for axis in group[beside:]]
            first = _place([*indices, *(start for start, _ in inner)], own)
            own_ranges = [*((index, 1) for index in indices), *inner]
            held.append((first, math.prod(n for _, n in inner), dict(zip(group, own_ranges, strict=True))))
        found.append(held)
    yield from _joined(found)


def _joined(found: Sequence[Sequence[tuple[int, int, dict[str, tuple[int, int]]]]]) -> Iterator[Run]:
    for parts in product(*found):
        box = Box(tuple(first for first, _, _ in parts), tuple(size for _, size, _ in parts))
        yield Run(box, {axis: held for _, _, ranges in parts for axis, held in ranges.items()})


def _place(indices: Sequence[int], sizes: Sequence[int]) -> int:
    place = 0
    for index, size in zip(indices, sizes, strict=True):
        place = place * size + index
    return place
