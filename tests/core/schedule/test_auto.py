"""`auto`: never longer than what is named, close to proven optima, within its memory, and refused only with proof."""

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Kind, Schedule, StageCosts, schedule_names
from shardwright.core.schedule.auto import search
from shardwright.core.schedule.auto.construct import construct, habits
from shardwright.core.schedule.auto.evaluate import Evaluator
from shardwright.core.schedule.auto.problem import Problem
from shardwright.core.schedule.checks import check
from shardwright.core.schedule.passes import split_backward
from shardwright.core.schedule.placement import looped, vee
from shardwright.core.schedule.simulate import simulate
from tests.core.schedule.exact import solve

SIGMA = 0.25


def costs_of(stages: int, seed: int) -> StageCosts:
    draw = np.random.default_rng(seed)
    times = draw.lognormal(0.0, SIGMA, (3, stages))
    transfer = tuple(draw.uniform(0.0, 0.2, stages - 1).tolist())
    return StageCosts(*(tuple(row.tolist()) for row in times), transfer, (1,) * stages)


def limits_of(kind: str, p: int, m: int) -> list[int]:
    return {"1f1b": [min(m, p - i) for i in range(p)], "equal": [p] * p, "tight": [min(2, p)] * p}[kind]


@pytest.fixture
def brief_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little improvement: for what holds however long the search is."""
    monkeypatch.setattr(search, "_MOST_RUNS", 200)
    monkeypatch.setattr(search, "_CONSTRUCT_ACTIONS", 5_000)


@pytest.mark.usefixtures("brief_search")
@pytest.mark.parametrize("kind", ["1f1b", "equal", "tight"])
@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 1), (2, 5, 1), (4, 7, 1), (3, 4, 2), (2, 3, 3)])
def test_never_longer_than_a_named_schedule_that_fits(p: int, m: int, v: int, kind: str) -> None:
    for seed in range(2):
        costs = costs_of(p * v, seed)
        limits = [limit * v for limit in limits_of(kind, p, m)]
        auto = Schedule.build("auto", ranks=p, microbatches=m, virtual_stages=v, costs=costs, memory_limit_bytes=limits)
        check(auto, limits, costs)
        found = simulate(auto, costs).makespan_s
        assert found >= Problem.of(auto.placement, m, costs, limits).lower_bound_s() * (1 - 1e-12)
        for name in schedule_names():
            try:
                named = Schedule.build(
                    name, ranks=p, microbatches=m, virtual_stages=v, costs=costs, memory_limit_bytes=limits
                )
            except ScheduleError:
                continue
            if name != "forward-only":
                assert found <= simulate(named, costs).makespan_s, name


def test_overlapped_pairs_are_kept_when_nothing_beats_them() -> None:
    costs = StageCosts.uniform(4)
    costs = StageCosts(
        costs.forward_s, costs.input_grad_s, costs.weight_grad_s, costs.transfer_s, (1,) * 4, overlap=1.0
    )
    request = {"ranks": 2, "microbatches": 12, "virtual_stages": 2, "costs": costs}
    auto, paired = Schedule.build("auto", **request), Schedule.build("dualpipev", **request)
    assert simulate(auto, costs).makespan_s <= simulate(paired, costs).makespan_s


def test_at_least_five_percent_shorter_than_the_best_named_schedule_in_1f1bs_memory() -> None:
    gains = []
    for p, m in ((4, 8), (8, 8)):
        for seed in range(4):
            costs, limits = costs_of(p, seed), limits_of("1f1b", p, m)
            built = {}
            for name in ("auto", "gpipe", "1f1b", "zb-h1", "interleaved", "simple", "interleaved-1f1b"):
                try:
                    schedule = Schedule.build(name, ranks=p, microbatches=m, costs=costs, memory_limit_bytes=limits)
                except ScheduleError:
                    continue
                built[name] = simulate(schedule, costs).makespan_s
            best = min(makespan for name, makespan in built.items() if name != "auto")
            gains.append(1 - built["auto"] / best)
    assert np.median(gains) >= 0.05


@pytest.mark.parametrize("kind", ["1f1b", "equal", "tight"])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (2, 6), (3, 4), (3, 6), (4, 4), (4, 6)])
def test_within_one_percent_of_the_proven_optimum(p: int, m: int, kind: str) -> None:
    for seed in range(2):
        costs, limits = costs_of(p, seed), limits_of(kind, p, m)
        auto = Schedule.build("auto", ranks=p, microbatches=m, costs=costs, memory_limit_bytes=limits)
        problem = Problem.of(auto.placement, m, costs, limits)
        optimum = solve(problem, problem.words(auto.table), time_limit_s=30.0)
        assert optimum.proven
        assert problem.lower_bound_s() <= optimum.makespan_s * 1.001
        assert simulate(auto, costs).makespan_s <= optimum.bound_s * 1.01 + 1e-9


def test_the_solvers_words_are_what_it_says() -> None:
    costs, limits = costs_of(3, 1), [3, 3, 3]
    problem = Problem.of(looped(3, 1), 4, costs, limits)
    start = construct(problem, *habits(problem, 1)[0])
    optimum = solve(problem, start)
    schedule = Schedule("exact", (), 3, 3, 4, problem.placement, problem.table([list(w) for w in optimum.words]))
    check(schedule, limits, costs)
    assert simulate(schedule, costs).makespan_s == optimum.makespan_s <= Evaluator(problem).makespan_s(start)
    with pytest.raises(ScheduleError, match="keep the memory"):
        solve(problem, [[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]] * 3)


@pytest.mark.parametrize("p", [2, 3])
def test_memory_that_input_gradients_free_is_used_and_bounds_stay_below_the_optimum(p: int) -> None:
    m, size = 4, 10
    for seed in range(2):
        whole = replace(costs_of(p, seed), activation_bytes=(size,) * p)
        part = replace(whole, freed_by_input_grad_bytes=(8,) * p)
        limits = [14] * p
        best_s = {}
        for costs in (whole, part):
            problem = Problem.of(looped(p, 1), m, costs, limits)
            auto = Schedule.build("auto", ranks=p, microbatches=m, costs=costs, memory_limit_bytes=limits)
            check(auto, limits, costs)
            optimum = solve(problem, problem.words(split_backward(auto).table))
            assert problem.lower_bound_s() <= optimum.makespan_s * (1 + 1e-3)
            best_s[costs] = simulate(auto, costs).makespan_s
            assert best_s[costs] <= 1.01 * optimum.makespan_s
        assert best_s[part] < best_s[whole]


@pytest.mark.parametrize(("p", "v"), [(3, 1), (3, 2), (2, 3)])
def test_every_habit_ends_and_keeps_the_least_memory(p: int, v: int) -> None:
    m = 5
    placements = [looped(p, v)] + ([vee(p, v)] if v == 2 else [])
    for placement in placements:
        for spare in (0, 1, v):
            problem = Problem.of(placement, m, costs_of(p * v, 3), [v + spare] * p)
            engine = Evaluator(problem)
            for habit, mirrored in habits(problem, 400):
                words = construct(problem, habit, mirrored)
                assert sum(len(word) for word in words) == 3 * p * v * m
                assert all(engine.legal(rank, word) for rank, word in enumerate(words))
                assert engine.makespan_s(words) < float("inf")


def test_the_evaluator_is_the_simulator() -> None:
    for placement in (looped(3, 1), looped(3, 2), vee(3, 2)):
        costs = costs_of(len(placement), 7)
        problem = Problem.of(placement, 6, costs, None)
        for habit, mirrored in habits(problem, 24):
            words = construct(problem, habit, mirrored)
            schedule = Schedule("custom", (), 3, len(placement), 6, placement, problem.table(words))
            trace = Evaluator(problem).run(words)
            timeline = simulate(schedule, costs)
            assert trace is not None
            assert trace.makespan_s == timeline.makespan_s
            assert trace.ends_s == [end for row in timeline.end_s for end in row.tolist()]


def test_a_limit_that_nothing_meets_is_refused_with_the_least_that_does() -> None:
    costs = StageCosts((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, (0.0,) * 3, (10, 20, 30, 40))
    request = {"ranks": 2, "microbatches": 3, "virtual_stages": 2, "costs": costs}
    # Round the ranks they need 40 and 60 bytes, down and back up 50 and 50.
    with pytest.raises(ScheduleError, match=r"is met by no schedule.*the least is 60"):
        Schedule.build("auto", memory_limit_bytes=[40, 49], **request)
    vee_only = Schedule.build("auto", memory_limit_bytes=50, **request)
    assert vee_only.placement == (0, 1, 1, 0)
    check(vee_only, 50, costs)
    looped_only = Schedule.build("auto", memory_limit_bytes=[40, 60], **request)
    assert looped_only.placement == (0, 1, 0, 1)


def test_the_same_request_gives_the_same_schedule() -> None:
    request = {"ranks": 4, "microbatches": 6, "costs": costs_of(4, 5), "memory_limit_bytes": 4}
    assert Schedule.build("auto", **request).digest == Schedule.build("auto", **request).digest


def test_backwards_are_whole_where_that_takes_nothing_longer() -> None:
    # One rank waits for nobody: all its backwards can be whole. Of several, those of the first stage can.
    alone = Schedule.build("auto", ranks=1, microbatches=4, costs=costs_of(1, 0), memory_limit_bytes=1)
    assert [action.kind.value for action in alone.table[0]] == ["F", "B"] * 4
    costs = costs_of(4, 2)
    auto = Schedule.build("auto", ranks=4, microbatches=8, costs=costs, memory_limit_bytes=[4, 3, 2, 1])
    split = Schedule("split", (), 4, 4, 8, auto.placement, split_backward(auto).table)
    assert auto.table != split.table
    assert simulate(auto, costs).makespan_s <= simulate(split, costs).makespan_s + 1e-12
    neighbours = [(a, b) for a, b in pairwise(auto.table[0]) if (a.kind, b.kind) == (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)]
    assert not [pair for pair in neighbours if pair[0].microbatch == pair[1].microbatch]


@pytest.mark.slow
def test_built_within_a_second_for_eight_ranks_and_32_microbatches() -> None:
    began = time.process_time()
    Schedule.build("auto", ranks=8, microbatches=32, costs=costs_of(8, 0), memory_limit_bytes=8)
    assert time.process_time() - began < 1.0


@pytest.mark.slow
def test_built_within_ten_seconds_for_32_ranks_and_256_microbatches() -> None:
    began = time.process_time()
    Schedule.build("auto", ranks=32, microbatches=256, costs=costs_of(32, 0), memory_limit_bytes=32)
    assert time.process_time() - began < 10.0
