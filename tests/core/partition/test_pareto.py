"""The Pareto cut, the cut of ranks with several stages and RaNNC's blocks, against brute force."""

from itertools import combinations, product

import numpy as np
import pytest

from shardwright.core.errors import PlanError
from shardwright.core.partition.exact import range_sums
from shardwright.core.partition.pareto import StageTimes, WideCut, masked, pareto_cut

INSTANCES = 500


def all_starts(units: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner) for inner in combinations(range(1, units), stages - 1)]


def random_times(random: np.random.Generator, units: int) -> StageTimes:
    """Forward and backward of unlike proportions, with messages that leave both ways."""
    forward, backward = random.integers(1, 12, units), random.integers(1, 12, units)
    sent = random.integers(0, 4, units + 1).astype(float)
    sent[0] = sent[-1] = 0.0
    return StageTimes(range_sums(forward) + sent[None, :], range_sums(backward) + sent[:, None])


def brute(times: list[StageTimes], units: int, stages: int) -> float:
    best = np.inf
    for starts in all_starts(units, stages):
        ends = list(zip(starts, (*starts[1:], units), strict=True))
        f = max(times[k].forward_s[a, b] for k, (a, b) in enumerate(ends))
        b = max(times[k].backward_s[a, b] for k, (a, b) in enumerate(ends))
        best = min(best, float(f + b))
    return best


def value(cut: WideCut | None) -> float:
    return np.inf if cut is None else cut.objective_s


def test_equals_brute_force_on_unequal_devices() -> None:
    """Largest forward + largest backward, each device with its own times and its own limit."""
    single_state_is_worse = 0
    for seed in range(INSTANCES):
        random = np.random.default_rng(seed)
        units = int(random.integers(1, 11))
        stages = int(random.integers(1, units + 1))
        plain = random_times(random, units)
        speeds = random.choice([1.0, 1.0, 2.0, 3.0], stages)
        limits = random.integers(8, 60, stages)
        weights = range_sums(random.integers(1, 12, units))
        times = [
            masked(StageTimes(plain.forward_s / speed, plain.backward_s / speed), weights <= limit)
            for speed, limit in zip(speeds, limits, strict=True)
        ]
        expected = brute(times, units, stages)
        found = pareto_cut(lambda device, width, times=times: times[device], units, stages, stages)
        assert value(found) == pytest.approx(expected), f"seed {seed}"
        one = pareto_cut(lambda device, width, times=times: times[device], units, stages, stages, one_state=True)
        single_state_is_worse += value(one) > expected * (1 + 1e-9)
    assert single_state_is_worse > 0, "one state for each cell would have been enough: the instances test nothing"


def test_equals_brute_force_on_stages_of_unequal_width() -> None:
    for seed in range(INSTANCES):
        random = np.random.default_rng(1000 + seed)
        units = int(random.integers(2, 8))
        stages = int(random.integers(1, min(units, 4) + 1))
        devices = int(random.integers(stages, stages + 4))
        plain = random_times(random, units)
        slow = random.choice([1.0, 2.0], devices)

        def times(first: int, width: int, plain: StageTimes = plain, slow: np.ndarray = slow) -> StageTimes:
            share = max(slow[first : first + width]) / width
            return StageTimes(plain.forward_s * share, plain.backward_s * share)

        best = np.inf
        for widths in product((1, 2, 3), repeat=stages):
            if sum(widths) != devices:
                continue
            at = np.cumsum([0, *widths[:-1]])
            best = min(best, brute([times(int(d), w) for d, w in zip(at, widths, strict=True)], units, stages))
        found = pareto_cut(times, units, stages, devices, (1, 2, 3))
        assert value(found) == pytest.approx(best), f"seed {seed}"
        if found is not None:
            assert sum(found.widths) == devices


def test_a_bound_leaves_out_what_is_not_better() -> None:
    times = random_times(np.random.default_rng(3), 8)
    best = pareto_cut(lambda device, width: times, 8, 3, 3)
    assert best is not None
    assert pareto_cut(lambda device, width: times, 8, 3, 3, bound_s=best.objective_s) is None
    again = pareto_cut(lambda device, width: times, 8, 3, 3, bound_s=best.objective_s * 1.01)
    assert again is not None
    assert again.objective_s == best.objective_s


def test_more_stages_than_units_is_refused() -> None:
    times = random_times(np.random.default_rng(0), 2)
    with pytest.raises(PlanError, match="at most pp=2"):
        pareto_cut(lambda device, width: times, 2, 3, 3)
