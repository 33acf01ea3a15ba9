"""Which form of a gradient of a few rows moves less."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.cost.row_gradients import RowGradient
from shardwright.core.errors import ShardwrightError

FIGURES = st.builds(
    RowGradient, st.integers(0, 10**6), st.integers(0, 4096), st.integers(0, 10**6), st.integers(1, 2048)
)


def test_the_paper() -> None:
    """arXiv 1905.04035, section 3: rows of a tied table of 33,708 on 64 ranks, 10,000 tokens each: 82 times."""
    table = RowGradient(33_708, 4 * 1024, 33_708 + 10_000, 64)
    assert table.held_bytes("sparse") == pytest.approx(11.46e9, rel=2e-3)
    assert table.held_bytes("dense") == pytest.approx(138e6, rel=2e-3)
    assert table.held_bytes("sparse") / table.held_bytes("dense") == pytest.approx(82, rel=0.02)
    assert table.chosen() == "dense"


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_rows_grow_with_ranks_and_the_table_does_not(ranks: int) -> None:
    of, more = (RowGradient(1000, 40, 100, count) for count in (ranks, 2 * ranks))
    assert more.held_bytes("sparse") == 2 * of.held_bytes("sparse")
    assert more.held_bytes("dense") == of.held_bytes("dense")
    assert of.moved_bytes("sparse") == (ranks - 1) * 100 * 48
    assert of.moved_bytes("dense") < 2 * 1000 * 40


@given(FIGURES)
def test_what_is_chosen_moves_least(of: RowGradient) -> None:
    assert of.moved_bytes(of.chosen()) == min(of.moved_bytes("dense"), of.moved_bytes("sparse"))
    if of.chosen() == "sparse":
        assert of.held_bytes("sparse") <= 2 * of.held_bytes("dense")


@given(FIGURES, st.integers(0, 10**9))
def test_a_limit_that_one_form_keeps_is_kept(of: RowGradient, limit_bytes: int) -> None:
    held = of.held_bytes(of.chosen(limit_bytes))
    assert held <= limit_bytes or min(of.held_bytes("dense"), of.held_bytes("sparse")) > limit_bytes


def test_impossible_figures_are_refused() -> None:
    with pytest.raises(ShardwrightError, match=r"RowGradient\(ranks=0\): expected 1 or more"):
        RowGradient(1, 1, 1, 0)
