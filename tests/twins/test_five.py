"""GPT-2, BERT, T5, NCF and ResNet: each with a twin in Flax that was written apart from it, and one plan for both."""

from dataclasses import replace
from functools import cache

import pytest

import shardwright as sw
from shardwright.core.cluster.hardware import load_profile
from tests.twins.models import TWINS, Graphs

SMALL = replace(load_profile("v100").device, memory_bytes=16 * 2**30, reserved_memory_bytes=0)
BATCHES = {"ncf": 65_536, "resnet": 1024}
CLUSTERS = {
    "a node of 4": sw.Cluster("a100-80gb", devices_per_node=4),
    "two nodes": sw.Cluster("h100", nodes=2, devices_per_node=8),
    "a node of small ones": sw.Cluster(SMALL, devices_per_node=8),
}
"""On the last one memory decides how GPT-2 is run."""
SAMPLES = {"a node of 4": 64, "two nodes": 256, "a node of small ones": 128}


@cache
def captured(name: str) -> Graphs:
    return TWINS[name]()


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if name == "bert" else ()) for name in TWINS])
def twins(request: pytest.FixtureRequest) -> tuple[str, Graphs]:
    return request.param, captured(request.param)


SEARCHED = {("gpt2", "two nodes"), ("ncf", "two nodes")}
"""The others, which take a minute, with the slow tests."""


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        pytest.param(name, cluster, marks=() if (name, cluster) in SEARCHED else pytest.mark.slow)
        for name in TWINS
        for cluster in CLUSTERS
    ],
)
def test_a_free_search_finds_one_plan(name: str, cluster: str) -> None:
    graphs = captured(name)
    plans = [
        sw.plan(graph, CLUSTERS[cluster], batch=BATCHES.get(name, SAMPLES[cluster]), frameworks=["torch", "jax"])
        for graph in graphs
    ]
    comparison = sw.compare(*plans)
    assert comparison.same_decision, comparison.unexpected
    assert not comparison.unexpected
    assert plans[0].rebind(graphs[1]).parameter_layouts("jax") == plans[1].parameter_layouts("jax")


def test_pipelines_and_tensor_layouts_are_the_same(twins: tuple[str, Graphs]) -> None:
    name, graphs = twins
    cluster = sw.Cluster("a100-80gb", devices_per_node=8)
    pins = {"pp": 2, "tp": 2, "dp": 2, "microbatch": BATCHES.get(name, 64) // 16, "schedule": "1f1b"}
    plans = [
        sw.plan(graph, cluster, batch=BATCHES.get(name, 64), **pins, frameworks=["torch", "jax"]) for graph in graphs
    ]
    comparison = sw.compare(*plans)
    assert comparison.same_decision, comparison.unexpected
    assert plans[0].decision.layouts, "nothing is split: the case tests nothing"


def test_their_sizes_and_their_products_agree(twins: tuple[str, Graphs]) -> None:
    from shardwright.core.cost.unit_work import forward_flops

    _, (ours, twin) = twins
    assert ours.parameter_count() == twin.parameter_count()
    assert forward_flops(ours, 4) == pytest.approx(forward_flops(twin, 4), rel=0.01)
