"""Boxes of a tensor's indices, and the boxes that a rank's part of a tensor consists of.

A part is what a rank holds of one tensor: a shard along the tensor axis, or of that a run of entries in the order of
memory, as sharded state is cut. Either is a few boxes of the whole tensor, so that a part under one plan is read from
the parts under another by intersecting boxes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.core.layout.placements import Split


@dataclass(frozen=True, slots=True)
class Box:
    """The indices from ``start`` on, ``shape`` of them, along every dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """The box of all indices of a shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def entries(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The index after the last one, along every dim."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def meet(self, other: "Box") -> "Box | None":
        """What two boxes share; None where that is nothing."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(b - a for a, b in zip(start, map(min, self.stop, other.stop), strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def inside(self, outer: "Box") -> tuple[slice, ...]:
        """The slices of an array of ``outer`` that hold this box."""
        return tuple(
            slice(a - origin, a - origin + n) for a, n, origin in zip(self.start, self.shape, outer.start, strict=True)
        )

    def moved(self, by: Sequence[int]) -> "Box":
        """The box, so many indices on along every dim."""
        return Box(tuple(a + b for a, b in zip(self.start, by, strict=True)), self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class Place:
    """A box of the whole tensor, and where its entries lie in the memory of a part."""

    box: Box
    offset: int
    """The place of the first entry, in entries from the part's first one."""
    strides: tuple[int, ...]
    """Entries from one index to the next along every dim."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of one tensor.

    ``split``: how the tensor lies along the tensor axis, of ``ways`` ranks, of which this is number ``coordinate``;
    None: whole. ``strides``: the order of memory of that shard, in entries; None: row by row. ``span``: the first
    entry in that order that is held, and the one after the last; None: all of them.
    """

    shape: tuple[int, ...]
    split: Split | None = None
    ways: int = 1
    coordinate: int = 0
    strides: tuple[int, ...] | None = None
    span: tuple[int, int] | None = None

    def places(self) -> list[Place]:
        """The boxes that are held, and where. None overlap."""
        shards = _shard_boxes(self.shape, self.split, self.ways, self.coordinate)
        local = list(self.shape)
        if self.split is not None:
            local[self.split.dim] //= self.ways
        strides = _by_rows(local) if self.strides is None else self.strides
        first, end = (0, math.prod(local)) if self.span is None else self.span
        order = sorted(range(len(local)), key=lambda dim: (-strides[dim], dim))
        found = []
        for run in range_boxes([local[dim] for dim in order], first, end):
            held = Box(
                *(tuple(values[order.index(dim)] for dim in range(len(local))) for values in (run.start, run.shape))
            )
            for whole, shard in shards:
                shared = held.meet(shard)
                if shared is None:
                    continue
                offset = sum(a * s for a, s in zip(shared.start, strides, strict=True)) - first
                box = shared.moved([a - b for a, b in zip(whole.start, shard.start, strict=True)])
                found.append(Place(box, offset, tuple(strides)))
        return found


def range_boxes(shape: Sequence[int], first: int, end: int) -> Iterator[Box]:
    """The boxes, in order, that hold the entries from ``first`` to ``end`` of a tensor whose rows lie one after the
    other: at most two for each dim but the last, and one."""
    if first >= end:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    row, last = first // inner, (end - 1) // inner
    if row == last and (first % inner or end % inner):
        for box in range_boxes(shape[1:], first - row * inner, end - row * inner):
            yield Box((row, *box.start), (1, *box.shape))
        return
    whole_from, whole_to = -(-first // inner), end // inner
    yield from range_boxes(shape, first, whole_from * inner)
    if whole_from < whole_to:
        yield Box((whole_from, *(0,) * (len(shape) - 1)), (whole_to - whole_from, *shape[1:]))
    yield from range_boxes(shape, max(first, whole_to * inner), end)


def _shard_boxes(shape: Sequence[int], split: Split | None, ways: int, coordinate: int) -> list[tuple[Box, Box]]:
    """The boxes of a shard, one for each block that the split dim is made of: in the whole tensor, and in the shard."""
    if split is None:
        return [(Box.whole(shape), Box.whole(shape))]
    dim, found, begins, own = split.dim, [], 0, 0
    for size in split.blocks or (shape[split.dim],):
        each = size // ways
        inside = [*shape]
        inside[dim] = each
        starts = [0] * len(shape), [0] * len(shape)
        starts[0][dim], starts[1][dim] = begins + coordinate * each, own
        found.append((Box(tuple(starts[0]), tuple(inside)), Box(tuple(starts[1]), tuple(inside))))
        begins, own = begins + size, own + each
    return found


def _by_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose rows lie one after the other."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
