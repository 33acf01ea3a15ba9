"""Gathers of shard groups over several nodes: the price of both ways, and which a plan takes."""

from dataclasses import replace

import pytest

import shardwright as sw
from shardwright import Cluster
from shardwright.core.capabilities import MemoryTraits
from shardwright.core.cluster.hardware import Link
from tests.core.toy import decoder

GRAPH = decoder(layers=4, hidden=1024, vocabulary=8192)
ABLE = replace(
    GRAPH,
    memory_traits=MemoryTraits(gathers_units=True),
    capabilities=replace(GRAPH.capabilities, exchanges_as_planned=True),
)
PINS = {"pp": 1, "tp": 1, "microbatch": 1, "precision": "bf16", "recompute": "none", "gathered_stages": 0,
        "reduce_after": "each"}  # fmt: skip


def link(name: str, bandwidth: float, latency_s: float, sharing: str) -> Link:
    return Link(name, bandwidth, latency_s, sharing=sharing)


@pytest.mark.parametrize("sharing", ["device", "node"])
@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (2, 8), (16, 8)])
def test_both_stages_take_as_long_as_their_bytes(nodes: int, each: int, sharing: str) -> None:
    """By hand: every rank takes in nodes − 1 shards over its port, or its part of the node's, and then each − 1 times
    as many shards as there are nodes over the link inside."""
    cluster = Cluster(
        "a100-80gb", nodes=nodes, devices_per_node=each,
        intra_node=link("inside", 100e9, 2e-6, "device"), inter_node=link("outside", 10e9, 9e-6, sharing),
    )  # fmt: skip
    size, ranks = 256e6, nodes * each
    group = cluster.group(range(ranks))
    assert group.has_stages
    inside, outside = (
        one.effective_bandwidth_bytes_per_s for one in (cluster.groups[0].intra_node, cluster.inter_node)
    )
    port = outside if sharing == "device" else outside / each
    between = (nodes - 1) * (9e-6 + size / ranks / port)
    within = (each - 1) * (2e-6 + nodes * size / ranks / inside)
    for found in (group.all_gather_s(size, in_stages=True), group.reduce_scatter_s(size, in_stages=True)):
        assert found == pytest.approx(between + within, rel=1e-12)
    assert group.all_gather_s(size) == group.all_gather_s(size, in_stages=False)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 4], [0, 4], [0, 1, 2, 3], [0]])
def test_groups_without_a_grid_have_no_stages(ranks: list[int]) -> None:
    group = Cluster("a100-80gb", nodes=2, devices_per_node=4, inter_node="ethernet-100g").group(ranks)
    assert not group.has_stages
    assert group.all_gather_s(1e6, in_stages=True) == group.all_gather_s(1e6)


def planned(inter_node: str | Link, shard: int = 3, graph: object = ABLE, hardware: str = "a100-80gb", **pins: object):
    inside = link("inside", 100e9, 0.0, "device")
    cluster = Cluster(hardware, nodes=2, devices_per_node=4, intra_node=inside, inter_node=inter_node)
    return sw.plan(graph, cluster, batch=8, dp=8, shard=shard, **PINS | pins)


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_stages_are_planned_where_they_are_faster(shard: int) -> None:
    pins = {} if shard == 3 else {"reduce_after": None}
    fast = planned("ethernet-100g", shard, **pins)
    assert fast.decision.hierarchical_gathers
    both = [planned("ethernet-100g", shard, hierarchical_gathers=asked, **pins) for asked in (True, False)]
    assert [plan.decision.hierarchical_gathers for plan in both] == [True, False]
    assert fast.predicted.step_time_s == both[0].predicted.step_time_s < both[1].predicted.step_time_s
    inside = link("inside", 100e9, 0.0, "device")
    cluster = Cluster("a100-80gb", nodes=2, devices_per_node=4, intra_node=inside, inter_node="ethernet-100g")
    group = cluster.group(range(8))
    if shard == 1:
        size = 2 * fast.model.parameter_count
        ways = (2 * group.all_gather_s(size, in_stages=staged) for staged in (True, False))
        assert [plan.predicted.data_parallel_s for plan in both] == pytest.approx(list(ways))


def test_one_ring_is_planned_where_all_ports_together_are_as_fast_as_the_links_inside() -> None:
    """What two stages save between the nodes they take within. Latency alone speaks for them."""
    for latency_s, staged in ((0.0, False), (1e-3, True)):
        plan = planned(link("outside", 25e9, latency_s, "device"))
        assert plan.decision.hierarchical_gathers is staged


def test_cpus_take_stages_wherever_there_are_any() -> None:
    assert planned("ethernet-100g", hardware="cpu", precision="fp32").decision.hierarchical_gathers


def test_nothing_is_said_where_there_is_nothing_to_say() -> None:
    """Without sharding, in groups that lie in one node, and of runtimes that gather as they like."""
    for plan in (
        planned("ethernet-100g", 0, reduce_after=None),
        planned("ethernet-100g", shard_group=4),
        planned("ethernet-100g", shard_group=4, hierarchical_gathers=True),
        planned("ethernet-100g", graph=GRAPH),
    ):
        assert not plan.decision.hierarchical_gathers
