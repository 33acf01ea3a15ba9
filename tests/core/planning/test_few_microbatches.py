"""Cuts of pipelines with few microbatches against exhaustive search over all cuts and schedules by the simulator."""

import pytest

import shardwright as sw
from tests.core.uneven import exhaustive, pins, random_case, searched

MOST_SLOWER = 0.005


def check(seeds: range, units: tuple[int, int]) -> None:
    compared, bound_by_memory = 0, 0
    for seed in seeds:
        case = random_case(seed, units)
        found, best = searched(case), exhaustive(case)
        assert found is not None, f"seed {seed}"
        assert best is not None, f"seed {seed}"
        assert 1 - 1e-5 <= found / best[0] <= 1 + MOST_SLOWER, f"seed {seed}: {found} s, and {best} is possible"
        compared += 1
        bound_by_memory += seed % 3 == 0
    assert compared == len(seeds)
    assert bound_by_memory >= len(seeds) // 3


def test_cuts_of_few_microbatches_are_as_fast_as_any() -> None:
    check(range(20), (6, 8))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_cuts_of_few_microbatches_are_as_fast_as_any_of_more_units() -> None:
    check(range(1000, 1040), (9, 14))


def test_a_plan_is_simulated_as_it_was_counted() -> None:
    case = random_case(4)
    plan = sw.plan(case.graph, case.cluster, **pins(case))
    assert sw.simulate(plan).makespan_s == pytest.approx(plan.predicted.pipeline_s, rel=1e-9)
    assert plan.predicted.step_time_s == pytest.approx(searched(case), rel=1e-9)
