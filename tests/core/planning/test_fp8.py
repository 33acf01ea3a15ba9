"""Plans with products in fp8: which products they are, what they take, and what is refused."""

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

import shardwright as sw
from shardwright.core.cluster.hardware import load_device
from shardwright.core.cost.fp8_casts import (
    FORWARD_KERNELS,
    INPUT_GRAD_KERNELS,
    ISSUED,
    WEIGHT_GRAD_KERNELS,
    casts,
)
from shardwright.core.cost.matrix_products import product_s
from shardwright.core.cost.training_flops import training_flops
from shardwright.core.cost.unit_seconds import unit_cost
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.errors import MissingCapabilityError, PlanError
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.realised_layouts import realise
from shardwright.core.rules import op_rules as rules
from shardwright.report.tables import plan_view
from tests.core.toy import Builder, decoder

SEQUENCE = 16


def able(graph: Graph, **changes: bool) -> Graph:
    """The graph, captured by a runtime that computes products in fp8."""
    return replace(graph, capabilities=replace(graph.capabilities, fp8=True, **changes))


def chain(*widths: int, calls: bool = False) -> Graph:
    """Linear layers one after the other, each a unit of its own, with losses of every entry at the end."""
    b = Builder()
    x = b.input("x", -1, SEQUENCE, widths[0], dtype="float32")
    for number, (before, after) in enumerate(pairwise(widths)):
        outer = b.enter(f"layers.{number}") if calls else 0
        x = b.linear(x, b.parameter(f"layers.{number}.weight", before, after), None, after)
        b.leave(outer) if calls else None
    return able(b.build(b.elementwise("square", x), name="Chain"))


GRAPH = able(decoder())
H100 = sw.Cluster("h100", nodes=1, devices_per_node=4)
PINS = {"batch": 8, "microbatch": 2, "recompute": "none", "shard": 0, "schedule": "1f1b"}


def planned(graph: Graph = GRAPH, precision: str = "fp8", cluster: sw.Cluster = H100, **pins: object) -> Plan:
    degrees = {"pp": 1, "dp": 4, "tp": 1} | {k: v for k, v in pins.items() if k in ("pp", "dp", "tp")}
    return sw.plan(graph, cluster, precision=precision, **(PINS | pins | degrees))


# Which products ---------------------------------------------------------------------------------------------------


def test_the_linear_layers_of_a_decoder_but_not_its_tables_and_head() -> None:
    found = WorkCounter(GRAPH).fp8
    structure = planned().model
    inside = {f"h.{layer}.{name}" for layer in range(4) for name in ("c_attn", "proj", "fc", "out")}
    assert planned().fp8_parameters("toy") == inside
    assert {slot.partition("/")[0] for slot in found.slots} == {str(structure.unit_classes[1])}
    assert all("looked up" in why for _, why in found.others)
    assert {GRAPH.ops[op].kind for op in found.ops} == {"contraction"}


def test_sizes_that_tensor_cores_do_not_take_stay_in_bf16() -> None:
    found = WorkCounter(chain(32, 24, 48, 64)).fp8
    assert len(found.slots) == 0
    reasons = sorted(why for _, why in found.others)
    assert reasons == [
        "24 is no multiple of 16", "24 is no multiple of 16", "its product is the last one before the loss",
    ]  # fmt: skip
    with pytest.raises(PlanError, match=r"no linear product of Chain .*24 is no multiple of 16.*plan for 'bf16'"):
        planned(chain(32, 24, 48, 64))


def test_the_last_of_layers_that_are_alike_is_no_head() -> None:
    assert WorkCounter(chain(32, 32, 32, 32)).fp8.others == ()
    (others,) = WorkCounter(chain(32, 48, 64)).fp8.others
    assert "the last one before the loss" in others[1]


def test_products_that_are_no_modules_stay_in_bf16_where_a_runtime_computes_modules() -> None:
    found = WorkCounter(able(chain(32, 48, 64), fp8_by_module=True)).fp8
    assert {why for _, why in found.others} == {"it is not the weight of a linear layer"}


def stacked(*, turned: bool = False) -> Graph:
    """Layers that are rows of one array, each a unit, between two matrices, of which the first may be turned."""
    b, wide, inner = Builder(), 48, 32
    x = b.input("x", -1, SEQUENCE, wide, dtype="float32")
    first = b.parameter("first", inner, wide) if turned else b.parameter("first", wide, inner)
    if turned:
        first = b.op("view", "transpose", [first], (wide, inner), rules.transpose((1, 0)))
    x = b.linear(x, first, None, inner)
    layers = b.parameter("layers", 3, inner, inner)
    for number in range(3):
        outer = b.enter(f"layers.{number}")
        row = b.op(
            "slice", "slice", [layers], (1, inner, inner),
            rules.strided((3, inner, inner), 0, number, 1, (1, inner, inner)),
        )  # fmt: skip
        row = b.op("view", "squeeze", [row], (inner, inner), rules.reshape((1, inner, inner), (inner, inner)))
        x = b.linear(x, row, None, inner)
        b.leave(outer)
    x = b.linear(x, b.parameter("last", inner, wide), None, wide)
    return able(b.build(b.elementwise("square", x)))


@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_a_stack_and_turned_matrices_are_matrices(turned: bool, tmp_path: Path) -> None:
    plan = planned(stacked(turned=turned))
    assert plan.fp8_parameters("toy") == {"first", "layers"}
    assert [why for _, why in plan.not_in_fp8] == ["its product is the last one before the loss"]
    assert len(WorkCounter(stacked(turned=turned)).fp8.ops) == 4
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_stack_that_is_read_whole_stays_in_bf16() -> None:
    b = Builder()
    x = b.input("x", -1, SEQUENCE, 32, dtype="float32")
    x = b.linear(x, b.parameter("first", 32, 48), None, 48)
    b.elementwise("square", b.parameter("layers", 3, 32, 32))
    x = b.linear(x, b.parameter("second", 48, 32), None, 32)
    found = dict(WorkCounter(able(b.build(b.elementwise("square", x)))).fp8.others)
    assert "it has 3 dims, and a product in fp8 is with one matrix" in found.values()


def test_flops_in_fp8_are_those_of_the_products_with_its_weights() -> None:
    graph = chain(32, 48, 64, 32)
    names = planned(graph).fp8_parameters("toy")
    plain, narrow = training_flops(graph, 4).by_precision, training_flops(graph, 4, fp8=names).by_precision
    assert narrow["fp8"] + narrow["fp32"] == plain["fp32"]
    sizes = {"layers.0.weight": 2 * 32 * 48, "layers.1.weight": 3 * 48 * 64}
    assert set(sizes) == names
    assert narrow["fp8"] == 4 * SEQUENCE * 2 * sum(sizes.values())


def test_a_twin_that_computes_other_products_so_is_refused_with_the_matrix() -> None:
    plan, twin = planned(chain(32, 48, 64, 32)), chain(32, 48, 64, 32)
    assert plan.rebind(twin).decision == plan.decision
    with pytest.raises(MissingCapabilityError, match=r"0/w0 in fp8, which Chain in toy does not: it is not the weight"):
        plan.rebind(able(twin, fp8_by_module=True))


def test_a_matrix_that_is_looked_up_elsewhere_too_stays_in_bf16() -> None:
    b = Builder()
    tokens = b.input("tokens", -1, SEQUENCE)
    table = b.parameter("table", 64, 32)
    x = b.op(
        "gather", "embedding", [table, tokens], (-1, SEQUENCE, 32), rules.gather((64, 32), 0, (2, SEQUENCE))
    )  # fmt: skip
    x = b.linear(x, b.parameter("inner", 32, 32), None, 32)
    x = b.linear(x, table, None, 64, transposed=True)
    x = b.linear(x, b.parameter("outer", 64, 16), None, 16)
    found = WorkCounter(able(b.build(b.elementwise("square", x)))).fp8
    assert len(found.slots) == 1
    assert sorted(why for _, why in found.others) == [
        "its product is the last one before the loss", "rows of it are looked up",
    ]  # fmt: skip


# What they take ---------------------------------------------------------------------------------------------------


def test_a_product_takes_its_rate_its_casts_and_their_memory() -> None:
    graph = chain(64, 128, 256)
    counter, device, batch = WorkCounter(graph), load_device("h100"), 512
    units = fold(graph).units
    in_fp8, in_bf16 = (counter.count(units[0], batch, precision) for precision in ("fp8", "bf16"))
    rows, (first,) = batch * SEQUENCE, in_fp8.products
    assert first.casts == casts(rows * 64, 64 * 128, rows * 128)
    assert first.size_bytes == rows * 64 + 64 * 128 + 2 * rows * 128
    head = [counter.count(units[1], batch, precision).products for precision in ("fp8", "bf16")]
    assert head[0] == head[1]
    assert in_fp8.saved_bytes == in_bf16.saved_bytes
    assert in_fp8.passing_bytes > in_bf16.passing_bytes
    alone = replace(in_fp8, products=(first,), kernels=0, vector_bytes=0)
    cost = unit_cost(alone, replace(device, dispatch_s=0.0), "fp8")
    bandwidth = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    sizes = first.size_bytes
    forward = product_s(device, "fp8", 1, rows, 128, 64, sizes) + first.casts.forward_bytes / bandwidth
    assert cost.forward_s == pytest.approx(forward + FORWARD_KERNELS * device.kernel_launch_s)
    weight = product_s(device, "fp8", 1, 64, 128, rows, sizes) + first.casts.weight_grad_bytes / bandwidth
    assert cost.weight_grad_s == pytest.approx(weight + WEIGHT_GRAD_KERNELS * device.kernel_launch_s)
    assert cost.input_grad_s == 0.0  # the batch needs no gradient
    assert INPUT_GRAD_KERNELS > WEIGHT_GRAD_KERNELS > 0 < ISSUED < 1


def test_wide_models_are_faster_and_narrow_ones_slower_as_casts_take_longer_than_they_spare() -> None:
    def ratio(width: int, rows: int) -> float:
        graph = chain(width, width, width, width)
        times = [
            sw.plan(graph, sw.Cluster("h100"), precision=p, **(PINS | {"batch": rows, "microbatch": rows}))
            for p in ("fp8", "bf16")
        ]
        return times[0].predicted.pipeline_s / times[1].predicted.pipeline_s

    assert ratio(8192, 1024) < 0.8
    assert ratio(256, 8) > 1.2


def test_master_parameters_sums_and_activations_are_those_of_bf16() -> None:
    fp8, bf16 = (planned(precision=precision).predicted.memory[0] for precision in ("fp8", "bf16"))
    for name, size in bf16.classes.items():
        assert fp8.classes[name] == size or name == "buffers"
    assert fp8.buffers_bytes >= bf16.buffers_bytes


def test_ranks_that_share_an_operand_tell_each_other_its_largest_entry() -> None:
    plan, counter = planned(tp=4, dp=1), WorkCounter(GRAPH)
    unit, layouts = fold(GRAPH).units[1], realise(GRAPH, plan)[1]
    work = {p: counter.count(unit, 2, p, layouts) for p in ("fp8", "bf16")}
    ahead, back = (
        [c for c in getattr(work["fp8"], moved) if c not in getattr(work["bf16"], moved)]
        for moved in ("forward_moved", "backward_moved")
    )
    assert ahead
    assert {(c.kind, c.size_bytes) for c in ahead} == {("all_reduce", 8)}
    assert {(c.kind, c.size_bytes) for c in back} <= {("all_reduce", 4)}
    assert len(ahead) <= len(work["fp8"].products)


# Requests, files, words ---------------------------------------------------------------------------------------------


def test_fp8_is_never_chosen_unasked() -> None:
    plan = sw.plan(GRAPH, H100, batch=8)
    assert plan.decision.precision == "bf16"
    assert plan.decision.fp8_weights == plan.not_in_fp8 == ()


@pytest.mark.parametrize("name", ["a100-80gb", "v100", "cpu"])
def test_devices_without_fp8_are_refused_with_those_that_have_it(name: str) -> None:
    able = "b200, h100, h100-500w, h200, trn1"
    with pytest.raises(PlanError, match=rf"{name} has no matrix products in fp8.*'bf16'.*{able}"):
        planned(cluster=sw.Cluster(name, nodes=1, devices_per_node=4))


def test_every_runtime_that_is_named_must_compute_in_fp8() -> None:
    with pytest.raises(PlanError, match="the toy runtime of this version does not compute products in 8 bits"):
        planned(decoder())
    with pytest.raises(MissingCapabilityError, match="the toy runtime of this version does not compute products"):
        planned().rebind(decoder())


def test_a_plan_keeps_the_weights_in_its_file_and_explains_them(tmp_path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    said = sw.explain(plan)
    assert f"products in fp8: those of {len(plan.fp8_parameters('toy'))} weights" in said
    assert "products in bf16: 0/w0 (wte.weight): rows of it are looked up" in said
    name = sorted(plan.fp8_parameters("toy"))[0]
    assert "its products are computed in fp8" in sw.explain(plan, name)
    assert "its products stay in bf16: rows of it are looked up" in sw.explain(plan, "wte.weight")
    assert "fp8" not in sw.explain(planned(precision="bf16"))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_view(plan))
    assert "products of 16 weights in fp8, the rest in bf16" in console.export_text()


def test_weights_that_a_plan_cannot_have_are_refused() -> None:
    plan = planned()
    with pytest.raises(PlanError, match="products in fp8 go with precision='fp8'"):
        replace(plan.decision, precision="bf16")
    for slot in ("1/w9", "@1/w0", "1/v0"):
        with pytest.raises(PlanError, match=f"fp8_weights name '{slot}'"):
            replace(plan, decision=replace(plan.decision, fp8_weights=(slot,)))
