"""Bytes of conversions along one axis, against the table of OneFlow's paper (arXiv 2110.15032, table 2)."""

import pytest

from shardwright.core.errors import LayoutError
from shardwright.core.layout.conversion_bytes import table_bytes
from shardwright.core.layout.placements import Partial, Placement, Replicate, Split

SIZE, RANKS = 120.0, 4
S0, S1, B, P = Split(0), Split(1), Replicate(), Partial("sum")
TABLE: dict[tuple[Placement, Placement], float] = {
    (S0, S0): 0, (S0, S1): 90, (S0, B): 360,
    (S1, S0): 90, (S1, S1): 0, (S1, B): 360,
    (B, S0): 0, (B, S1): 0, (B, B): 0, (B, P): 0,
    (P, S0): 360, (P, S1): 360, (P, B): 720, (P, P): 0,
}  # fmt: skip
"""(n-1)/n·|T| between splits, (n-1)·|T| to gather and to reduce into pieces, 2(n-1)·|T| to reduce and share."""


@pytest.mark.parametrize(("before", "after"), TABLE)
def test_the_papers_table(before: Placement, after: Placement) -> None:
    assert table_bytes(before, after, RANKS, SIZE) == TABLE[before, after]


def test_terms_of_another_reduction_are_reduced_and_shared() -> None:
    assert table_bytes(P, Partial("mean"), RANKS, SIZE) == 0
    assert table_bytes(P, Partial("max"), RANKS, SIZE) == 720


def test_one_rank_moves_nothing_and_none_is_refused() -> None:
    assert {table_bytes(before, after, 1, SIZE) for before, after in TABLE} == {0}
    with pytest.raises(LayoutError, match="at least one rank"):
        table_bytes(S0, B, 0, SIZE)
