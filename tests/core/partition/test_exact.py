"""The exact cut against brute force."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.errors import PlanError
from shardwright.core.partition.exact import may_be_cut, min_max_cut, range_sums, spread_cut


def all_cuts(units: int, stages: int) -> list[list[int]]:
    return [[0, *inner] for inner in combinations(range(1, units), stages - 1)]


def largest(matrix: np.ndarray, cut: list[int]) -> float:
    ends = [*cut[1:], len(matrix) - 1]
    return max(float(matrix[a, b]) for a, b in zip(cut, ends, strict=True))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 9), st.data())
def test_equals_brute_force(units: int, data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.integers(0, 20), min_size=units, max_size=units))
    weights = data.draw(st.lists(st.integers(0, 20), min_size=units, max_size=units))
    stages = data.draw(st.integers(1, units))
    times, heavy = range_sums(seconds), range_sums(weights)
    cut = min_max_cut(times, heavy, stages)
    assert cut is not None
    best = min((largest(times, c), largest(heavy, c)) for c in all_cuts(units, stages))
    assert (largest(times, cut), largest(heavy, cut)) == best


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 7), st.data())
def test_respects_what_fits_per_stage(units: int, data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.integers(1, 9), min_size=units, max_size=units))
    stages = data.draw(st.integers(1, units))
    limits = data.draw(st.lists(st.integers(1, 30), min_size=stages, max_size=stages))
    times = range_sums(seconds)
    fits = np.stack([times <= limit for limit in limits])

    def holds(cut: list[int]) -> bool:
        ends = [*cut[1:], units]
        return all(times[a, b] <= limits[k] for k, (a, b) in enumerate(zip(cut, ends, strict=True)))

    possible = [largest(times, c) for c in all_cuts(units, stages) if holds(c)]
    assert may_be_cut(list(fits)) is bool(possible)
    cut = min_max_cut(times, times, stages, fits)
    if not possible:
        assert cut is None
    else:
        assert cut is not None
        assert holds(cut)
        assert largest(times, cut) == min(possible)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 8), st.data())
def test_what_is_left_is_spread_as_by_brute_force(units: int, data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.integers(0, 20), min_size=units, max_size=units))
    stages = data.draw(st.integers(1, units))
    longest = data.draw(st.integers(0, sum(seconds)))
    times = range_sums(seconds)

    def squares(cut: list[int]) -> float:
        return sum(float(times[a, b]) ** 2 for a, b in zip(cut, [*cut[1:], units], strict=True))

    possible = [squares(c) for c in all_cuts(units, stages) if largest(times, c) <= longest]
    cut = spread_cut([times] * stages, longest)
    if not possible:
        assert cut is None
    else:
        assert cut is not None
        assert largest(times, cut) <= longest
        assert squares(cut) == min(possible)


def test_more_stages_than_units_is_refused() -> None:
    with pytest.raises(PlanError, match="at most pp=2"):
        min_max_cut(range_sums([1, 1]), range_sums([1, 1]), 3)
