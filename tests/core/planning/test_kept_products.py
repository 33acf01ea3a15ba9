"""Recompute that keeps the products of some modules: bytes and seconds by closed forms, and the choice of modules."""

from dataclasses import replace
from itertools import combinations

import pytest

import shardwright as sw
from shardwright import Cluster
from shardwright.core.capabilities import Capabilities
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.errors import PlanError
from shardwright.core.model.graph import Graph
from shardwright.core.plan.plan import Plan
from tests.core.toy import CAPABILITIES, Builder

BLOCKS, WIDTH, SEQUENCE, BATCH = 4, 64, 32, 8
ABLE: Capabilities = replace(CAPABILITIES, recomputes=("none", "elementwise", "alternate", "products", "full"))
RESULTS = {"in": 2, "gate": 4, "up": 4, "out": 1}
"""The module of each product of a block, in order, and its result in widths."""


def graph(pointwise: int = 1) -> Graph:
    """``pointwise``: as many ops without a product follow each other, whose results are all kept where all is."""
    b = Builder()
    x = b.input("x", -1, SEQUENCE, WIDTH, dtype="float32")
    for block in range(BLOCKS):
        path = f"blocks.{block}"
        outer = b.enter(path)

        def linear(value: int, name: str, columns: int, path: str = path) -> int:
            before = b.enter(f"{path}.{name}")
            rows = b.tensors[value].fixed[-1]
            made = b.linear(value, b.parameter(f"{path}.{name}.weight", rows, columns), None, columns)
            b.leave(before)
            return made

        y = linear(b.norm(x, f"{path}.norm", WIDTH), "in", 2 * WIDTH)
        gate, up = (linear(b.elementwise("relu", y), name, 4 * WIDTH) for name in ("gate", "up"))
        for _ in range(pointwise):
            gate = b.elementwise("silu", gate)
        x = b.elementwise("add", x, linear(b.elementwise("mul", gate, up), "out", WIDTH))
        b.leave(outer)
    return replace(b.build(x), capabilities=ABLE)


GRAPH = graph()


def plan_of(recompute: str, memory_bytes: int = 2**34, **pins: object) -> Plan:
    profile = load_profile("a100-80gb")
    device = replace(profile.device, memory_bytes=memory_bytes, reserved_memory_bytes=0)
    cluster = Cluster(device, nodes=1, devices_per_node=1)
    return sw.plan(
        GRAPH, cluster, batch=BATCH, microbatch=BATCH, precision="fp32", headroom=0.0, recompute=recompute, **pins
    )


def kept_bytes(plan: Plan) -> int:
    return plan.predicted.memory[0].activations_bytes


def named(*modules: str) -> str:
    return "products:" + ",".join(sorted(modules))


def test_each_result_takes_its_bytes_and_spares_its_product() -> None:
    none = kept_bytes(plan_of("full"))
    every = plan_of(named(*RESULTS))
    slowest = plan_of(named("out"))
    for count in range(1, len(RESULTS) + 1):
        for modules in combinations(RESULTS, count):
            found = plan_of(named(*modules))
            of_results = 4 * BATCH * SEQUENCE * WIDTH * sum(RESULTS[module] for module in modules)
            assert kept_bytes(found) - kept_bytes(slowest) == BLOCKS * (of_results - 4 * BATCH * SEQUENCE * WIDTH)
            assert none <= kept_bytes(slowest)
            assert every.predicted.step_time_s <= found.predicted.step_time_s
            assert set(found.unit_modes) <= {"none", named(*modules)}


def test_modes_that_go_by_number_are_special_cases() -> None:
    assert plan_of(named(*RESULTS)).predicted == plan_of("elementwise").predicted
    assert plan_of(named("in", "up")).predicted == plan_of("alternate").predicted


def test_as_few_products_are_computed_again_as_memory_asks_for() -> None:
    modes = [named(*modules) for count in range(1, 5) for modules in combinations(RESULTS, count)]
    every = [plan_of(mode) for mode in ("none", *modes, "full")]
    peaks = sorted({plan.predicted.peak_memory_bytes[0] for plan in every})
    taken = set()
    for room in peaks:
        found = plan_of("products", room)
        fits = [plan for plan in every if plan.predicted.peak_memory_bytes[0] <= room]
        fastest = min(plan.predicted.step_time_s for plan in fits)
        assert found.predicted.peak_memory_bytes[0] <= room
        assert found.predicted.step_time_s <= 1.002 * fastest, room  # FLOPs choose the sets, and not seconds
        taken.add(found.decision.recompute)
    assert {"none", "full"} < taken
    assert len(taken) >= 4, taken


def test_the_file_holds_it_and_an_edit_is_counted_anew(tmp_path) -> None:
    plan = plan_of(named("in", "up"))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.decision == plan.decision
    edited = sw.rescore(loaded, recompute=named("up"))
    assert edited.predicted == plan_of(named("up")).predicted
    with pytest.raises(PlanError, match=r"'uq' is no module of a unit that makes a product: did you mean 'up'\?"):
        sw.rescore(loaded, recompute="products:uq")


def test_recomputed_flops_are_those_of_the_products_that_are_not_kept() -> None:
    tokens = BATCH * SEQUENCE * BLOCKS
    assert plan_of(named("in", "gate", "out")).work.recomputed_flops == 2 * tokens * 2 * WIDTH * 4 * WIDTH
    assert plan_of(named(*RESULTS)).work.recomputed_flops == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("products:upp", r"'upp' is no module of a unit that makes a product: did you mean 'up'\? known: gate, in"),
        ("products:up,in", r"recompute='products:up,in': did you mean .*products:MODULE,…"),
        ("products:in, up", r"recompute='products:in, up': did you mean"),
        ("product", r"recompute='product': did you mean 'products'\?"),
        ("products:", r"'' is no module of a unit that makes a product"),
    ],
)
def test_modules_that_are_not_there_are_named(given: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_of(given)


def test_a_model_that_recomputes_no_product_is_told() -> None:
    b = Builder()
    x = b.input("x", -1, SEQUENCE, WIDTH, dtype="float32")
    small = replace(b.build(b.norm(x, "norm", WIDTH)), capabilities=ABLE)
    with pytest.raises(PlanError, match="no unit of Toy that would be recomputed makes a product"):
        sw.plan(small, Cluster("a100-80gb", nodes=1, devices_per_node=1), batch=8, recompute="products")
