"""Tensor layouts: Megatron's come out of the search, and what cannot be split is said."""

import pytest

import shardwright as sw
from shardwright import Cluster, Split
from shardwright.core.cost.work import WorkCounter
from shardwright.core.fold import fold
from shardwright.core.rules.axes import dim_groups
from tests.core.toy import decoder

BIG = {"layers": 2, "hidden": 1024, "heads": 16, "vocabulary": 32000, "sequence": 512}


def layouts(tp: int, **changes: object) -> dict[str, sw.Layout]:
    graph = decoder(**{**BIG, **changes})
    plan = sw.plan(graph, Cluster("a100-80gb", devices_per_node=tp), batch=8, pp=1, tp=tp, dp=1)
    return plan.parameter_layouts("toy")


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_finds_column_and_row_parallel_linear_layers(tp: int) -> None:
    found = layouts(tp)
    assert found["h.0.c_attn"].on("tp") == Split(1, (1024, 1024, 1024))
    assert found["h.0.c_attn_b"].on("tp") == Split(0, (1024, 1024, 1024))
    assert found["h.0.proj"].on("tp") == Split(0)
    assert found["h.0.fc"].on("tp") == Split(1)
    assert found["h.0.fc_b"].on("tp") == Split(0)
    assert found["h.0.out"].on("tp") == Split(0)
    for replicated in ("h.0.proj_b", "h.0.out_b", "h.0.ln_1.weight", "ln_f.bias"):
        assert found[replicated].is_replicated


def test_a_tied_vocabulary_is_split_in_both_uses() -> None:
    assert layouts(4)["wte.weight"].on("tp") == Split(0)


def test_transposed_weights_get_the_transposed_layout() -> None:
    found = layouts(4, transposed=True)
    assert found["h.0.c_attn"].on("tp") == Split(0, (1024, 1024, 1024))
    assert found["h.0.proj"].on("tp") == Split(1)


def test_one_reduction_per_sublayer_each_way() -> None:
    graph = decoder(**BIG)
    unit = fold(graph).units[1]
    groups = [g for g in dim_groups(graph, unit) if not g.obstacle and g.divisor % 4 == 0]
    dims = frozenset(d for g in groups for d in g.dims)
    work = WorkCounter(graph).count(unit, 2, "bf16", dims, 4)
    activation = 2 * 512 * 1024 * 2
    assert work.forward_reduced == (activation, activation)
    assert work.backward_reduced == (activation, activation)
    assert work.forward_flops * 4 == WorkCounter(graph).count(unit, 2, "bf16").forward_flops


def test_heads_that_do_not_divide_stay_whole_and_are_reported() -> None:
    graph = decoder(**{**BIG, "hidden": 960, "heads": 15})
    plan = sw.plan(graph, Cluster("a100-80gb", devices_per_node=8), batch=8, pp=1, tp=8, dp=1)
    assert plan.parameter_layouts("toy")["h.0.c_attn"].is_replicated
    assert plan.parameter_layouts("toy")["h.0.fc"].on("tp") == Split(1)
    assert "8 does not divide 15" in dict(plan.unsplit)["1/w0"]
    assert "8 does not divide 15" in sw.explain(plan, "h.0.c_attn")


def test_predicted_parameters_per_rank_follow_the_layouts() -> None:
    graph = decoder(**BIG)
    whole = sw.plan(graph, Cluster("a100-80gb"), batch=8, tp=1)
    split = sw.plan(graph, Cluster("a100-80gb", devices_per_node=4), batch=8, pp=1, tp=4, dp=1)
    share = split.predicted.memory[0].parameters_bytes / whole.predicted.memory[0].parameters_bytes
    assert 0.25 <= share < 0.26
