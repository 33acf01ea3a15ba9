"""The physics of the cost model against what must hold whatever the constants: bounds, steps, limits."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright import Cluster
from shardwright.core.cluster.groups import Group
from shardwright.core.cluster.hardware import Link, load_device, preset_names
from shardwright.core.cost.matrix_products import product_s
from shardwright.core.cost.unit_seconds import unit_cost
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import fold
from tests.core.toy import decoder

A100 = load_device("a100-80gb")
PLAIN = replace(A100, compute_units=None, tile_depth=None)
INSIDE = Link("inside", 200e9, 3e-6)
OUTSIDE = Link("outside", 20e9, 10e-6)


@given(m=st.integers(1, 5000), n=st.integers(1, 5000), k=st.integers(1, 5000), batches=st.integers(1, 64))
def test_shapes_only_slow_a_product_down(m: int, n: int, k: int, batches: int) -> None:
    peak = A100.flops_per_s("bf16") * A100.matmul_efficiency
    assert product_s(A100, "bf16", batches, m, n, k, 0) >= 2 * batches * m * n * k / peak * (1 - 1e-9)
    assert product_s(PLAIN, "bf16", batches, m, n, k, 0) == pytest.approx(2 * batches * m * n * k / peak)


def test_large_products_come_close_to_the_peak() -> None:
    flops = 2 * 8192**3
    reached = flops / product_s(A100, "bf16", 1, 8192, 8192, 8192, 3 * 8192**2 * 2)
    assert 0.9 < reached / (A100.flops_per_s("bf16") * A100.matmul_efficiency) <= 1.0


def test_one_tile_more_than_a_wave_costs_a_wave() -> None:
    """108 tiles of 256 × 128 fill the units once; one more row of tiles needs another wave."""
    full = product_s(A100, "bf16", 1, 256 * 12, 128 * 9, 192, 0)
    more = product_s(A100, "bf16", 1, 256 * 12 + 1, 128 * 9, 192, 0)
    assert more > 1.15 * full


def test_a_product_of_few_flops_and_many_bytes_takes_the_bytes() -> None:
    size = 10**9
    bandwidth = A100.memory_bandwidth_bytes_per_s * A100.memory_efficiency
    assert product_s(A100, "bf16", 1, 1, 64, 64, size) == pytest.approx(size / bandwidth)


@given(size=st.integers(1, 10**10), nodes=st.integers(2, 512), per_node=st.integers(1, 8))
def test_groups_over_nodes_take_the_faster_of_ring_and_tree(size: int, nodes: int, per_node: int) -> None:
    group = Group(nodes * per_node, nodes, INSIDE, OUTSIDE)
    ring = group.reduce_scatter_s(size) + group.all_gather_s(size)
    assert group.all_reduce_s(size) <= ring * (1 + 1e-9)
    slowest = min(20e9, 200e9) if per_node > 1 else 20e9
    assert group.all_reduce_s(size) >= size / slowest


def test_trees_make_small_messages_grow_with_the_logarithm() -> None:
    times = [Group(n, n, INSIDE, OUTSIDE).all_reduce_s(8) for n in (64, 4096)]
    assert times[1] / times[0] == pytest.approx(math.log2(4096) / math.log2(64), rel=1e-3)


def test_groups_that_leave_a_node_together_share_its_port() -> None:
    shared = Cluster("a100-80gb", nodes=4, devices_per_node=8, inter_node="efa-400g")
    alone, eighth = shared.group(range(32)), shared.group(range(0, 32, 8))
    size = 10**9
    assert eighth.all_reduce_s(size) > 4 * alone.all_reduce_s(size)
    own = Cluster("a100-80gb", nodes=4, devices_per_node=8, inter_node="ib-hdr200")
    assert own.group(range(0, 32, 8)).all_reduce_s(size) < eighth.all_reduce_s(size)


def test_where_the_host_is_slower_the_device_waits() -> None:
    graph = decoder(layers=2)
    work = WorkCounter(graph).count(fold(graph).units[1], 1, "bf16")
    times = [unit_cost(work, replace(A100, dispatch_s=s), "bf16").forward_s for s in (0.0, 1e-4, 1e-3)]
    assert times[0] < times[1] < times[2]
    assert times[2] == pytest.approx(work.kernels * 1e-3, rel=0.01)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_cluster(name: str) -> None:
    cluster = Cluster.preset(name, nodes=3)
    assert cluster.nodes == 3
    assert cluster.world_size % 3 == 0


def test_an_unknown_preset_names_the_nearest() -> None:
    from shardwright.core.errors import ClusterError

    with pytest.raises(ClusterError, match="did you mean 'p4d'"):
        Cluster.preset("p4dd")


@pytest.mark.parametrize(("ranks", "nodes"), [(16, 4), (16, 16), (6, 3), (8, 1)])
def test_rings_and_trees_are_their_closed_forms(ranks: int, nodes: int) -> None:
    """A ring crosses each node's ports once; a tree takes log2(nodes) hops out of a node and those inside it."""
    inside, outside = INSIDE.effective_bandwidth_bytes_per_s, OUTSIDE.effective_bandwidth_bytes_per_s
    group = Group(ranks, nodes, INSIDE, None if nodes == 1 else OUTSIDE)
    bandwidth = inside if nodes == 1 else outside
    hop = 3e-6 if nodes == 1 else (nodes * 10e-6 + (ranks - nodes) * 3e-6) / ranks
    for size in (8.0, 1e6, 1e10):
        ring = (ranks - 1) * (hop + size / ranks / bandwidth)
        assert group.all_gather_s(size) == pytest.approx(ring)
        assert group.reduce_scatter_s(size) == pytest.approx(ring)
        hops = math.ceil(math.log2(nodes)) * 10e-6 + (ranks // nodes - 1) * 3e-6
        tree = 2 * (hops + size / (0.9 * bandwidth))
        assert group.all_reduce_s(size) == pytest.approx(2 * ring if nodes == 1 else min(2 * ring, tree))
