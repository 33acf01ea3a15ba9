"""Collectives over a group of ranks that lies in one node or over several: rings, and trees where latency rules.

A ring goes through the members of a node before it leaves it, so it crosses each node's ports once: its bandwidth is
that of the slower of the two links, its latency the sum over its hops. A double binary tree between the nodes (Sanders,
Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009) needs only log2(nodes) hops
out of a node, which wins where messages are small or nodes many. Each is carried by one of the protocols that the wire
between the nodes, or within one, has (`hardware.protocol`): small messages by one with short hops, large ones by one
that reaches the whole bandwidth. As NCCL does, the fastest of all is taken, so that the time of a collective is the
least of a few straight lines over its bytes. What a link's file says was measured of as many ranks stands in for them.

A gather may go in two stages instead: between the nodes first, among the ranks that have one place on their nodes, then
within each node; a sum the other way round (MiCS, Zhang et al., arXiv 2205.00119, section 3.3). A node then takes in
what the others hold, (nodes − 1) / nodes of the whole, and no byte of it twice; a ring takes in (ranks − 1) / ranks.
Within the nodes first, as the words "hierarchical all-gather" suggest, each rank would fetch the shards of whole nodes:
as many times more as a node has ranks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.core.cluster.collectives import require_size
from shardwright.core.cluster.hardware import Link
from shardwright.core.cluster.hardware.collective_table import CollectiveKind
from shardwright.core.cluster.hardware.protocol import SIMPLE, Protocol

TREE_BANDWIDTH = 0.9
"""The bandwidth of a tree through a node's port, as a share of a ring's. Prior: NCCL's tuning table (2.28) takes 0.92
for trees over several nodes with the Simple protocol."""

TREE_INSIDE = 0.8
"""The bandwidth of a tree through the ranks of a node, as a share of a ring's. Prior: NCCL's tuning table (2.28) takes
23.6 GB/s for each of 8 channels of two nodes of A100, of the 235 GB/s that rings reach."""

RING_PLATEAU = 1.4
"""The latency of a ring's large messages that reduce and share over several nodes, as a multiple of that of its hops.
Prior: NCCL's tuning table (2.28), "plateau effect of ring", from A100 on; 1.9 before."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds by bytes: what every message takes, and what each byte adds."""

    fixed_s: float
    per_byte_s: float


NO_TIME = (Line(0.0, 0.0),)
"""The time of what one rank does alone."""


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
    _gather: tuple[Line, ...] = field(init=False, compare=False, repr=False)
    _reduce: tuple[Line, ...] = field(init=False, compare=False, repr=False)
    _staged: "tuple[Group, Group] | None" = field(init=False, compare=False, repr=False)
    """The groups of the two stages of a gather, between the nodes and within one; None where there are none."""

    def __post_init__(self) -> None:
        gather, reduce = (NO_TIME, NO_TIME) if self.ranks == 1 else (tuple(self._rings(1)), tuple(self._rings(2)))
        if self.ranks > 1 and self.outside is not None:
            reduce = (*reduce, *self._trees(self.outside))
        object.__setattr__(self, "_gather", gather)
        object.__setattr__(self, "_reduce", reduce)
        staged = None
        if self.has_stages:
            assert self.outside is not None
            between = self.outside.scaled(1 / self.ranks_per_node)
            staged = Group(self.nodes, self.nodes, self.inside, between), Group(self.ranks_per_node, 1, self.inside)
        object.__setattr__(self, "_staged", staged)

    def all_reduce_s(self, size_bytes: float) -> float:
        """Seconds to reduce and share ``size_bytes``, one member's whole tensor. Raises ClusterError for bad sizes."""
        return self._seconds("all_reduce", self._reduce, size_bytes)

    def all_gather_s(self, size_bytes: float, *, in_stages: bool = False) -> float:
        """Seconds to share the parts of each; ``size_bytes`` is what each member has in the end. ``in_stages``: between
        the nodes and then within each, where `has_stages`."""
        if in_stages and self._staged is not None:
            between, within = self._staged
            return between.all_gather_s(size_bytes / self.ranks_per_node) + within.all_gather_s(size_bytes)
        return self._seconds("all_gather", self._gather, size_bytes)

    def reduce_scatter_s(self, size_bytes: float, *, in_stages: bool = False) -> float:
        """Seconds to reduce, each member keeping a part; ``size_bytes`` is what each has at first. ``in_stages``:
        within each node and then between them, where `has_stages`."""
        if in_stages and self._staged is not None:
            between, within = self._staged
            return within.reduce_scatter_s(size_bytes) + between.reduce_scatter_s(size_bytes / self.ranks_per_node)
        return self._seconds("reduce_scatter", self._gather, size_bytes)

    @property
    def has_stages(self) -> bool:
        """Whether there are several nodes, and several members on each, as many on all."""
        return self.outside is not None and self.ranks_per_node > 1

    @property
    def latency_bytes(self) -> float:
        """The size of a gather that spends as long on latency as on bandwidth, carried as large messages are; 0 for one
        rank."""
        if self.ranks == 1:
            return 0.0
        large = min(self._gather, key=lambda line: line.per_byte_s)
        return large.fixed_s / large.per_byte_s

    def _seconds(self, kind: CollectiveKind, lines: tuple[Line, ...], size_bytes: float) -> float:
        """The seconds of a collective, as measured over the one link that the group crosses, or by the fastest line."""
        require_size(size_bytes)
        link = self.inside if self.outside is None else self.outside
        if link.measured and (self.outside is None or self.ranks == self.nodes):
            measured_s = link.measured.seconds(kind, self.ranks, size_bytes)
            if measured_s is not None:
                return measured_s
        least_s = math.inf
        for line in lines:
            least_s = min(least_s, line.fixed_s + size_bytes * line.per_byte_s)
        return least_s

    def _rings(self, passes: int) -> Iterator[Line]:
        """The line of a ring with each protocol, for one pass (a gather, a scatter) or two (both)."""
        outside, steps = self.outside, passes * (self.ranks - 1)
        for inside_by, outside_by in self._protocols():
            hop = inside_by.ring_hop_share * self.inside.latency_s
            plateau = 1.0
            if outside is not None and outside_by is not None:
                # With one rank on each node nothing hides what a hop through the network takes (NCCL's tuning table).
                share = outside_by.tree_hop_share if self.ranks == self.nodes else outside_by.ring_hop_share
                hop = (self.nodes * share * outside.latency_s + (self.ranks - self.nodes) * hop) / self.ranks
                is_large = outside.transport != "" and outside_by.bandwidth_share == 1.0
                plateau = RING_PLATEAU if passes == 2 and is_large else 1.0
            through = self._through(inside_by, outside_by)
            yield Line(
                (outside_by or inside_by).start_s + steps * hop * plateau, steps / self.ranks / min(through.values())
            )

    def _trees(self, outside: Link) -> Iterator[Line]:
        """The line of a double binary tree between the nodes, with each protocol. What goes up and down a tree crosses
        every port twice; of two nodes each is the root of one of the trees, and its port is crossed once."""
        for inside_by, outside_by in self._protocols():
            assert outside_by is not None
            hops = math.ceil(math.log2(self.nodes)) * outside_by.tree_hop_share * outside.latency_s
            hops += (-(-self.ranks // self.nodes) - 1) * inside_by.tree_hop_share * self.inside.latency_s
            through = self._through(inside_by, outside_by)
            crossings = 1 if self.nodes == 2 else 2
            slowest = max(
                crossings / through["outside"] / TREE_BANDWIDTH,
                2 / through["inside"] / TREE_INSIDE if "inside" in through else 0.0,
            )
            yield Line(outside_by.start_s + 2 * hops, slowest)

    def _protocols(self) -> Iterator[tuple[Protocol, Protocol | None]]:
        """What carries a collective within the nodes and between them: those that the wire between the nodes knows, and
        within a node the same, or the one of large messages."""
        known = {protocol.name: protocol for protocol in self.inside.protocols}
        if self.outside is None:
            yield from ((protocol, None) for protocol in self.inside.protocols)
        else:
            yield from ((known.get(each.name, known[SIMPLE]), each) for each in self.outside.protocols)

    def _through(self, inside_by: Protocol, outside_by: Protocol | None) -> dict[str, float]:
        """The bytes per second that pass through each of the links that the group crosses."""
        found = {}
        if outside_by is None or self.ranks > self.nodes:
            found["inside"] = self.inside.bandwidth_by(inside_by)
        if self.outside is not None and outside_by is not None:
            found["outside"] = self.outside.bandwidth_by(outside_by)
        return found
