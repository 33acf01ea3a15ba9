"""Days and price of a training run, by closed forms; deadlines and budgets, and what is said where none is met."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright import Cluster
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.errors import PlanError
from shardwright.core.plan.file import to_text
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.training_run import UNITS_S, TrainingRun, duration_s
from tests.core.toy import Builder, decoder

SMALL = decoder(layers=3, hidden=256, heads=8, vocabulary=1024, sequence=128)
LARGE = decoder(layers=2, hidden=2048, heads=16, vocabulary=1024, sequence=512)
PINS = {"schedule": "1f1b", "virtual_stages": 1}
NODE = Cluster("v100", devices_per_node=4)
PRICE = load_profile("v100").device.price_usd_per_hour or 0.0


def test_a_training_is_counted_in_steps_days_and_dollars() -> None:
    plan = sw.plan(SMALL, NODE, batch=32, tokens=1e9, **PINS)
    found = plan.training
    assert found is not None
    assert found.steps == math.ceil(1e9 / (32 * 128))
    assert found.days == pytest.approx(found.steps * plan.predicted.step_time_s / 86400)
    assert found.usd == pytest.approx(found.days * 24 * 4 * PRICE)
    assert Plan.from_text(to_text(plan)).training == found
    dearer = sw.plan(SMALL, NODE, batch=32, samples=33, price=100, **PINS).training
    assert dearer is not None
    assert dearer.steps == 2
    assert dearer.usd == pytest.approx(dearer.days * 24 * 400)
    assert sw.plan(SMALL, NODE, batch=32, **PINS).training is None


@given(
    batch=st.integers(1, 1000),
    samples=st.integers(1, 10**9),
    price=st.floats(0.01, 1000),
    deadline_s=st.floats(1, 1e9),
    budget=st.floats(1, 1e9),
)
def test_the_longest_step_meets_the_limits_and_a_longer_one_does_not(
    batch: int, samples: int, price: float, deadline_s: float, budget: float
) -> None:
    run = TrainingRun(samples=samples, deadline_s=deadline_s, budget_usd=budget, usd_per_hour=price)
    step_s = run.longest_step_s(batch, 0)

    def met(seconds: float) -> bool:
        found = run.taking(seconds, batch, 0)
        assert found is not None
        assert found.usd is not None
        return found.days * 86400 <= deadline_s and found.usd <= budget

    assert met(step_s * (1 - 1e-9))
    assert not met(step_s * (1 + 1e-9))


@given(st.floats(0.001, 1000), st.sampled_from(sorted(UNITS_S)))
def test_durations(number: float, unit: str) -> None:
    assert duration_s(number, "deadline") == pytest.approx(number * 86400)
    assert duration_s(f"{number:.6f}{unit}", "deadline") == pytest.approx(round(number, 6) * UNITS_S[unit])
    assert duration_s(f"{number:.6f} {unit.upper()}", "deadline") == pytest.approx(round(number, 6) * UNITS_S[unit])


def test_limits_hold_for_the_plan_that_is_given() -> None:
    fastest = sw.plan(SMALL, NODE, batch=32, tokens=1e9, answer="fastest", **PINS)
    took = fastest.training
    assert took is not None
    assert took.usd is not None
    for limits in ({"deadline": took.days * 1.00001}, {"budget": took.usd * 1.00001}):
        plan = sw.plan(SMALL, NODE, batch=32, tokens=1e9, **limits, **PINS)
        assert plan.predicted.step_time_s == pytest.approx(fastest.predicted.step_time_s, rel=1e-4)
        assert plan.is_pinned(next(iter(limits)))


def test_a_deadline_before_the_fastest_plan_names_it_and_the_devices_that_would_do() -> None:
    pair, options = Cluster("v100", devices_per_node=2, inter_node="ib-hdr200"), {"batch": 16, "tokens": 1e11, **PINS}
    fastest = sw.plan(LARGE, pair, answer="fastest", **options).training
    assert fastest is not None
    wanted = fastest.days * 0.7
    with pytest.raises(PlanError) as refused:
        sw.plan(LARGE, pair, deadline=wanted, **options)
    said = str(refused.value)
    assert f"the fastest of all takes {fastest.days:.3g} days for {fastest.usd:,.0f} USD" in said
    found = re.search(r"(\d+) devices of this kind would do", said)
    assert found is not None, said
    assert int(found[1]) > 2
    more = replace(pair.groups[0], nodes=int(found[1]) // 2)
    larger = Cluster.of_groups([more], pair.inter_node)
    enough = sw.plan(LARGE, larger, deadline=wanted, **options).training
    assert enough is not None
    assert enough.days <= wanted


def test_a_budget_below_the_cheapest_names_it_and_the_devices_that_would_do() -> None:
    """Fewer devices are cheaper here: four share the work badly."""
    options = {"batch": 8, "tokens": 1e9, **PINS}
    alone = {n: sw.plan(SMALL, NODE, devices=n, answer="fastest", **options).training for n in (1, 2, 4)}
    usd = {n: each.usd for n, each in alone.items() if each is not None and each.usd is not None}
    assert usd[1] < usd[2] < usd[4], "more devices are no dearer: the case tests nothing"
    with pytest.raises(PlanError, match=r"the cheapest found, on 1 of its devices, .*1 devices of this kind would do"):
        sw.plan(SMALL, NODE, budget=(usd[1] + usd[2]) / 2, **options)
    assert sw.plan(SMALL, NODE, budget=(usd[1] + usd[2]) / 2, devices=1, **options).mesh.size == 1
    assert sw.plan(SMALL, NODE, budget=(usd[1] + usd[2]) / 2, devices="auto", **options).mesh.size == 1
    with pytest.raises(PlanError, match="no number of such devices"):
        sw.plan(SMALL, NODE, budget=usd[1] / 2, **options)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"deadline": 3}, "deadline=3 of what training"), ({"budget": 3.0}, "budget=3.0 of what training"),
        ({"tokens": 1e9, "samples": 3}, "leave out one of them"), ({"tokens": -1}, "tokens=-1: expected a number"),
        ({"tokens": 0}, "tokens=0: expected a number above 0"), ({"tokens": math.inf}, "tokens=inf: expected a number"),
        ({"deadline": "3x", "tokens": 1}, "deadline='3x': expected days"), ({"price": -1.0}, "price=-1.0: expected"),
        ({"deadline": math.nan, "tokens": 1}, "deadline=nan: expected"), ({"budget": "9", "tokens": 1}, "budget='9'"),
        ({"deadline": 0, "tokens": 1}, "deadline=0: expected .* above 0"),
        ({"deadline": True, "tokens": 1}, "deadline=True: expected"),
        ({"deadline": 10**400, "tokens": 1}, "deadline=10000"),
    ],
)  # fmt: skip
def test_what_says_no_training_is_refused(given_: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        sw.plan(SMALL, NODE, batch=8, **given_, **PINS)


def test_what_is_not_known_is_asked_for() -> None:
    unpriced = Cluster(replace(load_profile("v100").device, price_usd_per_hour=None), devices_per_node=2)
    with pytest.raises(PlanError, match=r"the price of v100 is not known: give price="):
        sw.plan(SMALL, unpriced, batch=8, tokens=1e6, budget=5.0, **PINS)
    assert sw.plan(SMALL, unpriced, batch=8, tokens=1e6, budget=500.0, price=2.0, **PINS).run.usd_per_hour == 4.0
    unknown = sw.plan(SMALL, unpriced, batch=8, tokens=1e6, **PINS).training
    assert unknown is not None
    assert unknown.usd is None
    b = Builder()
    x = b.input("x", -1, 4, 8, dtype="float32")
    graph = b.build(b.linear(x, b.parameter("w", 8, 8), None, 8))
    with pytest.raises(PlanError, match=r"takes no tokens .* give samples="):
        sw.plan(graph, NODE, batch=8, tokens=1e6)
    counted = sw.plan(graph, NODE, batch=8, samples=1000).training
    assert counted is not None
    assert counted.steps == 125
