"""Parts of tensors as boxes: each entry of the whole tensor in exactly one place of one rank."""

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.checkpoint.boxes import Box, Part, range_boxes
from shardwright.core.layout.placements import Split
from tests.comparison import Comparison

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_range_of_entries_is_a_few_boxes_in_order(shape: tuple[int, ...], data: Any) -> None:
    size = math.prod(shape)
    first = data.draw(st.integers(0, size))
    end = data.draw(st.integers(first, size))
    numbers = np.arange(size).reshape(shape)
    boxes = list(range_boxes(shape, first, end))
    found = [n for box in boxes for n in numbers[box.inside(Box.whole(shape))].reshape(-1).tolist()]
    assert found == list(range(first, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(SHAPES.filter(bool), st.data())
def test_two_boxes_share_what_both_hold(shape: tuple[int, ...], data: Any) -> None:
    def drawn() -> Box:
        starts = [data.draw(st.integers(0, n - 1)) for n in shape]
        return Box(tuple(starts), tuple(data.draw(st.integers(1, n - a)) for a, n in zip(starts, shape, strict=True)))

    one, other = drawn(), drawn()
    marks = np.zeros((2, *shape), dtype=bool)
    for mark, box in zip(marks, (one, other), strict=True):
        mark[box.inside(Box.whole(shape))] = True
    shared = one.meet(other)
    expected = marks.all(axis=0)
    found = np.zeros(shape, dtype=bool)
    if shared is not None:
        found[shared.inside(Box.whole(shape))] = True
    Comparison().equal(found, expected).require()


@given(st.data())
def test_parts_of_all_ranks_make_up_the_tensor(data: Any) -> None:
    """Shards along the tensor axis, in blocks or not, in any order of memory, and of them runs of entries."""
    ways, ranks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    shape = list(data.draw(SHAPES.filter(bool)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    blocks = tuple(ways * n for n in data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    shape[dim] = sum(blocks)
    split = Split(dim, blocks if len(blocks) > 1 else ())
    whole = np.arange(math.prod(shape)).reshape(shape)
    order = data.draw(st.permutations(range(len(shape))))
    seen = np.zeros(shape, dtype=int)
    for coordinate in range(ways):
        ends = np.cumsum(blocks)
        pieces = [
            np.take(whole, range(end - n + coordinate * n // ways, end - n + (coordinate + 1) * n // ways), axis=dim)
            for n, end in zip(blocks, ends, strict=True)
        ]
        shard = np.concatenate(pieces, axis=dim)
        memory = np.ascontiguousarray(shard.transpose(order))
        inverse = np.argsort(order)
        strides = tuple(np.array(memory.strides)[inverse] // memory.itemsize)
        cuts = sorted(data.draw(st.lists(st.integers(0, shard.size), min_size=ranks - 1, max_size=ranks - 1)))
        for first, end in zip([0, *cuts], [*cuts, shard.size], strict=True):
            held = memory.reshape(-1)[first:end]
            part = Part(tuple(shape), split, ways, coordinate, strides, (first, end))
            for place in part.places():
                bytes_apart = [s * held.itemsize for s in place.strides]
                view = np.lib.stride_tricks.as_strided(held[place.offset :], place.box.shape, bytes_apart)
                inside = place.box.inside(Box.whole(shape))
                Comparison().equal(view, whole[inside]).require()
                seen[inside] += 1
    assert (seen == 1).all()
