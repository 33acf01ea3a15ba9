"""Collectives over a group of ranks that lies in one node or over several: rings, and trees where latency rules.

A ring goes through the members of a node before it leaves it, so it crosses each node's ports once: its bandwidth is
that of the slower of the two links, its latency the sum over its hops. A double binary tree between the nodes (Sanders,
Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009) needs only log2(nodes) hops
out of a node, which wins where messages are small or nodes many. As NCCL does, the faster of both is taken.

A gather may go in two stages instead: between the nodes first, among the ranks that have one place on their nodes, then
within each node; a sum the other way round (MiCS, Zhang et al., arXiv 2205.00119, section 3.3). A node then takes in
what the others hold, (nodes − 1) / nodes of the whole, and no byte of it twice; a ring takes in (ranks − 1) / ranks.
Within the nodes first, as the words "hierarchical all-gather" suggest, each rank would fetch the shards of whole nodes:
as many times more as a node has ranks.
"""

import math
from dataclasses import dataclass

from shardwright.core.cluster import collectives
from shardwright.core.cluster.hardware import Link

TREE_BANDWIDTH = 0.9
"""The bandwidth of a tree, as a share of a ring's. Prior: NCCL's tuning table (2.12) takes 0.92 for trees over several
nodes with the Simple protocol."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that run collectives together. ``outside`` is a node's way out as this group has it (its own ports, or its
    share of a port that several groups use at once); None where all ranks are in one node."""

    ranks: int
    nodes: int
    inside: Link
    outside: Link | None = None
    ranks_per_node: int = 0
    """The number of members on each node, where all nodes have as many; else 0."""

    def all_reduce_s(self, size_bytes: float) -> float:
        """Seconds to reduce and share ``size_bytes``, one member's whole tensor. Raises ClusterError for bad sizes."""
        ring = 2 * self._ring_s(size_bytes)
        if self.outside is None or self.ranks == 1:
            return ring
        hops = math.ceil(math.log2(self.nodes)) * self.outside.latency_s
        hops += (-(-self.ranks // self.nodes) - 1) * self.inside.latency_s
        return min(ring, 2 * (hops + size_bytes / (self._bandwidth * TREE_BANDWIDTH)))

    def all_gather_s(self, size_bytes: float, *, in_stages: bool = False) -> float:
        """Seconds to share the parts of each; ``size_bytes`` is what each member has in the end. ``in_stages``: between
        the nodes and then within each, where `has_stages`."""
        return self._stages_s(size_bytes) if in_stages and self.has_stages else self._ring_s(size_bytes)

    def reduce_scatter_s(self, size_bytes: float, *, in_stages: bool = False) -> float:
        """Seconds to reduce, each member keeping a part; ``size_bytes`` is what each has at first. ``in_stages``:
        within each node and then between them, where `has_stages`."""
        return self._stages_s(size_bytes) if in_stages and self.has_stages else self._ring_s(size_bytes)

    @property
    def has_stages(self) -> bool:
        """Whether there are several nodes, and several members on each, as many on all."""
        return self.outside is not None and self.ranks_per_node > 1

    def _stages_s(self, size_bytes: float) -> float:
        """Seconds of a ring between the nodes for each place on them, all at once, and then of one within each node."""
        assert self.outside is not None
        between = self.outside.scaled(1 / self.ranks_per_node)
        across = collectives.all_gather_s(size_bytes / self.ranks_per_node, self.nodes, between)
        return across + collectives.all_gather_s(size_bytes, self.ranks_per_node, self.inside)

    def _ring_s(self, size_bytes: float) -> float:
        if self.outside is None or self.ranks == 1:
            return collectives.all_gather_s(size_bytes, self.ranks, self.inside)
        return (self.ranks - 1) * (self._hop_s + size_bytes / self.ranks / self._bandwidth)

    @property
    def latency_bytes(self) -> float:
        """The size of a gather that spends as long on latency as on bandwidth; 0 for one rank."""
        return 0.0 if self.ranks == 1 else self.ranks * self._hop_s * self._bandwidth

    @property
    def _hop_s(self) -> float:
        """The mean latency of the hops of a ring."""
        if self.outside is None:
            return self.inside.latency_s
        return (self.nodes * self.outside.latency_s + (self.ranks - self.nodes) * self.inside.latency_s) / self.ranks

    @property
    def _bandwidth(self) -> float:
        """Bytes per second that a ring through all members keeps up."""
        inside = self.inside.effective_bandwidth_bytes_per_s
        if self.outside is None:
            return inside
        outside = self.outside.effective_bandwidth_bytes_per_s
        return outside if self.ranks == self.nodes else min(inside, outside)
