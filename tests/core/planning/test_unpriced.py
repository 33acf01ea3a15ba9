"""Ops that nothing is known of: never free, and named."""

import pytest

import shardwright as sw
from shardwright.core.cost.unpriced import unpriced_text
from shardwright.core.cost.work import WorkCounter
from shardwright.core.fold import fold
from shardwright.core.rules import labels as L
from tests.core.toy import BATCH, Builder, decoder

SEQUENCE, WIDTH = 8, 64


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


def test_a_plan_names_it_with_its_share() -> None:
    with pytest.warns(UserWarning, match=r"no cost rule for vendor\.mystery: .* 100% of the FLOPs"):
        plan = sw.plan(with_an_unknown_op(), sw.Cluster("cpu"), batch=BATCH)
    assert plan.predicted.step_time_s > 0


def test_a_model_of_known_ops_is_quiet() -> None:
    assert unpriced_text(decoder(2, 32, 4, 64, 16)) is None
