"""Plans of causal models whose sequences go through the pipeline in slices."""

from typing import Any

import pytest
import torch
import transformers

import shardwright as sw
from shardwright.core.cost.unit_work import contraction_flops
from shardwright.core.errors import CaptureError, PlanError
from shardwright.core.slices.graph_of_slice import graph_of_slice
from shardwright.core.slices.sequence_ops import sequence_ops

TOKENS, WIDTH, LAYERS, WORDS = 256, 64, 4, 128


def graph_of(kind: str = "GPT2LMHeadModel") -> Any:
    with torch.device("meta"):
        if kind == "GPT2LMHeadModel":
            model: Any = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    n_layer=LAYERS, n_embd=WIDTH, n_head=2, n_positions=TOKENS, vocab_size=WORDS, use_cache=False,
                    bos_token_id=0, eos_token_id=0,
                )
            )  # fmt: skip
        else:
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
            return sw.capture(model, torch.zeros(2, 8), loss=torch.sum)
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    return sw.capture(model, {"input_ids": ids, "labels": ids})


@pytest.fixture(scope="module")
def graph() -> Any:
    return graph_of()


@pytest.fixture(scope="module")
def cluster() -> sw.Cluster:
    return sw.Cluster("v100", devices_per_node=4)


ASKED: dict[str, Any] = {
    "batch": 2, "pp": 4, "tp": 1, "dp": 1, "microbatch": 1, "schedule": "1f1b", "recompute": "none",
}  # fmt: skip


@pytest.mark.parametrize("lengths", [(256,), (128, 128), (100, 90, 66), (1, 255)])
def test_slices_have_the_flops_of_their_tokens(graph: Any, lengths: tuple[int, ...]) -> None:
    """Products once for each token; attention once for each token and the keys up to the end of its slice."""
    ops = sequence_ops(graph)
    products, attention, context = 0, 0, 0
    for length in lengths:
        made = graph_of_slice(graph, ops, length, context)
        for op, need in zip(made.ops, ops.needs, strict=True):
            if op.kind == "attention":
                attention += contraction_flops(made, op, 1)
            elif need == "local":
                products += contraction_flops(made, op, 1)
        context += length
    whole = [op for op in graph.ops if op.kind != "attention"]
    assert products == sum(contraction_flops(graph, op, 1) for op in whole)
    keys = sum(length * sum(lengths[: i + 1]) for i, length in enumerate(lengths))
    assert attention == LAYERS * 4 * keys * WIDTH


def test_a_plan_says_what_its_slices_cost(graph: Any, cluster: sw.Cluster, tmp_path: Any) -> None:
    plan = sw.plan(graph, cluster, **ASKED, slice_lengths=[128, 64, 64])
    assert plan.decision.slice_lengths == (128, 64, 64)
    costs = plan.pass_costs()
    assert isinstance(costs, tuple)
    assert len(costs) == 3
    assert sw.simulate(plan).makespan_s == pytest.approx(plan.predicted.pipeline_s, rel=1e-9)
    assert "3 slices of 128 + 64 + 64 tokens" in plan.summary()
    plan.save(tmp_path / "plan.json")
    again = sw.Plan.load(tmp_path / "plan.json")
    assert again.pass_costs() == costs
    assert again == plan
    edited = sw.rescore(again, slice_lengths=[128, 128])
    assert edited.decision.slice_lengths == (128, 128)
    assert edited.predicted == sw.plan(graph, cluster, **ASKED, slice_lengths=[128, 128]).predicted


def test_one_slice_is_a_whole_sequence(graph: Any, cluster: sw.Cluster) -> None:
    whole = sw.plan(graph, cluster, **ASKED)
    for asked in ({"slices": 1}, {"slice_lengths": [TOKENS]}):
        plan = sw.plan(graph, cluster, **ASKED, **asked)
        assert (plan.decision, plan.predicted) == (whole.decision, whole.predicted)


def test_slices_that_do_not_pay_are_not_taken(graph: Any, cluster: sw.Cluster) -> None:
    """Kernels of these few tokens take as long as their launches, whatever is in them."""
    plan = sw.plan(graph, cluster, **ASKED, slices="auto")
    assert plan.decision.slice_lengths == ()
    asked = sw.plan(graph, cluster, **ASKED, slices=2)
    assert sum(asked.decision.slice_lengths) == TOKENS
    assert len(asked.decision.slice_lengths) == 2
    assert asked.predicted.step_time_s > plan.predicted.step_time_s


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"slice_lengths": [100, 100]}, r"add up to 200 tokens, and the captured sequence has 256: give 56 more"),
        ({"slice_lengths": [200, 100]}, r"give 44 fewer"),
        ({"slice_lengths": [256, 0]}, r"expected whole numbers of at least 1"),
        ({"slices": 3, "slice_lengths": [128, 128]}, r"which are 2: leave out slices"),
        ({"slices": 2, "schedule": "zbv"}, r"it runs microbatches whole; take one of gpipe, 1f1b"),
        ({"slices": "many"}, r"slices='many'"),
        ({"slices": 500}, r"slices=500 of 256 tokens"),
    ],
)
def test_slices_that_cannot_be(graph: Any, cluster: sw.Cluster, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        sw.plan(graph, cluster, **ASKED | asked)


def test_a_model_without_a_sequence_has_no_slices(cluster: sw.Cluster) -> None:
    with pytest.raises(CaptureError, match="has no sequence among its inputs"):
        sw.plan(graph_of("mlp"), cluster, **ASKED | {"pp": 2, "dp": 2}, slices=2)
