"""What runs op by op beside kernels that are written by hand for a layer: the loss, and a softmax of odd shape."""

from dataclasses import replace

import pytest

from shardwright.core.cost.handwritten_kernels import SOFTMAX_OPS
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.cost.work import UnitWork
from shardwright.core.execution import PLAIN, SYSTEMS
from shardwright.core.model.fold import fold
from shardwright.core.rules import op_rules as L
from tests.core.test_unit_cost import BYTES_PER_S, LAUNCH_S, MEMORY, VECTOR, cost, work
from tests.core.toy import Builder

SEQUENCE, WIDTH = 6, 8


def counted(builder: Builder, output: int, batch: int = 2) -> UnitWork:
    graph = builder.build(output)
    (unit,) = fold(graph).units
    return WorkCounter(graph).count(unit, batch)


def test_each_op_of_the_loss_reads_and_writes_and_those_before_the_last_product_do_not() -> None:
    b = Builder()
    x = b.elementwise("gelu", b.elementwise("exp", b.input("x", -1, SEQUENCE, WIDTH, dtype="float32")))
    y = b.linear(x, b.parameter("w", WIDTH, 4), None, 4)
    y = b.elementwise("tanh", b.elementwise("exp", y))
    loss = b.op("reduction", "mean", [y], (), L.reduction(b.shape(y), [0, 1, 2]))
    found, entries = counted(b, loss), 2 * SEQUENCE * 4
    # Fused, the three read the product. Alone, exp and tanh read and write, mean reads, and writes one entry.
    assert found.op_by_op_bytes == (5 * entries + 1 - entries) * 4
    assert found.op_by_op_kernels == 2


@pytest.mark.parametrize(("batch", "heads", "alone"), [(1, 2, True), (2, 2, False), (3, 2, True), (1, 4, False)])
def test_the_softmax_of_attention_takes_batches_times_heads_in_fours(batch: int, heads: int, alone: bool) -> None:
    b = Builder()
    q, k, v = (
        b.linear(b.input(name, -1, SEQUENCE, WIDTH, dtype="float32"), b.parameter(f"w{name}", WIDTH, 4), None, 4)
        for name in "qkv"
    )
    square = (-1, heads, SEQUENCE, SEQUENCE)
    scores = b.op("contraction", "bmm", [q, k], square, L.contraction("bsd", "btd", "bhst"))
    over_keys = L.over_dims(b.shape(scores), [3], "statistic")
    weights = b.op("softmax", "softmax", [scores], square, over_keys)
    out = b.op("contraction", "bmm", [weights, v], (-1, SEQUENCE, 4), L.contraction("bhst", "btd", "bsd"))
    found = counted(b, out, batch)
    entries = batch * heads * SEQUENCE * SEQUENCE
    assert found.op_by_op_kernels == (SOFTMAX_OPS if alone else 0)
    assert found.op_by_op_bytes == (SOFTMAX_OPS * 2 * 4 * entries if alone else 0)


def test_a_softmax_that_no_product_reads_is_no_attention() -> None:
    b = Builder()
    x = b.linear(b.input("x", -1, SEQUENCE, WIDTH, dtype="float32"), b.parameter("w", WIDTH, WIDTH), None, WIDTH)
    shares = b.op("softmax", "softmax", [x], (-1, SEQUENCE, WIDTH), L.over_dims(b.shape(x), [2], "statistic"))
    out = b.linear(b.elementwise("mul", x, shares), b.parameter("u", WIDTH, WIDTH), None, WIDTH)
    assert counted(b, out, 1).op_by_op_kernels == 0


def test_only_systems_with_kernels_written_by_hand_pay_for_what_these_do_not_take() -> None:
    plain = work(vector_bytes=10**8, kernels=7, eager_bytes=10**8, eager_kernels=7)
    beside = replace(plain, op_by_op_bytes=3 * 10**8, op_by_op_kernels=5)
    system = SYSTEMS["megatron-core"]
    assert cost(beside, execution=system).forward_s - cost(plain, execution=system).forward_s == pytest.approx(
        3 * 10**8 / (BYTES_PER_S * MEMORY) + 5 * LAUNCH_S
    )
    assert MEMORY != VECTOR
    for system in (SYSTEMS["torch"], SYSTEMS["torch-compiled"], SYSTEMS["jax"], PLAIN):
        assert cost(beside, execution=system) == cost(plain, execution=system)
