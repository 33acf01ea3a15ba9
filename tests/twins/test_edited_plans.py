"""Random edits of plans of one model in both frameworks (`benchmarks/edited_plans.py` makes more, of more models)."""

import random

import pytest

import shardwright as sw
from tests.plan_edit_judge import Original, judge
from tests.plan_edits import random_edit
from tests.twins.models import Graphs, ncf


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    return ncf(512, 256, 16, 3)


@pytest.mark.parametrize("framework", [0, 1], ids=["torch", "jax"])
def test_30_random_edits_are_refused_by_name_or_are_what_plan_says(graphs: Graphs, framework: int) -> None:
    graph, cluster = graphs[framework], sw.Cluster("a100-80gb", devices_per_node=8)
    originals = [
        Original.of(graph, cluster, 32, pp=2, dp=2, tp=2, microbatch=4, schedule="1f1b", virtual_stages=1, shard=0),
        Original.of(graph, cluster, 64, pp=2, dp=4, tp=1, microbatch=2, shard=3, recompute="full"),
    ]
    rng, kinds = random.Random(7 + framework), []
    for number in range(30):
        original = originals[number % 2]
        outcome = judge(original, random_edit(rng, original))
        assert outcome.kind != "wrong", outcome
        kinds.append(outcome.kind)
    assert min(kinds.count("refused"), kinds.count("rescored")) >= 5, kinds
