"""Collectives by message size, number of ranks and port: what must hold of every link, whatever its constants."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import Cluster
from shardwright.core.cluster.collectives import send_s
from shardwright.core.cluster.groups import RING_PLATEAU, TREE_INSIDE, Group
from shardwright.core.cluster.hardware import Link, link_names, load_link
from shardwright.core.cluster.hardware.protocol import SIMPLE, Protocol, protocols_of, transport_names
from shardwright.core.errors import ClusterError

INSIDE = ("nvlink2", "nvlink3", "nvlink4", "pcie3", "pcie5", "ici-v5e", "shared-memory")
OUTSIDE = ("ib-hdr200", "ib-ndr400", "efa-400g", "ethernet-25g", "ethernet-100g", "wan-ocean", "tpu-dcn")
SIZES = st.one_of(st.integers(0, 1 << 22), st.integers(0, 1 << 36))


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Groups of 2 to 4,096 ranks in a node or over several, of unlike links, alone on their ports or sharing them."""
    inside, outside = load_link(draw(st.sampled_from(INSIDE))), load_link(draw(st.sampled_from(OUTSIDE)))
    nodes, per_node = draw(st.integers(1, 512)), draw(st.integers(1, 8))
    if nodes == 1:
        return Group(max(2, per_node), 1, inside)
    port = outside.scaled(draw(st.sampled_from([0.125, 0.5, 1.0, 8.0])))
    return Group(nodes * per_node, nodes, inside, port, per_node)


@settings(max_examples=50)
@given(group=groups(), small=SIZES, more=SIZES)
def test_more_bytes_never_take_less_time(group: Group, small: int, more: int) -> None:
    for seconds in (group.all_reduce_s, group.all_gather_s, group.reduce_scatter_s):
        assert seconds(small) <= seconds(small + more)
    assert group.all_gather_s(small, in_stages=True) <= group.all_gather_s(small + more, in_stages=True)


@settings(max_examples=50)
@given(group=groups(), size=SIZES)
def test_nothing_is_faster_than_its_hops_or_than_its_port(group: Group, size: int) -> None:
    """Of a gather a node takes in what the others hold, a rank in a node what it lacks; of a reduction twice that."""
    lacking = (group.nodes - 1) / group.nodes if group.outside else (group.ranks - 1) / group.ranks
    port = (group.outside or group.inside).bandwidth_bytes_per_s
    fewest = min(by.ring_hop_share for by in (group.outside or group.inside).protocols)
    hop_s = fewest * (group.outside or group.inside).latency_s
    gathers = (group.all_gather_s(size), group.reduce_scatter_s(size), group.all_gather_s(size, in_stages=True))
    assert min(gathers) >= max(hop_s, lacking * size / port) * (1 - 1e-12)
    assert group.all_reduce_s(size) >= 2 * max(hop_s, lacking * size / port) * (1 - 1e-12)


@settings(max_examples=50)
@given(ranks=st.integers(2, 2000), size=SIZES, name=st.sampled_from(INSIDE))
def test_the_latency_of_small_messages_grows_with_the_ranks(ranks: int, size: int, name: str) -> None:
    link = load_link(name)
    fewer, more = Group(ranks, 1, link), Group(ranks + 1, 1, link)
    assert fewer.all_gather_s(size) < more.all_gather_s(size)
    hop = min(by.ring_hop_share for by in link.protocols) * link.latency_s
    assert more.all_gather_s(0) - fewer.all_gather_s(0) == pytest.approx(hop)
    assert more.all_reduce_s(0) - fewer.all_reduce_s(0) == pytest.approx(2 * hop)


@settings(max_examples=50)
@given(group=groups(), size=st.integers(1, 1 << 34))
def test_bandwidth_rises_with_the_message(group: Group, size: int) -> None:
    for seconds in (group.all_reduce_s, group.all_gather_s):
        assert size / seconds(size) <= 2 * size / seconds(2 * size) * (1 + 1e-12)


def test_the_worked_example_of_a_node() -> None:
    """Eight A100: 1 KiB by LL, 4 MiB by LL128, 1 GiB by Simple, as NCCL's tuning table has them."""
    link = dataclasses.replace(load_link("nvlink3"), latency_s=3.4e-6, efficiency=235 / 300)
    group = Group(8, 1, link)
    assert group.all_reduce_s(1024) == pytest.approx(6.6e-6 + 14 * 0.6e-6 + 1024 * 1.75 / (0.37 * 235e9), rel=3e-3)
    ll128 = 14e-6 + 14 * 1.9e-6 + (4 << 20) * 1.75 / (0.92 * 235e9)
    assert group.all_reduce_s(4 << 20) == pytest.approx(ll128, rel=1e-3)
    assert group.all_reduce_s(1 << 30) == pytest.approx(8.4e-6 + 14 * 3.4e-6 + (1 << 30) * 1.75 / 235e9)
    assert group.all_gather_s(1 << 30) == pytest.approx(8.4e-6 + 7 * 3.4e-6 + (1 << 30) * 0.875 / 235e9)


def test_the_worked_example_of_four_nodes() -> None:
    """1 GiB over four nodes of eight: the better of the ring, with its plateau, and the double tree."""
    inside, port = load_link("nvlink3"), load_link("ib-hdr200").scaled(8)
    ring_s = 62 * (4 * port.latency_s + 28 * inside.latency_s) / 32 * RING_PLATEAU
    ring_s += 8.4e-6 + (1 << 30) * 62 / 32 / (0.9 * 200e9)
    assert Group(32, 4, inside, port, 8).all_reduce_s(1 << 30) == pytest.approx(ring_s)
    tree_s = 14e-6 + 2 * (2 * 0.607 * port.latency_s + 7 * 0.368 * inside.latency_s)
    slowest = 0.92 * min(0.9 * 0.9 * 200e9, TREE_INSIDE * inside.effective_bandwidth_bytes_per_s)
    assert Group(32, 4, inside, port, 8).all_reduce_s(1 << 20) == pytest.approx(tree_s + 2 * (1 << 20) / slowest)


def test_two_nodes_are_crossed_once() -> None:
    """Each is the root of one of the two trees, so that a slow port carries every byte once, not twice."""
    inside, port = load_link("nvlink3"), Link("slow", 1e9, 1e-5, sharing="node")
    two, three = Group(16, 2, inside, port, 8), Group(24, 3, inside, port, 8)
    assert two.all_reduce_s(1e9) == pytest.approx(1 / 0.9, rel=1e-3)
    assert three.all_reduce_s(1e9) == pytest.approx(2 * 23 / 24, rel=1e-2)  # the ring


@given(size=SIZES, name=st.sampled_from(link_names()))
def test_messages_take_a_hop_and_their_bytes(size: int, name: str) -> None:
    link = load_link(name)
    seconds = send_s(size, link)
    assert seconds >= size / link.effective_bandwidth_bytes_per_s
    assert seconds >= min(by.ring_hop_share for by in link.protocols) * link.latency_s
    assert seconds <= send_s(size + 4096, link)
    assert seconds <= 1.2e-3 + link.latency_s + size / link.effective_bandwidth_bytes_per_s  # EFA's many flows


@pytest.mark.parametrize("transport", transport_names())
def test_every_transport_has_the_protocol_of_large_messages(transport: str) -> None:
    by = {protocol.name: protocol for protocol in protocols_of(transport)}
    assert by[SIMPLE].ring_hop_share == 1.0
    assert max(protocol.bandwidth_share for protocol in by.values()) == 1.0


def test_unknown_transports_name_the_nearest() -> None:
    with pytest.raises(ClusterError, match="transport 'nvlinks' is not known; did you mean 'nvlink'"):
        Link("mine", 1e9, 1e-6, transport="nvlinks")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"start_s": -1.0}, "start_s must be"),
        ({"ring_hop_share": 0.0}, "ring_hop_share must be"),
        ({"bandwidth_share": 1.5}, "bandwidth_share must be"),
        ({"most_bandwidth_bytes_per_s": float("nan")}, "most_bandwidth_bytes_per_s must be"),
    ],
)
def test_protocols_that_cannot_be_are_refused(changes: dict, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        Protocol("mine", **changes)


def test_the_transport_of_a_link_is_kept_in_files() -> None:
    link = dataclasses.replace(load_link("ib-hdr200"), name="mine", bandwidth_bytes_per_s=13e9)
    cluster = Cluster("a100-80gb", nodes=2, devices_per_node=8, inter_node=link)
    again = Cluster.from_document(cluster.to_document())
    assert again == cluster
    assert again.inter_node is not None
    assert again.inter_node.transport == "infiniband"
