"""Label helpers against numpy: dims that carry one label can be split together."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.errors import CaptureError
from shardwright.core.rules import op_rules as labels
from shardwright.core.rules.op_rules import Labelled


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes with as many entries: factors grouped in two ways, with ones strewn in."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=6))

    def grouped() -> tuple[int, ...]:
        shape, current = [], 1
        for factor in factors:
            current *= factor
            if draw(st.booleans()):
                shape.append(current)
                current = 1
        return (*shape, current) if current != 1 or not shape or draw(st.booleans()) else tuple(shape)

    return grouped(), grouped()


@given(reshapes())
def test_reshape_keeps_together_what_can_be_split_together(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    before, after = shapes
    labelled = labels.reshape(before, after)
    of_before, of_after = labelled.labels
    array = np.arange(math.prod(before)).reshape(before)
    whole = array.reshape(after)
    for label in set(of_before) - {-1}:
        i, j = of_before.index(label), of_after.index(label)
        pieces = math.gcd(before[i], after[j])
        if pieces == 1:
            continue
        local = [*after[:j], after[j] // pieces, *after[j + 1 :]]
        parts = [part.reshape(local) for part in np.split(array, pieces, axis=i)]
        assert np.array_equal(np.concatenate(parts, axis=j), whole)


@given(reshapes())
def test_reshape_finds_every_dim_that_stays(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """A dim of the same size with as many entries before it on both sides is the same dim."""
    before, after = shapes
    of_before, of_after = labels.reshape(before, after).labels
    starts = {(math.prod(before[:i]), size): i for i, size in enumerate(before) if size > 1}
    for j, size in enumerate(after):
        i = starts.get((math.prod(after[:j]), size))
        if size > 1 and i is not None:
            assert of_before[i] == of_after[j] >= 0


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_elementwise_is_numpy_broadcasting(full: list[int], data: st.DataObject) -> None:
    def operand() -> tuple[int, ...]:
        kept = full[data.draw(st.integers(0, len(full))) :]
        return tuple(size if data.draw(st.booleans()) else 1 for size in kept)

    shapes = [operand(), operand()]
    out = np.broadcast_shapes(*shapes)
    labelled = labels.elementwise(shapes, [out])
    rank = len(out)
    for shape, dims in zip((*shapes, out), labelled.labels, strict=True):
        for i, (size, label) in enumerate(zip(shape, dims, strict=True)):
            at = rank - len(shape) + i
            assert label == (at if size == out[at] and size != 1 else -1)


@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    st.data(),
)
def test_matmul_labels_multiply_to_its_work(lead: list[int], sizes: tuple[int, int, int], data: st.DataObject) -> None:
    """The product of the label sizes is the number of multiply-adds, and einsum with the labels is the product."""
    m, k, n = sizes

    def leading() -> tuple[int, ...]:
        kept = lead[data.draw(st.integers(0, len(lead))) :]
        return tuple(size if data.draw(st.booleans()) else 1 for size in kept)

    left = data.draw(st.sampled_from([(k,), (*leading(), m, k)]))
    right = data.draw(st.sampled_from([(k,), (*leading(), k, n)]))
    a, b = np.ones(left), np.ones(right)
    out = np.matmul(a, b)
    labelled = labels.matmul(left, right)
    assert [len(dims) for dims in labelled.labels] == [a.ndim, b.ndim, out.ndim]
    found: dict[int, int] = {}
    for shape, dims in zip((left, right, out.shape), labelled.labels, strict=True):
        for size, label in zip(shape, dims, strict=True):
            if label >= 0:
                assert found.setdefault(label, size) == size
    assert math.prod(found.values()) == out.size * k
    contracted = (set(labelled.labels[0]) | set(labelled.labels[1])) - set(labelled.labels[2]) - {-1}
    assert [found[label] for label in contracted] == [k]


def test_matmul_refuses_scalars() -> None:
    with pytest.raises(CaptureError, match="one dim or more"):
        labels.matmul((), (3,))


def work(labelled: Labelled, *shapes: tuple[int, ...]) -> int:
    found: dict[int, int] = {}
    for shape, dims in zip(shapes, labelled.labels, strict=True):
        for size, label in zip(shape, dims, strict=True):
            if label >= 0:
                found[label] = max(size, found.get(label, 1))
    return math.prod(found.values())


def test_convolution_work_and_roles() -> None:
    source, kernel, out = (4, 6, 9, 9), (8, 6, 3, 3), (4, 8, 7, 7)
    dense = labels.convolution(source, kernel, out)
    assert work(dense, source, kernel, out) == 4 * 8 * 49 * 6 * 9
    grouped = labels.convolution(source, (8, 3, 3, 3), out, groups=2)
    assert work(grouped, source, (8, 3, 3, 3), out) == 4 * 8 * 49 * 3 * 9
    depthwise = labels.convolution(source, (6, 1, 3, 3), (4, 6, 7, 7), groups=6)
    assert work(depthwise, source, (6, 1, 3, 3), (4, 6, 7, 7)) == 4 * 6 * 49 * 9
    back = labels.convolution((4, 8, 7, 7), (8, 6, 3, 3), source, transposed=True)
    assert work(back, (4, 8, 7, 7), (8, 6, 3, 3), source) == 4 * 49 * 8 * 6 * 9
    whole = {label for label, _ in dense.special}
    assert dense.labels[0][1] == dense.labels[1][1] not in whole  # input channels: contracted, may be split
    assert dense.labels[1][0] == dense.labels[2][1] not in whole  # output channels
    assert dict(grouped.special)[grouped.labels[1][0]] == "whole"
    assert depthwise.labels[0][1] == depthwise.labels[1][0] == depthwise.labels[2][1]


def test_gather_replaces_a_dim_by_those_of_the_index() -> None:
    table, index, out = labels.gather((5, 6, 7), 1, (2, 3)).labels
    assert out == (table[0], *index, table[2])
    assert labels.gather((5, 6, 7), 1, (2, 3)).special == ((table[1], "index"),)


def test_attention_with_one_key_head_and_a_mask() -> None:
    query, key, value, mask, out = labels.attention(
        "bhsd", "b_td", "b_tv", "bhsv", [(4, 1, 6, 10)]
    ).labels  # fmt: skip
    assert key[1] == value[1] == -1
    assert out == (*query[:3], value[3])
    assert mask == (query[0], -1, query[2], key[2])


def test_unbound_stack_and_repeat() -> None:
    assert labels.unbound((4, 5, 6), 1, 2) == Labelled(((0, 1, 2), (0, 2), (0, 2)), ((1, "whole"),))
    assert labels.stack((4, 6), 1, 2).labels == ((0, 1), (0, 1), (0, -1, 1))
    assert labels.repeat_within((4, 1, 6), 1).labels == ((0, 1, 2), (0, -1, 2))
    assert labels.same_sizes((4, 5, 6), (4, 7, 6), changed=(-1,)).labels == ((0, -1, -1), (0, -1, -1))


def test_meet_keeps_what_both_captures_agree_on() -> None:
    split = Labelled(((0, 1), (0, 1)), ((1, "statistic"),))
    assert labels.meet(split, split) is split
    other = Labelled(((0, 1), (-1, 1)), ((1, "whole"),))
    assert labels.meet(split, other) == Labelled(((0, 1), (-1, 1)), ((1, "whole"),))
    merged = Labelled(((0, 0), (0, 0)))
    assert labels.meet(split, merged).labels == ((0, 1), (0, 1))
    moved = Labelled(((0, 1), (0, 1)), (), (1,))
    still = Labelled(((0, 1), (0, 1)), (), (2,))
    assert labels.meet(moved, still) == Labelled(((0, 1), (0, 1)), ((0, "whole"), (1, "whole")))
