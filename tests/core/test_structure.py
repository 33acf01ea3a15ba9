"""Layouts between a parameter's own dims and slot dims."""

import itertools

import numpy as np
import pytest

from shardwright.core.errors import PlanError
from shardwright.core.layout.placements import Layout, Split
from shardwright.core.model.structure import SlotDims, in_own_dims, in_slot_dims

EXPERTS: SlotDims = (((2, 6),), ((0, 3), (1, 8)))
"""A fused expert matrix [3 experts, 8 outputs, 6 inputs]: inputs, then experts × outputs."""


def pieces(array: np.ndarray, split: Split, ranks: int) -> list[np.ndarray]:
    parts = np.split(array, np.cumsum(split.blocks or (array.shape[split.dim],))[:-1], axis=split.dim)
    return [
        np.concatenate([np.split(p, ranks, axis=split.dim)[r] for p in parts], axis=split.dim) for r in range(ranks)
    ]


@pytest.mark.parametrize(
    "own", [Split(2), Split(1), Split(1, (4, 4)), Split(1, (2, 6)), Split(2, (2, 4)), Split(0, (1, 2))]
)
def test_slot_dims_and_back(own: Split) -> None:
    """The slot is the array with its dims in slot order, merged: both splits give each rank the same entries."""
    there = in_slot_dims(Layout.of(tp=own), EXPERTS)
    assert in_own_dims(there, EXPERTS) == Layout.of(tp=own)
    split = there.on("tp")
    assert isinstance(split, Split)
    array = np.arange(3 * 8 * 6).reshape(3, 8, 6)
    merged = array.transpose(2, 0, 1).reshape(6, 24)
    if own == Split(0, (1, 2)):  # of which no rank count cuts every block: the round trip is all there is to see
        return
    for mine, theirs in zip(pieces(array, own, 2), pieces(merged, split, 2), strict=True):
        assert sorted(mine.ravel()) == sorted(theirs.ravel())


def test_a_whole_outer_dim_needs_no_blocks() -> None:
    assert in_slot_dims(Layout.of(tp=Split(0)), EXPERTS) == Layout.of(tp=Split(1))
    assert in_own_dims(Layout.of(tp=Split(1)), EXPERTS) == Layout.of(tp=Split(0))


def test_blocks_of_no_dim_are_refused() -> None:
    for blocks in itertools.permutations((5, 8, 11)):
        with pytest.raises(PlanError, match="blocks that are those of none of them"):
            in_own_dims(Layout.of(tp=Split(1, blocks)), EXPERTS)
