"""Random schedules, sizes, times, transfers and limits: each ends, is whole, keeps its limit, or is refused with proof.

The ordinary suite draws some hundreds; `-m slow` draws 10,000. `-s` prints the share of refusals.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Schedule, StageCosts, schedule_names
from shardwright.core.schedule.auto.construct import construct, habits
from shardwright.core.schedule.auto.problem import Problem
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.checks import check
from shardwright.core.schedule.family import Sizes
from shardwright.core.schedule.files import from_csv, to_csv
from shardwright.core.schedule.passes import insert_sharding, insert_transfers
from shardwright.core.schedule.peak_memory import peak_live
from shardwright.core.schedule.simulate import simulate, simulate_schedule

SECONDS = st.floats(0.0, 10.0, allow_nan=False, width=32)
TWO = ("zbv", "v-half", "v-min", "dualpipev")
SEVERAL = ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "auto")
TALLY: Counter[str] = Counter()


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    name = draw(st.sampled_from((*schedule_names(), "auto")))
    p = draw(st.integers(1, 4 if name == "auto" else 6))
    m = draw(st.integers(2 * p if name == "dualpipev" else 1, max(2 * p, 5 if name == "auto" else 10)))
    # Mostly what the family admits, so that most cases are not refused for their sizes.
    admitted = st.just(2) if name in TWO else st.integers(1, 3) if name in SEVERAL else st.just(1)
    v = draw(st.one_of(*[admitted] * 8, st.integers(1, 3)))
    stages = p * v
    times = [tuple(draw(st.lists(SECONDS, min_size=n, max_size=n))) for n in (stages, stages, stages, stages - 1)]
    sizes = tuple(draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages)))
    costs = StageCosts(*times, sizes, draw(st.sampled_from((0.0, 0.3, 1.0))))
    limit = draw(st.one_of(st.none(), st.none(), st.integers(0, 9 * v * m), st.integers(5 * v, 9 * v * p)))
    active = draw(st.one_of(st.none(), st.integers(1, m))) if name in ("simple", "interleaved") else None
    return {"name": name, "ranks": p, "microbatches": m, "virtual_stages": v, "costs": costs,
            "memory_limit_bytes": limit, "active_microbatches": active}  # fmt: skip


def prove_refusal(request: dict[str, object]) -> str:
    """Why nothing of this name fits, found again without the code that refused."""
    name, p, m, v = (request[key] for key in ("name", "ranks", "microbatches", "virtual_stages"))
    costs, limit = request["costs"], request["memory_limit_bytes"]
    if name == "auto":
        # Before the backward of a rank's last stage, one microbatch has gone forward through all its stages.
        for placement in [[s % p for s in range(p * v)]] + ([[*range(p), *reversed(range(p))]] if v == 2 else []):
            held = [sum(costs.activation_bytes[s] for s in range(p * v) if placement[s] == r) for r in range(p)]
            assert max(held) > limit
        return "memory"
    sizes = Sizes(p, m, v, costs, None, request["active_microbatches"])
    if FAMILIES[name].refusal(sizes) is None:
        # A named schedule has one order: its peak is what it is.
        table = FAMILIES[name].generate(sizes)
        assert max(peak_live(order, costs.activation_bytes) for order in table) > limit
        return "memory"
    rounds = max(1, m // p)
    sizes_wrong = {
        "interleaved-1f1b": m % rounds != 0, "interleaved-zb": m % rounds != 0, "dualpipev": v != 2 or m < 2 * p,
    }  # fmt: skip
    assert sizes_wrong.get(name, v != 2 if name in TWO else v != 1)
    return "sizes"


def try_one(request: dict[str, object]) -> None:
    try:
        schedule = Schedule.build(**request)
    except ScheduleError:
        TALLY[f"refused for {prove_refusal(request)}"] += 1
        return
    TALLY["built"] += 1
    costs, limit = request["costs"], request["memory_limit_bytes"]
    check(schedule, limit, costs)
    timeline = simulate(schedule, costs)
    work = [sum(costs.forward_s[s] + (0 if schedule.name == "forward-only" else costs.backward_s[s])
                for s in schedule.stages_of(r)) * schedule.microbatches for r in range(schedule.ranks)]  # fmt: skip
    assert timeline.makespan_s >= max(work) * (0.5 if costs.overlap else 1) - 1e-6
    if limit is not None:
        assert max(timeline.peak_activation_bytes) <= limit
    full = insert_transfers(insert_sharding(schedule), costs)
    check(full)
    simulate_schedule(insert_transfers(schedule, costs, blocking=True), costs, transfers="blocking")
    assert from_csv(to_csv(full)).table == full.table


@given(requests())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_requests(request: dict[str, object]) -> None:
    try_one(request)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_random_requests() -> None:
    TALLY.clear()

    @given(requests())
    @settings(max_examples=10_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def draw(request: dict[str, object]) -> None:
        try_one(request)

    draw()
    total = sum(TALLY.values())
    print(f"\n{total} random requests: " + ", ".join(f"{key} {n} ({n / total:.1%})" for key, n in TALLY.items()))
    assert total >= 10_000
    assert TALLY["built"] > 0.5 * total


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_the_least_memory_always_suffices(p: int, v: int, m: int, data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(0, 9), min_size=p * v, max_size=p * v)))
    costs = StageCosts((1.0,) * (p * v), (1.0,) * (p * v), (1.0,) * (p * v), (0.5,) * (p * v - 1), sizes)
    placement = tuple(stage % p for stage in range(p * v))
    least = Problem.of(placement, m, costs, None).least_bytes()
    problem = Problem.of(placement, m, costs, least)
    for habit, mirrored in habits(problem, 14):
        table = problem.table(construct(problem, habit, mirrored))
        schedule = Schedule("custom", (), p, p * v, m, placement, table)
        check(schedule, least, costs)
