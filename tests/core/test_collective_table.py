"""Measured collectives: what a profile's file keeps of them, and what lies between and beyond them."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import Cluster
from shardwright.core.cluster.collectives import send_s
from shardwright.core.cluster.groups import Group
from shardwright.core.cluster.hardware import Link, load_profile
from shardwright.core.cluster.hardware.collective_table import CollectiveTable, MeasuredCollective
from shardwright.core.errors import ClusterError
from tests.core.test_measurements import measurements

SIZES = (1 << 10, 1 << 16, 1 << 22)
BANDWIDTH = 3e9


def samples(ranks: int = 2) -> tuple[MeasuredCollective, ...]:
    """A ring of 20 µs and 2 GB/s, and messages of 30 µs and 2.5 GB/s."""
    share = (ranks - 1) / ranks
    found = []
    for size in SIZES:
        pass_s = (ranks - 1) * 20e-6 + share * size / 2e9
        found.append(MeasuredCollective("all_reduce", ranks, size, 2 * pass_s))
        found.append(MeasuredCollective("all_gather", ranks, size, pass_s))
        found.append(MeasuredCollective("reduce_scatter", ranks, size, 1.5 * pass_s))
        found.append(MeasuredCollective("send", 2, size, 30e-6 + size / 2.5e9))
    return tuple(found)


def link(*measured: MeasuredCollective) -> Link:
    return Link("measured", BANDWIDTH, 20e-6, efficiency=0.5, measured=CollectiveTable(measured))


@st.composite
def tables(draw: st.DrawFn) -> Link:
    """All-reduces of any sizes, in times that the port allows, in any order."""
    sizes = draw(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=6, unique=True))
    slower = st.floats(1.0, 1e3, allow_nan=False)
    return link(*(MeasuredCollective("all_reduce", 2, n, n / BANDWIDTH * draw(slower) + 1e-6) for n in sizes))


@settings(max_examples=60)
@given(measured=tables(), size=st.integers(0, 1 << 34), more=st.integers(0, 1 << 34))
def test_times_rise_with_bytes_and_stay_within_the_port(measured: Link, size: int, more: int) -> None:
    group = Group(2, 1, measured)
    seconds = group.all_reduce_s(size)
    assert seconds <= group.all_reduce_s(size + more)
    assert seconds >= size / BANDWIDTH * (1 - 1e-9)
    assert seconds >= min(each.seconds for each in measured.measured)  # latency: that of the fastest


def test_measured_sizes_have_their_own_times() -> None:
    group = Group(2, 1, link(*samples()))
    for each in samples():
        if each.kind == "send":
            assert send_s(each.size_bytes, group.inside) == each.seconds
        else:
            assert getattr(group, f"{each.kind}_s")(each.size_bytes) == each.seconds


def test_between_two_sizes_logarithms_are_on_a_line() -> None:
    table = CollectiveTable([MeasuredCollective("send", 2, n, s) for n, s in ((100, 1e-3), (10_000, 4e-3))])
    assert table.seconds("send", 2, 1000) == pytest.approx(2e-3)
    assert table.seconds("send", 2, 1) == 1e-3
    assert table.seconds("send", 2, 1_000_000) == pytest.approx(0.4)  # at the bandwidth of the largest
    assert table.seconds("all_reduce", 2, 1000) is None


def test_a_disturbed_time_is_that_of_the_next_size() -> None:
    times = {1000: 5e-3, 2000: 1e-3, 4000: 3e-3}
    table = CollectiveTable([MeasuredCollective("send", 2, n, s) for n, s in times.items()])
    assert [table.seconds("send", 2, n) for n in times] == [1e-3, 1e-3, 3e-3]


def test_other_numbers_of_ranks_take_the_links_constants() -> None:
    four, plain = Group(4, 1, link(*samples(2))), Group(4, 1, link())
    assert four.all_reduce_s(1 << 20) == plain.all_reduce_s(1 << 20)


def test_over_nodes_the_table_counts_where_each_has_one_rank_and_its_port_alone() -> None:
    measured = link(*samples())
    table_s = Group(2, 1, measured).all_gather_s(1 << 20)
    one_each = Cluster("cpu", nodes=2, devices_per_node=1, inter_node=measured)
    assert one_each.group([0, 1]).all_gather_s(1 << 20) == table_s
    two_each = Cluster("cpu", nodes=2, devices_per_node=2, inter_node=measured)
    assert two_each.group(range(4)).all_gather_s(1 << 20) != table_s
    assert not measured.scaled(0.5).measured


def test_a_profile_keeps_what_was_measured(tmp_path: Path) -> None:
    taken = measurements(ranks=4, collectives=samples(4) + samples(2)[:3])
    taken.save(tmp_path / "here.toml")
    kept = load_profile(tmp_path / "here.toml").intra_node
    assert tuple(kept.measured) == taken.collectives
    assert kept.effective_bandwidth_bytes_per_s == pytest.approx(2e9)
    assert kept.bandwidth_bytes_per_s == pytest.approx(max(each.port_bytes_per_s for each in taken.collectives))
    cluster = Cluster(tmp_path / "here.toml", devices_per_node=4)
    assert cluster.group(range(4)).reduce_scatter_s(SIZES[1]) == samples(4)[6].seconds
    assert cluster.group(range(2)).all_reduce_s(SIZES[0]) == samples(2)[0].seconds
    assert Cluster.from_document(cluster.to_document()).groups[0].intra_node == kept
    assert pickle.loads(pickle.dumps(cluster)) == cluster


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "all_reduc"}, "did you mean 'all_reduce'"),
        ({"ranks": 1}, "ranks must be an integer of at least 2"),
        ({"size_bytes": 0}, "size_bytes must be an integer of at least 1"),
        ({"seconds": float("nan")}, "seconds must be a finite number above 0"),
        ({"kind": "send", "ranks": 4}, "ranks must be 2; given 4"),
    ],
)
def test_measurements_that_cannot_be_are_refused(changes: dict, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        MeasuredCollective(**({"kind": "all_reduce", "ranks": 2, "size_bytes": 1024, "seconds": 1e-3} | changes))


def test_one_size_measured_twice_and_times_in_another_unit_are_refused() -> None:
    twice = MeasuredCollective("all_reduce", 2, 1024, 1e-3)
    with pytest.raises(ClusterError, match="1024 bytes stands twice"):
        CollectiveTable([twice, twice])
    with pytest.raises(ClusterError, match="are they in other units"):
        link(MeasuredCollective("send", 2, 1 << 30, 1e-3))


def test_an_edited_file_is_refused_by_the_path_of_the_fault(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    measurements(ranks=2, collectives=samples()).save(path)
    path.write_text(path.read_text().replace("size_bytes = 65536", "size_bytes = -5"))
    with pytest.raises(ClusterError, match=r"collectives\.\d+\.size_bytes"):
        load_profile(path)
