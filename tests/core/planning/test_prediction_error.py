"""The error of predictions by their class, the headroom that follows from it, and what it says of two plans."""

import math
import warnings
from dataclasses import replace

import pytest

import shardwright as sw
from shardwright import Cluster
from shardwright.core.cluster.hardware import Device, load_device, load_profile
from shardwright.core.cluster.hardware.device import MeasuredProduct, MeasuredUnit
from shardwright.core.errors import PlanError, PlanWarning
from shardwright.core.model.structure import measured_name
from shardwright.core.plan.file import to_text
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.prediction_error import LEAD, MEMORY, STEP_TIME, memory_error, prediction_error
from tests.core.toy import decoder

SMALL = decoder(layers=3, hidden=256, heads=8, vocabulary=1024, sequence=128)
PINS = {"pp": 1, "tp": 1, "dp": 2, "shard": 0, "recompute": "none", "microbatch": 2, "batch": 8}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return sw.plan(SMALL, Cluster("a100-80gb", devices_per_node=2), **PINS)


@pytest.mark.parametrize(
    ("name", "basis"),
    [
        ("a100-80gb", "fitted"), ("a100-40gb", "fitted"), ("h100", "transferred"), ("t4", "fitted"),
        ("v100", "transferred"), ("tpu-v5e", "prior"), ("trn1", "prior"), ("cpu", "prior"),
    ],
)  # fmt: skip
def test_the_class_follows_from_the_origins_of_a_device(name: str, basis: str, plan: Plan) -> None:
    found = prediction_error([load_device(name)], "torch", "", plan.decision)
    assert found.basis == basis
    assert found.step_time == STEP_TIME[found.basis][0]
    assert found.memory == MEMORY["torch"][0]


def test_the_least_known_device_decides(plan: Plan) -> None:
    devices = [load_device(name) for name in ("a100-80gb", "tpu-v5e", "h100")]
    for held, basis in ((devices, "prior"), (devices[::2], "transferred")):
        assert prediction_error(held, "torch", "", plan.decision).basis == basis
    of_ones_own = replace(devices[0], origins={})
    assert prediction_error([of_ones_own], "torch", "", plan.decision).basis == "prior"


def test_a_profile_of_the_model_knows_what_it_ran(plan: Plan) -> None:
    model = measured_name("toy", plan.model.digest)
    product = MeasuredProduct("fp32", 64, 64, 64, 1e9)
    unit = MeasuredUnit(model, 0, "fp32", 2, 1e-3, 2e-3)
    bare = replace(load_device("cpu"), measured_products=(product,))
    whole = replace(bare, measured_units=(unit,))

    def basis(device: Device, **changed: object) -> str:
        return prediction_error([device], "toy", model, replace(plan.decision, **changed)).basis

    assert basis(bare) == "profiled"
    assert basis(whole) == "profiled with the model"
    for other in ({"recompute": "full"}, {"shard": 1}, {"microbatch": 1}):
        assert basis(whole, **other) == "profiled with the model, composed"
    elsewhere = replace(unit, model="torch:0123")
    assert basis(replace(bare, measured_units=(elsewhere,))) == "profiled"


def test_every_number_says_where_it_comes_from() -> None:
    for share, origin in (*STEP_TIME.values(), *MEMORY.values()):
        assert 0 < share < 1
        assert origin.startswith(("benchmarks/results/", "prior: ", "published "))
    assert 0 < LEAD < min(share for share, _ in STEP_TIME.values())


def test_a_plan_carries_its_error_into_its_file(plan: Plan) -> None:
    assert plan.predicted.error.basis == "fitted"
    again = Plan.from_text(to_text(plan))
    assert again == plan
    assert again.predicted.error == plan.predicted.error
    bad = to_text(plan).replace('"basis": "fitted"', '"basis": "guessed"')
    with pytest.raises(sw.core.errors.PlanFileError, match=r"predicted\.error\.basis"):
        Plan.from_text(bad)


def test_plans_closer_than_their_error_are_not_told_apart(plan: Plan) -> None:
    def slower(share: float, **changed: object) -> Plan:
        predicted = replace(plan.predicted, step_time_s=plan.predicted.step_time_s * (1 + share))
        return replace(plan, predicted=predicted, **changed)

    near, far = sw.compare(slower(0.9 * LEAD), plan).faster, sw.compare(plan, slower(1.1 * LEAD)).faster
    assert near.startswith("The second is predicted to be 2.7% faster")
    assert "do not tell which is faster" in near
    assert far.startswith("The first is predicted to be 3.3% faster")
    assert "do not tell" not in far
    assert sw.compare(plan, plan).faster == ""
    # On another cluster nothing cancels: both errors count.
    elsewhere = replace(plan.provenance, cluster="another")
    together = math.hypot(plan.predicted.error.step_time, plan.predicted.error.step_time)
    assert "do not tell" in sw.compare(plan, slower(0.99 * together, provenance=elsewhere)).faster
    assert "do not tell" not in sw.compare(plan, slower(1.01 * together, provenance=elsewhere)).faster
    assert near in str(sw.compare(slower(0.9 * LEAD), plan))


# Headroom ---------------------------------------------------------------------------------------------------------

DEEP = decoder(layers=8, hidden=512, heads=8, vocabulary=4096, sequence=64)


def device_with(memory_bytes: int) -> Cluster:
    device = replace(load_profile("a100-80gb").device, memory_bytes=memory_bytes, reserved_memory_bytes=0)
    return Cluster(device, devices_per_node=2)


def test_headroom_is_left_free_on_every_device() -> None:
    whole = sw.plan(DEEP, device_with(2**40), batch=64, pp=1, tp=1, microbatch=32, shard=0, recompute="none")
    memory_bytes = max(whole.predicted.peak_memory_bytes)
    pins, found = {"batch": 64, "tp": 1, "schedule": "1f1b", "virtual_stages": 1}, []
    for share in (0.0, 0.1, 0.4):
        plan = sw.plan(DEEP, device_with(memory_bytes), headroom=share, **pins)
        assert max(plan.predicted.peak_memory_bytes) <= memory_bytes * (1 - share)
        assert plan.provenance.headroom == share
        assert plan.provenance.device_memory_bytes == (memory_bytes,) * plan.decision.pp
        assert plan.is_pinned("headroom")
        found.append(sw.plan(DEEP, device_with(memory_bytes), headroom=share, answer="fastest", **pins))
    times = [each.predicted.step_time_s for each in found]
    assert times == sorted(times)


def test_the_default_headroom_is_what_memory_was_ever_underestimated_by() -> None:
    pins = {"batch": 64, "pp": 1, "tp": 1, "microbatch": 32, "shard": 0, "recompute": "none"}
    for framework in ("torch", "jax", "toy"):
        error = memory_error(framework)
        graph = replace(DEEP, capabilities=replace(DEEP.capabilities, framework=framework))
        roomy = sw.plan(graph, device_with(2**40), **pins)
        assert roomy.provenance.headroom == error
        assert not roomy.is_pinned("headroom")
        needed = max(roomy.predicted.peak_memory_bytes)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PlanWarning)
            fits = sw.plan(graph, device_with(math.ceil(needed / (1 - error)) + 1), **pins)
        assert fits.decision == roomy.decision
        with pytest.warns(PlanWarning, match=f"leaves {error:.1%} of each device's memory free"):
            full = sw.plan(graph, device_with(needed), **pins)
        assert full.provenance.headroom == 0
        with pytest.raises(PlanError, match=f"beside a headroom of {error:.6g} of its memory"):
            sw.plan(graph, device_with(needed), headroom=error, **pins)


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (1.0, "headroom=1 leaves nothing: expected a share below 1"), (1, "headroom=1 leaves nothing"),
        (-0.1, "headroom=-0.1: expected a number from 0 to 1"), (5, "headroom=5: expected a number from 0 to 1"),
        (float("nan"), "headroom=nan: expected a number"), ("5%", "headroom='5%': expected a number"),
        (True, "headroom=True: expected a number"), (0.99999, "beside a headroom of 0.99999 of its memory"),
    ],
)  # fmt: skip
def test_a_headroom_that_is_no_share_or_leaves_nothing_is_refused(share: object, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        sw.plan(SMALL, device_with(2**31), batch=2, pp=1, tp=1, headroom=share)
