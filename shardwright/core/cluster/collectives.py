"""Seconds of a collective, by the α-β model of ring algorithms.

A message of n bytes takes α + n/β: α the link's latency, β the bandwidth that large messages reach. The ring forms are
those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section
4, without their cost of the reduction's arithmetic, which devices hide behind the transfer.

In every function ``link`` is what ``Cluster.link_for_group`` gives, ``ranks`` is the number of members (one member
costs nothing) and ``size_bytes`` is one member's whole tensor: what is reduced, what a gather gives, or what a scatter
splits. Raises ClusterError when a size is negative or not finite, or a count is not an integer of at least 1.
"""

import math

from shardwright.core.cluster.hardware import Link
from shardwright.core.errors import ClusterError


def all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Seconds to reduce and share: a reduce-scatter, then an all-gather; 2(p−1) steps of n/p bytes."""
    return reduce_scatter_s(size_bytes, ranks, link) + all_gather_s(size_bytes, ranks, link)


def all_gather_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Seconds to share the parts of each: p−1 steps of n/p bytes, n being what each member has in the end."""
    return _ring_s(size_bytes, ranks, link)


def reduce_scatter_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Seconds to reduce, each member keeping a part: p−1 steps of n/p bytes, n being what each member has at first."""
    return _ring_s(size_bytes, ranks, link)


def all_to_all_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Seconds to exchange: each member sends n/p bytes to each other one, pairwise in p−1 steps."""
    return _ring_s(size_bytes, ranks, link)


def broadcast_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Seconds to send one member's tensor to all, in small parts along a chain: p−1 latencies and its time once."""
    _check(size_bytes, ranks)
    if ranks == 1:
        return 0.0
    return (ranks - 1) * link.latency_s + size_bytes / link.effective_bandwidth_bytes_per_s


def send_s(size_bytes: float, link: Link) -> float:
    """Seconds of one message from one rank to another: as measured, or by the fastest of the link's protocols."""
    require_size(size_bytes)
    if (measured_s := link.measured.seconds("send", 2, size_bytes)) is not None:
        return measured_s
    return min(
        by.start_s + by.ring_hop_share * link.latency_s + size_bytes / link.bandwidth_by(by) for by in link.protocols
    )


def _ring_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Seconds of p−1 steps, each of n/p bytes to the next member."""
    _check(size_bytes, ranks)
    return (ranks - 1) * (link.latency_s + size_bytes / ranks / link.effective_bandwidth_bytes_per_s)


def require_size(size_bytes: float) -> None:
    """Raise ClusterError for a size that is negative or not finite."""
    if not math.isfinite(size_bytes) or size_bytes < 0:
        raise ClusterError(f"size_bytes must be finite and at least 0; given {size_bytes!r}")


def _check(size_bytes: float, ranks: int) -> None:
    require_size(size_bytes)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ClusterError(f"ranks must be an integer of at least 1; given {ranks!r}")
