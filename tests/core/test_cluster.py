"""Ranks, nodes and the links between them; the cluster file."""

import dataclasses
import pickle
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.cluster.cluster import Cluster, NodeGroup
from shardwright.core.cluster.hardware import Link, load_device, load_link, load_profile
from shardwright.core.errors import ClusterError

FAST = Link("fast", bandwidth_bytes_per_s=100e9, latency_s=1e-6)
PORT = Link("port", bandwidth_bytes_per_s=10e9, latency_s=5e-6, sharing="device")
SHARED = Link("shared", bandwidth_bytes_per_s=40e9, latency_s=7e-6, sharing="node")


def unlike() -> Cluster:
    """Two nodes of four V100, then three of two T4: ranks 0-7 and 8-13."""
    return Cluster.of_groups(
        [
            NodeGroup(load_device("v100"), 2, 4, load_link("nvlink2")),
            NodeGroup(load_device("t4"), 3, 2, load_link("pcie3")),
        ],
        "ethernet-100g",
    )


def of_regions(inter_region: str | Link | None = "wan-ocean") -> Cluster:
    """Two nodes of two T4 in the east, one in the west: ranks 0-3 and 4-5."""
    device, inside = load_device("t4"), load_link("pcie3")
    return Cluster.of_groups(
        [NodeGroup(device, 2, 2, inside, "east"), NodeGroup(device, 1, 2, inside, "west")],
        "ethernet-100g",
        inter_region,
    )


def test_between_regions_the_far_link_decides() -> None:
    cluster, far = of_regions(), load_link("wan-ocean")
    assert cluster.link_between(0, 2).name == "ethernet-100g"
    assert cluster.link_between(3, 4).name == "wan-ocean"
    assert cluster.link_between(3, 4).latency_s == far.latency_s
    size = 1 << 20
    assert cluster.group((0, 4)).all_reduce_s(size) > size / far.effective_bandwidth_bytes_per_s
    assert cluster.group((0, 2)).all_reduce_s(size) < far.latency_s
    with pytest.raises(ClusterError, match="several regions needs inter_region"):
        of_regions(None)


def test_a_cluster_takes_the_links_of_its_profile() -> None:
    cluster = Cluster("a100-80gb", nodes=64, devices_per_node=8)
    assert (cluster.world_size, cluster.nodes, str(cluster)) == (512, 64, "64 × 8 a100-80gb")
    assert cluster.link_between(0, 7).name == "nvlink3"
    assert cluster.link_between(7, 8).name == "ib-hdr200"
    assert cluster.device(511) == load_device("a100-80gb")
    assert cluster.memory_bytes(0) == 80 * 2**30 - load_device("a100-80gb").reserved_memory_bytes


def test_links_can_be_replaced_by_name_or_value() -> None:
    cluster = Cluster("h100", nodes=2, devices_per_node=4, intra_node="pcie5", inter_node=PORT)
    assert cluster.link_between(0, 1) == load_link("pcie5")
    assert cluster.link_between(0, 4) == PORT


@given(nodes=st.integers(1, 40), devices_per_node=st.integers(1, 16))
def test_ranks_run_through_the_nodes_in_order(nodes: int, devices_per_node: int) -> None:
    cluster = Cluster("t4", nodes=nodes, devices_per_node=devices_per_node)
    ranks = [rank for node in range(nodes) for rank in cluster.ranks_of(node)]
    assert ranks == list(range(cluster.world_size))
    assert all(cluster.node_of(rank) == node for node in range(nodes) for rank in cluster.ranks_of(node))


def test_groups_of_unlike_nodes() -> None:
    cluster = unlike()
    assert (cluster.world_size, cluster.nodes, cluster.is_uniform) == (14, 5, False)
    assert [cluster.node_of(rank) for rank in range(14)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [cluster.device(rank).name for rank in (0, 7, 8, 13)] == ["v100", "v100", "t4", "t4"]
    assert cluster.ranks_of(3) == range(10, 12)
    assert cluster.link_between(6, 7).name == "nvlink2"
    assert cluster.link_between(8, 9).name == "pcie3"
    assert cluster.link_between(7, 8).name == "ethernet-100g"
    assert cluster.memory_bytes(0) > cluster.memory_bytes(8)
    assert str(cluster) == "2 × 4 v100 + 3 × 2 t4"


def test_ports_of_the_devices_add_up_within_a_ring() -> None:
    cluster = Cluster("h100", nodes=4, devices_per_node=8, intra_node=FAST, inter_node=PORT)
    assert cluster.link_for_group([0, 8, 16, 24]) == PORT  # one member in each node
    assert cluster.link_for_group([0, 1, 8, 9]).bandwidth_bytes_per_s == 20e9
    assert cluster.link_for_group(range(32)).bandwidth_bytes_per_s == 80e9
    assert cluster.link_for_group([0, 1, 2, 8]).bandwidth_bytes_per_s == 10e9  # the lone member decides
    assert cluster.link_for_group([0, 8], concurrent=8) == PORT  # each group has ports of its own


def test_a_port_of_the_node_is_shared() -> None:
    cluster = Cluster("v100", nodes=4, devices_per_node=8, intra_node=FAST, inter_node=SHARED)
    assert cluster.link_for_group(range(32)).bandwidth_bytes_per_s == 40e9
    assert cluster.link_for_group([0, 8], concurrent=8).bandwidth_bytes_per_s == 5e9
    assert cluster.link_between(0, 8, concurrent=4).bandwidth_bytes_per_s == 10e9
    assert cluster.link_between(0, 1, concurrent=4) == FAST


def test_a_ring_is_never_faster_than_the_link_inside_its_nodes() -> None:
    cluster = Cluster("h100", nodes=2, devices_per_node=16, intra_node=FAST, inter_node=PORT)
    link = cluster.link_for_group(range(32))
    assert link.bandwidth_bytes_per_s == 100e9  # not 16 ports of 10
    assert link.latency_s == PORT.latency_s  # each step waits for the hop between the nodes
    assert unlike().link_for_group([8, 9, 10, 11]).name == "ethernet-100g"


def test_a_group_within_one_node() -> None:
    cluster = Cluster("h100", nodes=2, devices_per_node=4, intra_node=FAST, inter_node=PORT)
    assert cluster.link_for_group([4, 5, 6]) == FAST
    assert cluster.link_for_group([4]) == FAST


@pytest.mark.parametrize("rank", [-1, 14, 1.0, True, "0"])
def test_a_rank_outside_the_cluster_is_refused(rank: int) -> None:
    with pytest.raises(ClusterError, match="is not in this cluster: its 14 ranks are 0 to 13"):
        unlike().node_of(rank)


def test_impossible_questions_are_refused() -> None:
    cluster = unlike()
    with pytest.raises(ClusterError, match="rank 3 has no link to itself"):
        cluster.link_between(3, 3)
    with pytest.raises(ClusterError, match="a group needs at least one rank"):
        cluster.link_for_group([])
    with pytest.raises(ClusterError, match=r"a group names each rank once; given \(0, 1, 0\)"):
        cluster.link_for_group([0, 1, 0])
    with pytest.raises(ClusterError, match="concurrent must be an integer of at least 1"):
        cluster.link_for_group([0, 1], concurrent=0)
    with pytest.raises(ClusterError, match="node 5 is not in this cluster: its 5 nodes are 0 to 4"):
        cluster.ranks_of(5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "a100"}, "hardware 'a100' is not known; did you mean"),
        ({"nodes": 0}, "nodes must be an integer of at least 1; given 0"),
        ({"devices_per_node": 2.0}, "devices_per_node must be an integer of at least 1; given 2.0"),
        ({"nodes": True}, "nodes must be an integer"),
        ({"intra_node": "nvlink33"}, "link 'nvlink33' is not known; did you mean 'nvlink3'"),
        ({"device": "p4d"}, "'p4d' is a kind of node, not of hardware: write Cluster.preset('p4d', nodes=…)"),
        ({"device": 4}, "hardware is the name of a profile, the path of a profile file or a Device; given 4"),
        (
            {"intra_node": 150e9},
            "a link is the name of a known one, or a Link with bandwidth and latency; given 15",
        ),
        ({"inter_node": load_device("t4")}, "a link is the name of a known one, or a Link"),
        ({"device": dataclasses.replace(load_device("t4"), name="mine")}, "'mine' is not in the catalogue"),
        (
            {"device": dataclasses.replace(load_device("t4"), name="mine"), "intra_node": "pcie3"},
            "a cluster of several nodes needs inter_node",
        ),
    ],
)
def test_an_impossible_cluster_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster(**({"device": "t4", "nodes": 2, "devices_per_node": 2} | arguments))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_groups_that_are_none_are_refused() -> None:
    known, inside = load_device("t4"), load_link("pcie3")
    with pytest.raises(ClusterError, match="needs device as a Device; given 't4'"):
        NodeGroup("t4", 1, 4, inside)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="needs intra_node as a Link; given 'pcie3'"):
        NodeGroup(known, 1, 4, "pcie3")  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="each a NodeGroup; given"):
        Cluster.of_groups([known])  # type: ignore[list-item]
    with pytest.raises(ClusterError, match="preset 4 is not known; did you mean 'p4d'"):
        Cluster.preset(4)  # type: ignore[arg-type]


def test_one_node_of_a_new_device_needs_no_link_between_nodes() -> None:
    new = dataclasses.replace(load_device("t4"), name="mine")
    assert Cluster(new, devices_per_node=2, intra_node="pcie3").inter_node is None


def test_clusters_are_values() -> None:
    cluster = Cluster("a100-80gb", nodes=2, devices_per_node=8)
    assert cluster == Cluster(load_profile("a100-80gb"), nodes=2, devices_per_node=8)
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert len({cluster, Cluster("a100-80gb", nodes=2, devices_per_node=8), unlike()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.inter_node = None  # type: ignore[misc]


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster("a100-80gb", nodes=64, devices_per_node=8),
        Cluster("h100", nodes=2, devices_per_node=4, intra_node=FAST, inter_node=SHARED),
        Cluster(dataclasses.replace(load_device("v100"), memory_bytes=16 * 2**30), devices_per_node=8),
        Cluster(dataclasses.replace(load_device("t4"), name='say "hi"\n'), intra_node="pcie3"),
        unlike(),
        of_regions(),
        Cluster.of_groups([unlike().groups[0], NodeGroup(load_device("t4"), 1, 1, FAST)], PORT),
    ],
    ids=str,
)
def test_a_cluster_survives_its_file(tmp_path, cluster: Cluster) -> None:
    path = tmp_path / "cluster.toml"
    cluster.save(path)
    assert Cluster.load(path) == cluster
    assert Cluster.from_document(cluster.to_document()) == cluster


def test_the_file_says_which_constants_a_user_changed(tmp_path) -> None:
    smaller = dataclasses.replace(load_device("v100"), memory_bytes=16 * 2**30)
    Cluster(smaller).save(tmp_path / "cluster.toml")
    origins = Cluster.load(tmp_path / "cluster.toml").device(0).origins
    assert origins["memory_bytes"] == "user: set in code"
    assert origins["kernel_launch_s"] == load_device("v100").origins["kernel_launch_s"]


def test_a_cluster_file_by_hand(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        """
        format = 1
        device = "a100-40gb"
        nodes = 16
        devices_per_node = 8
        [inter_node]
        name = "our-fabric"
        sharing = "node"
        bandwidth_bytes_per_s = 100e9
        latency_s = 6e-6
        """
    )
    cluster = Cluster.load(path)
    assert cluster.world_size == 128
    assert cluster.inter_node == Link("our-fabric", 100e9, 6e-6, "node")
    assert cluster.link_between(0, 1) == load_link("nvlink3")


VALID = 'format = 1\ndevice = "t4"\nnodes = 2\ndevices_per_node = 4\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (VALID.replace("t4", "t44"), "hardware 't44' is not known; did you mean 't4'"),
        (VALID.replace("nodes = 2", "nodes = 0"), ": nodes: Input should be greater than or equal to 1"),
        (VALID.replace("nodes = 2", 'nodes = "2"'), ": nodes: Input should be a valid integer; given '2'"),
        (VALID.replace("nodes = 2\n", ""), ": nodes: missing"),
        (VALID + "device_per_node = 4", "device_per_node: unknown key"),
        (VALID + 'inter_node = "ethernet-100"', "link 'ethernet-100' is not known; did you mean 'ethernet-100g'"),
        (VALID + "[intra_node]\nbandwidth_gbps = 100\n", "intra_node.bandwidth_gbps: unknown key; did you mean 'band"),
        (
            VALID + "[intra_node]\nbandwidth_bytes_per_s = 100\nlatency_s = 1e-6\n",
            "100 is not plausible, expected 100000 to 1e+14; the unit is bytes per second",
        ),
        (
            VALID + "[intra_node]\nbandwidth_bytes_per_s = 1e9\nlatency_s = { value = 1e-6 }\n",
            "intra_node.latency_s.origin: missing",
        ),
        (VALID.replace("format = 1", "format = 9"), "format 9 is newer than this version reads (1); upgrade"),
        (VALID + '[[groups]]\ndevice = "t4"\nnodes = 1\n', "device stands at the top beside groups"),
        ("format = 1\ngroups = []", "groups: List should have at least 1 item"),
        ("format = 1\ngroups = 3", "groups: Input should be a valid list"),
        ("format: 1", "is not a TOML cluster file"),
        ("", "format: missing"),
    ],
)  # fmt: skip
def test_a_faulty_cluster_file_is_refused_with_the_path_inside_it(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        Cluster.load(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_cluster_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ClusterError, match="cannot read the cluster file"):
        Cluster.load(tmp_path / "none.toml")


def test_groups_at_one_distance_are_counted_as_ranks_one_by_one_are() -> None:
    """A search asks for them as ranges, hundreds of thousands long."""
    rng = random.Random(3)
    for _ in range(200):
        inside, nodes = rng.choice((1, 2, 3, 4, 8)), rng.choice((1, 2, 5, 9))
        cluster = Cluster(rng.choice(("a100-80gb", "v100", "t4")), nodes=nodes, devices_per_node=inside)
        first = rng.randrange(cluster.world_size)
        ranks = range(first, rng.randrange(first, cluster.world_size) + 1, rng.choice((1, 2, 3, 4, 8, 16)))
        assert cluster.group(ranks) == cluster.group(tuple(ranks)), ranks
        assert cluster.link_for_group(ranks) == cluster.link_for_group(tuple(ranks)), ranks
    begun = time.process_time()
    huge = Cluster("a100-80gb", nodes=100_000, devices_per_node=8)
    for _ in range(20):
        assert huge.group(range(0, huge.world_size, 2)).ranks == 400_000
    assert time.process_time() - begun < 2.0
    with pytest.raises(ClusterError, match="is not in this cluster"):
        huge.group(range(0, huge.world_size + 1, 2))


def test_devices_that_share_their_nodes_link_share_its_bandwidth() -> None:
    """A ring in the node has a hop from every member, one that leaves it a hop less; so have the rings beside it."""
    inside = Link("host", 12e9, 1e-5, sharing="node")
    cluster = Cluster("t4", nodes=4, devices_per_node=4, intra_node=inside, inter_node=SHARED)
    rates = {ranks: cluster.group(ranks).inside.bandwidth_bytes_per_s for ranks in ((0, 1), (0, 1, 2, 3), (0, 2))}
    assert rates == {(0, 1): 3e9, (0, 1, 2, 3): 3e9, (0, 2): 3e9}
    assert cluster.group(range(16)).inside.bandwidth_bytes_per_s == 4e9
    assert cluster.group(range(0, 16, 2)).inside.bandwidth_bytes_per_s == 6e9
    assert cluster.link_between(0, 1).bandwidth_bytes_per_s == 12e9
    assert cluster.link_between(0, 1, concurrent=2).bandwidth_bytes_per_s == 6e9
    own = Cluster("t4", nodes=4, devices_per_node=4, intra_node=FAST, inter_node=SHARED)
    assert own.group(range(4)).inside == own.group(range(16)).inside == own.link_between(0, 1, concurrent=4) == FAST
