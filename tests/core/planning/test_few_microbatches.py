"""Cuts of pipelines with few microbatches against exhaustive search over all cuts and schedules by the simulator."""

from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.core.plan.prediction_error import LEAD
from shardwright.core.search import polish
from shardwright.core.search.best_first import Search
from shardwright.core.search.search import tables_of
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
    plan = sw.plan(case.graph, case.cluster, **pins(case), answer="fastest")
    assert sw.simulate(plan).makespan_s == pytest.approx(plan.predicted.pipeline_s, rel=1e-9)
    assert plan.predicted.step_time_s == pytest.approx(searched(case), rel=1e-9)


def test_a_plan_that_was_cut_anew_is_scored_as_one_with_its_decision_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is faster than the plan that is cut by its slowest stage, by more than what is not worth a new cut."""
    case = random_case(7)
    asked = pins(case) | {"answer": "fastest"}
    plan = sw.plan(case.graph, case.cluster, **asked)
    cut = {name: getattr(plan.decision, name) for name in ("stage_starts", "schedule")}
    again = sw.plan(case.graph, case.cluster, **asked | cut)
    for same in (again, sw.rescore(plan)):
        assert same.decision == plan.decision
        assert same.predicted == plan.predicted
        assert same.costs == plan.costs
    monkeypatch.setattr(polish, "MOST_MICROBATCHES", 1)
    even = sw.plan(case.graph, case.cluster, **asked)
    assert even.decision.stage_starts != plan.decision.stage_starts
    assert plan.predicted.step_time_s <= even.predicted.step_time_s * (1 - polish.LEAST_GAIN)


@pytest.mark.parametrize("seed", [77, 209, 5, 20])
def test_the_simplest_plan_is_within_its_margin_of_the_fastest(seed: int) -> None:
    """What led before there were new cuts may be far behind once there are."""
    case = random_case(seed, (6, 9))
    request = replace(case.request, virtual_stages=None, pp=None, dp=None, tp=1)
    found = Search(tables_of(case.graph, case.cluster, request), case.cluster, request).run(margin=LEAD)
    assert found.best is not None
    assert found.fastest is not None
    fastest_s = found.fastest.predicted.step_time_s
    assert found.best.predicted.step_time_s <= fastest_s * (1 + LEAD) * (1 + 1e-6)
    assert all(other.predicted.step_time_s >= fastest_s * (1 - 1e-6) for other in found.others)


def test_a_cut_that_is_pinned_or_made_by_another_partitioner_stays() -> None:
    case = random_case(7)
    stages = case.ranks * case.virtual_stages
    given = sw.plan(case.graph, case.cluster, **pins(case), stage_starts=list(range(stages)))
    assert given.decision.stage_starts == tuple(range(stages))
    tree = sw.plan(case.graph, case.cluster, **pins(case), partitioner="tree", schedule="interleaved-1f1b")
    exact = sw.plan(case.graph, case.cluster, **pins(case), schedule="interleaved-1f1b")
    assert tree.decision.stage_starts != exact.decision.stage_starts
