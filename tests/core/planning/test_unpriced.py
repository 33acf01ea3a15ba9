"""Ops that nothing is known of: never free, and named."""

from typing import Any

import pytest

import shardwright as sw
from shardwright.core.cost.unit_work import WorkCounter, forward_flops
from shardwright.core.cost.unpriced import unpriced_text
from shardwright.core.model.fold import fold
from shardwright.core.rules import op_rules as L
from tests.core.toy import BATCH, Builder, decoder

SEQUENCE, WIDTH = 8, 64


def unknown(result: tuple[int, ...], *operands: tuple[int, ...], dtype: str = "float32") -> sw.Graph:
    """One op that nothing is known of; of operands a first size of -1 is the batch, others are weights."""
    b = Builder()
    shapes = [tuple(BATCH if size == -1 else size for size in shape) for shape in (*operands, result)]
    given = [
        b.input(f"x{i}", *shape, dtype=dtype) if shape[0] == -1 else b.parameter(f"w{i}", *shape)
        for i, shape in enumerate(operands)
    ]
    return b.build(b.op("opaque", "vendor.mystery", given, result, L.opaque(shapes[:-1], shapes[-1:])))


def with_a_product(*, is_known: bool) -> sw.Graph:
    b = Builder()
    x = b.elementwise("scale", b.input("x", -1, SEQUENCE, WIDTH, dtype="float32"), b.parameter("scale", WIDTH))
    weight, shape = b.parameter("weight", WIDTH, 2 * WIDTH), (BATCH, SEQUENCE, WIDTH)
    if is_known:
        y = b.linear(x, weight, None, 2 * WIDTH)
    else:
        labelled = L.opaque([shape, (WIDTH, 2 * WIDTH)], [(*shape[:2], 2 * WIDTH)])
        y = b.op("opaque", "vendor.mystery", [x, weight], (-1, SEQUENCE, 2 * WIDTH), labelled)
    return b.build(b.elementwise("gelu", y))


def with_an_unknown_op() -> sw.Graph:
    b = Builder()
    x = b.elementwise("scale", b.input("x", -1, SEQUENCE, WIDTH, dtype="float32"), b.parameter("scale", WIDTH))
    weight = b.parameter("weight", WIDTH, WIDTH)
    shape = (BATCH, SEQUENCE, WIDTH)
    y = b.op("opaque", "vendor.mystery", [x, weight], (-1, SEQUENCE, WIDTH), L.opaque([shape, (WIDTH, WIDTH)], [shape]))
    return b.build(y)


def test_an_unknown_op_costs_what_a_product_of_its_operands_would() -> None:
    graph = with_an_unknown_op()
    work = WorkCounter(graph).count(fold(graph).units[0], BATCH)
    assert work.forward_flops == 2 * BATCH * SEQUENCE * WIDTH * WIDTH
    assert work.backward_flops == 2 * work.forward_flops


@pytest.mark.parametrize(
    ("result", "operands", "at_least"),
    [
        ((-1, 8, 96), [(-1, 8, 64), (64, 96)], 2 * 8 * 64 * 96),  # a linear layer
        ((-1, 32, 16, 16), [(-1, 24, 16, 16), (32, 24, 3, 3)], 2 * 32 * 16 * 16 * 24 * 9),  # a convolution
        ((-1, 4, 64, 8), [(-1, 4, 64, 8)] * 3, 4 * 4 * 64 * 64 * 8),  # an attention
        ((-1, 64, 4, 8), [(-1, 64, 3, 4, 8)], 4 * 4 * 64 * 64 * 8),  # the same of packed operands
        ((-1, 8), [(-1, 8, 64), (1000, 64)], 2 * 8 * 64 * 1000),  # a head with its loss
        ((-1, 8, 64), [(-1, 8, 64)], 2 * 8 * 64),  # one operand
        ((-1, 8, 64), [(-1, 8)], 2 * 8 * 64),
    ],
)
def test_an_unknown_op_is_never_cheaper_than_what_it_may_be(
    result: tuple[int, ...], operands: list[tuple[int, ...]], at_least: int
) -> None:
    graph = unknown(result, *operands)
    assert BATCH * at_least <= forward_flops(graph, BATCH) <= 10 * BATCH * WIDTH * at_least
    assert forward_flops(graph, 3 * BATCH) == 3 * forward_flops(graph, BATCH)


def test_an_unknown_op_of_integers_is_not_free() -> None:
    assert forward_flops(unknown((-1, 8), (-1, 8), dtype="int64"), BATCH) == 2 * BATCH * 8


@pytest.mark.parametrize("result", [(), (1,), (-1,), (-1, 0)])
def test_an_unknown_op_of_few_results_has_a_time(result: tuple[int, ...]) -> None:
    graph = unknown(result, (-1, 8))
    (product,) = WorkCounter(graph).count(fold(graph).units[0], BATCH).products
    assert min(product.m, product.n, product.k, product.flops) > 0


def test_a_step_is_no_shorter_than_with_the_product_that_it_may_be() -> None:
    cluster = sw.Cluster("a100-80gb")
    pinned: dict[str, Any] = {"batch": 8, "pp": 1, "dp": 1, "tp": 1, "microbatch": 8}
    with pytest.warns(UserWarning, match="no cost rule"):
        unpriced = sw.plan(with_a_product(is_known=False), cluster, **pinned).predicted
    assert unpriced.step_time_s >= sw.plan(with_a_product(is_known=True), cluster, **pinned).predicted.step_time_s


def test_a_plan_names_it_with_its_share() -> None:
    with pytest.warns(UserWarning, match=r"no cost rule for vendor\.mystery: .* 100% of the FLOPs"):
        plan = sw.plan(with_an_unknown_op(), sw.Cluster("cpu"), batch=BATCH)
    assert plan.predicted.step_time_s > 0


def test_a_model_of_known_ops_is_quiet() -> None:
    assert unpriced_text(decoder(2, 32, 4, 64, 16)) is None


def test_an_unknown_op_of_weights_alone_does_not_grow_with_the_batch() -> None:
    """As a product of 64 × 32 by 32 × 96, whatever the batch."""
    graph = unknown((64, 96), (64, 32), (32, 96))
    assert [forward_flops(graph, batch) for batch in (1, 7)] == [2 * 64 * 32 * 96] * 2
