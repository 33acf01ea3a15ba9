"""Seconds of a unit against their closed forms, part by part: every part has a size of its own."""

from typing import Any

import pytest

from shardwright.core.cluster.groups import Group
from shardwright.core.cluster.hardware import Link
from shardwright.core.cluster.hardware.device import Device
from shardwright.core.cost.unit_seconds import (
    BACKWARD_DISPATCH,
    COLLECTIVE_DISPATCH,
    OVERLAP_POWER,
    SLOWED_BY_COLLECTIVE,
    UnitCost,
    seconds_of,
    unit_cost,
)
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.cost.work import Collective, Product, UnitWork
from shardwright.core.cost.working_memory import LiveBytes
from shardwright.core.errors import ClusterError
from shardwright.core.model.fold import fold
from shardwright.core.rules import op_rules as L
from shardwright.core.tables.memory import collectives_s, kept_bytes, recomputed_s
from tests.core.toy import Builder

LAUNCH_S, BYTES_PER_S, FLOPS_PER_S = 1e-4, 1e9, 1e12
MATMUL, MEMORY, VECTOR = 0.5, 0.8, 0.25
"""Efficiencies of products, memory, and what is beside products."""


def device(dispatch_s: float = 1e-15) -> Device:
    """One whose host is never waited for, unless it takes longer to issue a kernel."""
    return Device(
        "toy", "gpu", 10**12, {"fp32": FLOPS_PER_S}, BYTES_PER_S, LAUNCH_S, MATMUL, MEMORY, 1e9,
        vector_efficiency=VECTOR, dispatch_s=dispatch_s,
    )  # fmt: skip


def work(**parts: Any) -> UnitWork:
    nothing = {"products": (), "vector_bytes": 0, "kernels": 0, "saved_bytes": 0, "saved_selective_bytes": 0}
    nothing |= {"selective_products": (), "selective_vector_bytes": 0, "unfused_dropout_bytes": 0}
    nothing |= {"unfused_dropout_selective_bytes": 0, "entering_bytes": 0, "passing_bytes": 0}
    return UnitWork(**(nothing | {"forward_moved": (), "backward_moved": ()} | parts))


def product(batches: int, m: int, n: int, k: int, size_bytes: int = 0, back: float = 1, weights: float = 1) -> Product:
    flops = 2 * max(1, batches) * m * n * k
    return Product(flops, size_bytes, batches, m, n, k, back, weights)


def cost(of: UnitWork, dispatch_s: float = 1e-15, **more: Any) -> UnitCost:
    return unit_cost(of, device(dispatch_s), "fp32", **more)


def products_s(m: int, n: int, k: int) -> float:
    return 2 * m * n * k / (FLOPS_PER_S * MATMUL)


def test_traffic_is_once_forward_and_twice_backward_and_every_kernel_is_launched_in_each_pass() -> None:
    found = cost(work(vector_bytes=10**8, kernels=7), gradient_bytes=3 * 10**8)
    traffic, launches = 10**8 / (BYTES_PER_S * VECTOR), 7 * LAUNCH_S
    assert found.forward_s == pytest.approx(traffic + launches)
    assert found.input_grad_s == pytest.approx(2 * traffic + launches)
    assert found.weight_grad_s == pytest.approx(launches + 3 * 10**8 / (BYTES_PER_S * MEMORY))
    assert found.total_s == pytest.approx(found.forward_s + found.input_grad_s + found.weight_grad_s)


def test_a_product_costs_as_much_for_each_gradient_that_it_has() -> None:
    once = products_s(3000, 2000, 1000)
    for back, weights in ((1, 1), (0, 1), (1, 0), (2, 0)):
        found = cost(work(products=(product(1, 3000, 2000, 1000, back=back, weights=weights),)))
        assert found.forward_s == pytest.approx(once)
        assert found.input_grad_s == pytest.approx(back * once, abs=1e-12)
        assert found.weight_grad_s == pytest.approx(weights * once, abs=1e-12)


def test_both_gradients_of_two_activations_are_products_of_their_own_shapes() -> None:
    """Bytes bind one: all three move the same; the other is as its own flops say."""
    few = product(1, 1, 1, 1, size_bytes=10**8, back=2, weights=0)
    moved = 10**8 / (BYTES_PER_S * MEMORY)
    found = cost(work(products=(few,)))
    assert found.forward_s == pytest.approx(moved)
    assert found.input_grad_s == pytest.approx(2 * moved)


def test_attention_is_at_three_quarters_of_the_rate_of_products_or_bound_by_its_bytes() -> None:
    flops = 2 * 4000 * 1000 * 1000
    fused = Product(flops, 0, 0, 0, 0, 0, 2.5, 0.5)
    found = cost(work(products=(fused,)))
    once = flops / (FLOPS_PER_S * MATMUL * 0.75)
    assert (found.forward_s, found.input_grad_s, found.weight_grad_s) == pytest.approx((once, 2.5 * once, 0.5 * once))
    bound = cost(work(products=(Product(1, 10**9, 0, 0, 0, 0, 2.5, 0.0),)))
    assert bound.forward_s == pytest.approx(10**9 / (BYTES_PER_S * MEMORY))


AHEAD = (Collective("all_reduce", 3, "tp"), Collective("all_gather", 50, "tp"))
BACK = (Collective("reduce_scatter", 700, "tp"),)
AGAIN = (Collective("all_gather", 9000, "tp"),)
AT_THE_END = (Collective("all_reduce", 110000, "tp"), Collective("all_gather", 1300000, "tp"))


def test_every_collective_is_counted_where_it_runs() -> None:
    of = work(
        vector_bytes=10**8, forward_moved=AHEAD, backward_moved=BACK, backward_gathered=AGAIN, step_moved=AT_THE_END
    )
    alone, found = cost(of), cost(of, collective_s=lambda collective: collective.size_bytes * 1e-3)
    assert (alone.collective_s, alone.forward_collective_s, alone.step_s) == (0.0, 0.0, 0.0)
    assert found.forward_s - alone.forward_s == pytest.approx(0.053)
    assert found.input_grad_s - alone.input_grad_s == pytest.approx(0.7 + 9 * SLOWED_BY_COLLECTIVE)
    assert found.weight_grad_s == pytest.approx(alone.weight_grad_s)
    assert (found.collective_s, found.forward_collective_s) == pytest.approx((0.753, 0.053))
    assert found.step_s == pytest.approx(1410)


def test_recompute_runs_the_forward_and_its_collectives_again() -> None:
    of = work(vector_bytes=10**8, forward_moved=AHEAD, backward_moved=BACK, selective_vector_bytes=4 * 10**7,
              saved_bytes=900, saved_selective_bytes=70, entering_bytes=5,
              selective_products=(product(1, 3000, 2000, 1000), product(1, 300, 200, 100)))  # fmt: skip
    found = cost(of, collective_s=lambda collective: collective.size_bytes * 1e-3)
    selective = products_s(3000, 2000, 1000) + products_s(300, 200, 100) + 4 * 10**7 / (BYTES_PER_S * VECTOR)
    assert [recomputed_s(found, mode) for mode in ("none", "selective", "full", "offload")] == pytest.approx(
        [0.0, selective + 4 * LAUNCH_S, 10**8 / (BYTES_PER_S * VECTOR) + 0.053, 0.0]
    )
    assert [collectives_s(found, mode) for mode in ("none", "selective", "full", "offload")] == pytest.approx(
        [0.753, 0.753, 0.806, 0.753]
    )
    assert [kept_bytes(found, mode) for mode in ("none", "selective", "full", "offload")] == [900, 70, 5, 0]


def test_a_host_that_is_slower_is_waited_for() -> None:
    """An all-reduce takes a share of a kernel's time to issue, another collective half of it; backward passes more."""
    moved = (*AHEAD, *BACK)
    of = work(kernels=10, forward_moved=AHEAD, backward_moved=BACK)
    found = cost(of, 100.0, collective_s=lambda collective: 1e-9)
    issued = 100.0 * (10 + COLLECTIVE_DISPATCH * (1 + 0.5 * (len(moved) - 1)))
    assert found.forward_s == pytest.approx(issued)
    assert found.input_grad_s + found.weight_grad_s == pytest.approx(issued * BACKWARD_DISPATCH)
    assert found.input_grad_s == pytest.approx(found.weight_grad_s, rel=1e-3)  # ten launches each


def test_a_collective_is_not_hidden_behind_a_host_that_is_slower() -> None:
    of = work(kernels=10, forward_moved=AHEAD, backward_moved=BACK)
    swift, slow = (cost(of, 100.0, collective_s=lambda collective, s=s: s) for s in (0.0, 7.0))
    assert slow.forward_s - swift.forward_s == pytest.approx(7.0 * len(AHEAD)) == slow.forward_collective_s
    assert slow.input_grad_s - swift.input_grad_s == pytest.approx(7.0 * len(BACK))
    assert slow.weight_grad_s == swift.weight_grad_s


def test_host_and_device_as_slow_as_each_other_take_longer_than_either() -> None:
    """(1 + 1)^(1/p) times as long."""
    found = cost(work(kernels=10), LAUNCH_S)
    assert found.forward_s == pytest.approx(10 * LAUNCH_S * 2 ** (1 / OVERLAP_POWER))


def test_nothing_takes_no_time() -> None:
    found = cost(work())
    assert (found.forward_s, found.input_grad_s, found.weight_grad_s, found.selective_s) == (0.0, 0.0, 0.0, 0.0)


def test_what_is_held_is_handed_on_with_what_unfused_dropout_adds() -> None:
    of = work(saved_bytes=1000, saved_selective_bytes=300, unfused_dropout_bytes=50, unfused_dropout_selective_bytes=7,
              entering_bytes=11, passing_bytes=13, given_bytes=17, put_off_bytes=19)  # fmt: skip
    found = cost(of, parameters=23, trained=29)
    more = (0, 0) if device().fuses_dropout else (50, 7)
    assert (found.saved_bytes, found.saved_selective_bytes) == (1000 + more[0], 300 + more[1])
    held = (found.entering_bytes, found.passing_bytes, found.given_bytes, found.put_off_bytes)
    assert held == (11, 13, 17, 19)
    assert (found.parameter_elements, found.trained_elements) == (23, 29)


def test_seconds_of_every_kind_of_collective() -> None:
    group = Group(8, 2, Link("inside", 200e9, 3e-6), Link("outside", 20e9, 10e-6))
    seconds = seconds_of(group, 8)
    size = 10**7
    assert seconds(Collective("all_reduce", size, "tp")) == group.all_reduce_s(size)
    assert seconds(Collective("reduce_scatter", size, "tp")) == group.reduce_scatter_s(size)
    assert seconds(Collective("all_gather", size, "tp")) == group.all_gather_s(size)
    assert seconds(Collective("all_to_all", size, "tp")) == group.all_gather_s(size / 8)
    assert group.all_reduce_s(size) != group.all_gather_s(size)
    with pytest.raises(ClusterError, match="collective 'broadcast' has no cost"):
        seconds(Collective("broadcast", size, "tp"))


# --- traffic of ops that move a part of what they are given


def traffic(builder: Builder, *outputs: int) -> int:
    graph = builder.build(*outputs)
    (unit,) = fold(graph).units
    return WorkCounter(graph).count(unit, 2).vector_bytes


def test_a_lookup_reads_the_rows_that_it_gives() -> None:
    """2 · 5 places of 8 bytes, their rows of 6 entries read and written; not the table's 1000."""
    b = Builder()
    table, places = b.parameter("table", 1000, 6), b.input("places", -1, 5)
    rows = b.op("gather", "embedding", [table, places], (-1, 5, 6), L.gather((1000, 6), 0, (2, 5)))
    out = b.linear(rows, b.parameter("w", 6, 4), None, 4)
    assert traffic(b, out) == 10 * 8 + 2 * (10 * 6 * 4)


def test_a_concatenation_reads_its_parts_and_writes_the_whole() -> None:
    b = Builder()
    x = b.input("x", -1, 5, 6, dtype="float32")
    parts = [b.linear(x, b.parameter(name, 6, width), None, width) for name, width in (("v", 3), ("w", 4))]
    whole = b.op("concat", "cat", parts, (-1, 5, 7), L.concatenation([(2, 5, 3), (2, 5, 4)], 2))
    out = b.linear(whole, b.parameter("u", 7, 8), None, 8)
    assert traffic(b, out) == 2 * (10 * 7 * 4)


def test_a_chain_of_elementwise_ops_reads_once_and_writes_once() -> None:
    b = Builder()
    x = b.linear(b.input("x", -1, 5, 6, dtype="float32"), b.parameter("v", 6, 7), None, 7)
    for name in ("gelu", "exp", "tanh"):
        x = b.elementwise(name, x)
    out = b.linear(x, b.parameter("w", 7, 8), None, 8)
    assert traffic(b, out) == 2 * (10 * 7 * 4)


@pytest.mark.parametrize("views", [0, 1, 2])
def test_the_backward_of_a_product_goes_to_a_weight_through_its_views(views: int) -> None:
    b = Builder()
    x = b.norm(b.input("x", -1, 4, 8, dtype="float32"), "ln", 8)
    weight = b.parameter("w", 8, 16)
    for _ in range(views):
        weight = b.op("view", "view", [weight], (8, 16), L.reshape((8, 16), (8, 16)))
    graph = b.build(b.linear(x, weight, None, 16))
    (product,) = WorkCounter(graph).count(fold(graph).units[0], 2).products
    assert (product.backward_input, product.backward_weight) == (1.0, 1.0)


def test_a_forward_without_gradients_holds_what_an_op_reads_and_what_it_writes() -> None:
    """Made one after the other from 80 bytes that somebody else holds: 120, 400, 40."""
    b = Builder()
    values = [b.input("x", -1, 10, dtype="float32")]
    for name, width in (("sort", 15), ("unfold", 50), ("mean", 5)):
        values.append(b.op("opaque", name, [values[-1]], (-1, width), L.Labelled(((-1, -1), (-1, -1)))))
    graph = b.build(values[-1])
    users = {value: (index,) for index, value in enumerate(values[:-1])}
    live = LiveBytes(graph, {}, frozenset(), frozenset(), users, {})
    found = live.beside_kept(range(3), {}, {}, lambda tensor: graph.tensors[tensor].elements(2) * 4)
    assert found == (120 + 400, 120 + 400)


def test_what_is_kept_elsewhere_comes_back_for_the_ops_that_read_it_and_goes_again() -> None:
    """Four values a to d; the backward of op 2 reads b and c, that of op 1 reads b, and that of op 0 reads a. With the
    gradients of what each reads and makes, these are d, c, b and c; then c, b and b; then b, a and a."""
    b = Builder()
    values = [b.input("a", -1, 5, dtype="float32")]
    for name, width in (("exp", 10), ("mul", 25), ("sin", 20)):
        values.append(b.op("opaque", name, [values[-1]], (-1, width), L.Labelled(((-1, -1), (-1, -1)))))
    graph = b.build(values[-1])
    size = {value: graph.tensors[value].elements(2) * 4 for value in values}
    users = {value: (index,) for index, value in enumerate(values[:-1])}
    live = LiveBytes(graph, {}, frozenset(values), frozenset(), users, {})
    kept_by = {0: [values[0]], 1: [values[1]], 2: [values[1], values[2]]}
    found = live.fetched(range(3), kept_by, {}, size.__getitem__, {})
    assert [size[value] for value in values] == [40, 80, 200, 160]
    backwards = [160 + 200 + 80 + 200, 200 + 80 + 80, 80 + 40 + 40]
    assert found == max(backwards)
    assert live.fetched(range(3), kept_by, {1: 1000}, size.__getitem__, {}) == max(200 + 80 + 80, 80 + 200) + 1000
