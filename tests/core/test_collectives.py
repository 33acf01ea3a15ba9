"""Ring costs against their closed forms."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.cluster.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    broadcast_s,
    reduce_scatter_s,
    send_s,
)
from shardwright.core.cluster.groups import Group
from shardwright.core.cluster.hardware import Link
from shardwright.core.errors import ClusterError

ALPHA_S = 3e-6
BETA_BYTES_PER_S = 20e9
LINK = Link("test", bandwidth_bytes_per_s=25e9, latency_s=ALPHA_S, efficiency=0.8)

COLLECTIVES: list[Callable[[float, int, Link], float]] = [
    all_reduce_s,
    all_gather_s,
    reduce_scatter_s,
    all_to_all_s,
    broadcast_s,
]


@given(size_bytes=st.integers(0, 10**12), ranks=st.integers(2, 4096))
def test_ring_closed_forms(size_bytes: int, ranks: int) -> None:
    steps = ranks - 1
    moved_s = size_bytes * steps / ranks / BETA_BYTES_PER_S
    for collective in (all_gather_s, reduce_scatter_s, all_to_all_s):
        assert collective(size_bytes, ranks, LINK) == pytest.approx(steps * ALPHA_S + moved_s)
    assert all_reduce_s(size_bytes, ranks, LINK) == pytest.approx(2 * (steps * ALPHA_S + moved_s))
    assert broadcast_s(size_bytes, ranks, LINK) == pytest.approx(steps * ALPHA_S + size_bytes / BETA_BYTES_PER_S)


def test_worked_example() -> None:
    # 8 ranks, 1 GB: 14 steps of 125 MB at 20 GB/s = 87.5 ms, and 14 latencies of 3 µs.
    assert all_reduce_s(1e9, 8, LINK) == pytest.approx(87.5e-3 + 42e-6)
    assert send_s(20e6, LINK) == pytest.approx(1e-3 + 3e-6)


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (8, 1), (8, 2), (6, 6)])
def test_a_gather_of_the_latency_bytes_spends_half_of_its_time_on_latency(ranks: int, nodes: int) -> None:
    far = Link("far", bandwidth_bytes_per_s=5e9, latency_s=2e-5, efficiency=0.5)
    group = Group(ranks, nodes, LINK, far if nodes > 1 else None)
    assert group.all_gather_s(group.latency_bytes) == pytest.approx(2 * group.all_gather_s(0))
    assert Group(1, 1, LINK).latency_bytes == 0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_costs_nothing(collective: Callable[[float, int, Link], float]) -> None:
    assert collective(1e9, 1, LINK) == 0.0


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("size_bytes", [-1, math.nan, math.inf])
def test_impossible_sizes_are_refused(
    collective: Callable[[float, int, Link], float], ranks: int, size_bytes: float
) -> None:
    with pytest.raises(ClusterError, match="size_bytes must be finite and at least 0"):
        collective(size_bytes, ranks, LINK)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ranks", [0, -2, 2.0, True])
def test_impossible_counts_are_refused(collective: Callable[[float, int, Link], float], ranks: int) -> None:
    with pytest.raises(ClusterError, match="ranks must be an integer of at least 1"):
        collective(1e6, ranks, LINK)


@pytest.mark.parametrize("size_bytes", [-1, math.nan, math.inf])
def test_impossible_messages_are_refused(size_bytes: float) -> None:
    with pytest.raises(ClusterError, match="size_bytes must be finite"):
        send_s(size_bytes, LINK)
