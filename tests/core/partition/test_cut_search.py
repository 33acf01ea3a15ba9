"""The search of cuts by any figure, against all cuts."""

from itertools import pairwise
from math import comb

import numpy as np
import pytest

from shardwright.core.errors import PlanError
from shardwright.core.partition import cut_search
from shardwright.core.partition.cut_search import every_cut, searched_cuts
from shardwright.core.partition.exact import min_max_cut, range_sums


def drawn(seed: int, units: int) -> tuple[np.ndarray, np.ndarray]:
    """The seconds of every unit, and of the message that enters it."""
    draw = np.random.default_rng(seed)
    return draw.lognormal(0.0, 0.7, units), draw.uniform(0.0, 0.5, units)


def step_like(seed: int, units: int, stages: int) -> cut_search.Figure:
    """The messages of all stages, and some times the largest stage: what a pipeline takes, about."""
    seconds, entering = drawn(seed, units)
    sums, times = range_sums(seconds) + entering[:, None][[*range(units), 0]], 1 + seed % 7

    def figure(cuts: np.ndarray) -> np.ndarray:
        assert cuts.shape[1] == stages
        ends = np.concatenate([cuts[:, 1:], np.full((len(cuts), 1), units)], axis=1)
        return entering[cuts[:, 1:]].sum(axis=1) + times * sums[cuts, ends].max(axis=1)

    return figure


@pytest.mark.parametrize(("units", "stages"), [(1, 1), (5, 1), (6, 6), (9, 4)])
def test_every_cut(units: int, stages: int) -> None:
    cuts = every_cut(units, stages).tolist()
    assert len({tuple(cut) for cut in cuts}) == len(cuts) == comb(units - 1, stages - 1)
    for cut in cuts:
        assert cut[0] == 0
        assert all(a < b for a, b in pairwise((*cut, units)))


def test_few_cuts_are_all_looked_at() -> None:
    figure = step_like(1, 12, 4)
    cuts, figures = searched_cuts(figure, 12, 4, (0, 1, 2, 3))
    assert len(cuts) == comb(11, 3)
    assert np.array_equal(figures, figure(cuts))


def test_a_beam_finds_what_is_best_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_search, "MOST_LISTED", 0)
    missed = []
    for seed in range(60):
        units, stages = 14 + seed % 10, 2 + seed % 5
        figure = step_like(seed, units, stages)
        seconds, _ = drawn(seed, units)
        least_largest = min_max_cut(range_sums(seconds), range_sums(seconds), stages)
        assert least_largest is not None
        cuts, figures = searched_cuts(figure, units, stages, least_largest)
        assert np.array_equal(figures, figure(cuts))
        best = figure(every_cut(units, stages)).min()
        missed.append(figures.min() / best - 1)
    assert len(missed) == 60
    assert sum(not miss <= 1e-9 for miss in missed) <= 3, missed
    assert all(miss <= 0.005 for miss in missed), missed


def test_fewer_units_than_stages_are_refused() -> None:
    with pytest.raises(PlanError, match="3 stages need at least 3 units"):
        searched_cuts(step_like(0, 2, 3), 2, 3, (0, 1))


@pytest.mark.parametrize(
    ("cuts", "stages", "units"), [(0, 3, 5), (1, 4, 9), (200, 1, 9), (400, 3, 6), (500, 40, 70_000)]
)
def test_equal_cuts_are_dropped_in_order(cuts: int, stages: int, units: int) -> None:
    drawn_cuts = np.sort(np.random.default_rng(cuts).integers(0, units, (cuts, stages)), axis=1)
    rows = np.concatenate([drawn_cuts, drawn_cuts[::3]])
    expected = np.unique(rows, axis=0, return_index=True)[1]
    assert cut_search._first_of_equals(rows).tolist() == expected.tolist()
