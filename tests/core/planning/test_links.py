"""Where the ranks of a mesh lie on nodes, against a look at every rank; and which smaller clusters are tried."""

from itertools import product

import pytest

from shardwright import Cluster, Mesh
from shardwright.core.search.devices_in_use import _counts, _fewer
from shardwright.core.tables.mesh_links import Links


@pytest.mark.parametrize(("nodes", "devices"), [(2, 4), (4, 2), (1, 8), (8, 1)])
def test_pipelines_that_share_nodes_are_those_whose_ranks_do(nodes: int, devices: int) -> None:
    cluster = Cluster("a100-80gb", nodes=nodes, devices_per_node=devices)
    links, seen = Links(cluster), set()
    for order, pp, dp, tp in product(("PDT", "DTP", "DPT"), *[(1, 2, 4, 8)] * 3):
        if pp * dp * tp != nodes * devices:
            continue
        mesh = Mesh.placed(order, pp=pp, dp=dp, tp=tp)
        on_nodes: dict[tuple[int, int], set[int]] = {}
        for rank in range(mesh.size):
            at = mesh.coordinates(rank)
            on_nodes.setdefault((at["dp"], at["tp"]), set()).add(cluster.node_of(rank))
        shared = pp > 1 and all(len(held) == 1 for held in on_nodes.values())
        assert links.pipelines_share_nodes(mesh) == shared, mesh
        seen.add(shared)
    assert seen == ({False, True} if devices > 1 else {False})


def test_fewer_nodes_are_the_powers_of_two_below() -> None:
    assert [_fewer(count) for count in (1, 2, 5, 8)] == [(), (1,), (4, 2, 1), (4, 2, 1)]


def test_of_kinds_of_nodes_all_numbers_are_tried_with_each_other() -> None:
    alike = Cluster("a100-80gb", nodes=4, devices_per_node=8)
    assert list(_counts(alike.groups)) == [(4,), (2,), (1,)]
