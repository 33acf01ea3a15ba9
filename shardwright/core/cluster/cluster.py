"""A cluster: the devices of a job, grouped into nodes, and the links between them."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.core.cluster import file as cluster_file
from shardwright.core.cluster.groups import Group
from shardwright.core.cluster.hardware import (
    Device,
    Link,
    Profile,
    check,
    load_link,
    load_preset,
    load_profile,
    profile_names,
)
from shardwright.core.cluster.hardware.collective_table import CollectiveTable
from shardwright.core.cluster.hardware.profile_fields import read_toml
from shardwright.core.cluster.node_group import NodeGroup
from shardwright.core.cluster.toml_file import write
from shardwright.core.errors import ClusterError
from shardwright.core.layout.mesh import MOST_RANKS
from shardwright.core.values.text_files import path_of

_NO_INTER_NODE = "a cluster of several nodes needs inter_node: the name of a link, or a Link"
_NO_INTER_REGION = "a cluster of several regions needs inter_region: the name of a link, or a Link"


@dataclass(frozen=True, slots=True)
class _Spread:
    """The distribution of a group of ranks over the nodes of a cluster."""

    members: int
    nodes: int
    fewest: int
    """The number of members on the node that has the fewest."""
    is_even: bool
    """Whether all nodes have as many members."""
    groups: tuple[int, ...]
    """The groups of nodes that hold any member."""
    crowded: tuple[int, ...]
    """The groups of nodes in which some node holds several members."""


@dataclass(frozen=True, slots=True, init=False)
class Cluster:
    """Devices, their memory and speed, and the links between them.

    Ranks are counted node after node: rank = node · devices_per_node + place in the node, group after group where
    groups of unlike nodes stand side by side. ``inter_node`` is None only where there is one node, ``inter_region``
    only where there is one region.

    Cluster("a100-80gb", nodes=64, devices_per_node=8) takes the links of that hardware's profile; ``intra_node`` and
    ``inter_node`` replace them, by name ("nvlink3", "ib-hdr200", "ethernet-100g" …) or as a ``Link``. The hardware is
    the name of a profile, the path of a profile file, a ``Profile`` or a ``Device``.

    Raises ClusterError for an unknown name (with the nearest), or a count that is not an integer of at least 1.
    """

    groups: tuple[NodeGroup, ...]
    inter_node: Link | None
    inter_region: Link | None
    # The beginning of each group, in ranks and in nodes, and the end of the last: looked up for every member of a ring.
    _first_ranks: tuple[int, ...] = field(compare=False, repr=False)
    _first_nodes: tuple[int, ...] = field(compare=False, repr=False)

    def __init__(
        self,
        device: str | Path | Device | Profile,
        *,
        nodes: int = 1,
        devices_per_node: int = 1,
        intra_node: str | Link | None = None,
        inter_node: str | Link | None = None,
    ) -> None:
        known, inside, outside = _resolve(device, intra_node, inter_node)
        self._settle((NodeGroup(known, nodes, devices_per_node, inside),), outside, None)

    @classmethod
    def preset(cls, name: str, nodes: int = 1) -> "Cluster":
        """Nodes of a known kind: "p3dn", "p4d", "p4de", "p5", "trn1", "dgx-a100", "dgx-h100", "cpu-100g".

        Raises ClusterError for an unknown kind (with the nearest), or a number of nodes below 1.
        """
        kind = load_preset(name)
        return cls(
            kind.device,
            nodes=nodes,
            devices_per_node=kind.devices_per_node,
            intra_node=kind.intra_node,
            inter_node=kind.inter_node,
        )

    @classmethod
    def of_groups(
        cls,
        groups: Sequence[NodeGroup],
        inter_node: str | Link | None = None,
        inter_region: str | Link | None = None,
    ) -> "Cluster":
        """A cluster of unlike nodes. Raises ClusterError when there is no group, or several nodes or regions and no
        link between them."""
        if not groups:
            raise ClusterError("a cluster needs at least one group of nodes; given none")
        for group in groups:
            if not isinstance(group, NodeGroup):
                raise ClusterError(f"a cluster is made of groups of nodes, each a NodeGroup; given {group!r}")
        self = object.__new__(cls)
        self._settle(tuple(groups), _link(inter_node), _link(inter_region))
        return self

    def _settle(self, groups: tuple[NodeGroup, ...], inter_node: Link | None, inter_region: Link | None) -> None:
        if (devices := sum(group.devices for group in groups)) > MOST_RANKS:
            raise ClusterError(f"a cluster has at most {MOST_RANKS} devices; given {devices}")
        if inter_node is None and sum(group.nodes for group in groups) > 1:
            raise ClusterError(_NO_INTER_NODE)
        if inter_region is None and len({group.region for group in groups}) > 1:
            raise ClusterError(_NO_INTER_REGION)
        first_ranks = tuple(accumulate((group.devices for group in groups), initial=0))
        first_nodes = tuple(accumulate((group.nodes for group in groups), initial=0))
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "inter_node", inter_node)
        object.__setattr__(self, "inter_region", inter_region)
        object.__setattr__(self, "_first_ranks", first_ranks)
        object.__setattr__(self, "_first_nodes", first_nodes)

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """The cluster in the TOML file at ``path``. Raises ClusterError that names the path of a fault inside it."""
        return cls.from_document(read_toml(path_of(path, ClusterError), "cluster file"), source=str(path))

    @classmethod
    def from_document(cls, document: dict[str, Any], source: str = "cluster") -> "Cluster":
        """The cluster that ``document`` (what ``to_document`` gives) describes."""
        table = cluster_file.parse(document, source)
        given = [
            (cluster_file.device_of(group.device, source), cluster_file.link_of(group.intra_node, source))
            for group in table.groups
        ]
        inter_node, inter_region = (
            cluster_file.link_of(link, source) for link in (table.inter_node, table.inter_region)
        )
        groups: list[NodeGroup] = []
        try:
            for group, named in zip(table.groups, given, strict=True):
                device, inside, outside = _resolve(*named, inter_node)
                groups.append(NodeGroup(device, group.nodes, group.devices_per_node, inside, group.region))
                if len(given) == 1:
                    inter_node = outside
            return cls.of_groups(groups, inter_node, inter_region)
        except ClusterError as error:
            raise ClusterError(f"{source}: {error}") from error

    def to_document(self) -> dict[str, Any]:
        """This cluster as plain values: names where the catalogue has them, and every constant where it has not."""
        return cluster_file.document(self.groups, self.inter_node, self.inter_region)

    def save(self, path: str | Path) -> None:
        """Write the TOML file that ``load`` reads. Raises ClusterError when it cannot be written."""
        write(path_of(path, ClusterError), self.to_document())

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._first_ranks[-1]

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self._first_nodes[-1]

    @property
    def is_uniform(self) -> bool:
        """Whether every rank has the same device."""
        return all(group.device == self.groups[0].device for group in self.groups)

    def device(self, rank: int) -> Device:
        """The device of ``rank``. Raises ClusterError when there is no such rank."""
        return self.groups[self._place(rank)[0]].device

    @property
    def peak_flops_per_s(self) -> dict[str, float]:
        """The peak of matrix products of one device, the mean over all, in each precision that all of them have."""
        peaks = [(group.devices, group.device.peak_flops_per_s) for group in self.groups]
        common = [p for p in peaks[0][1] if all(p in each for _, each in peaks)]
        return {p: sum(count * each[p] for count, each in peaks) / self.world_size for p in common}

    def memory_bytes(self, rank: int) -> int:
        """The memory that a model may use on ``rank``: the device's memory less what driver and runtime keep."""
        return self.device(rank).usable_memory_bytes

    def node_of(self, rank: int) -> int:
        """The node that ``rank`` is in, counted from 0. Raises ClusterError when there is no such rank."""
        return self._place(rank)[1]

    def ranks_of(self, node: int) -> range:
        """The ranks of ``node``. Raises ClusterError when there is no such node."""
        if isinstance(node, bool) or not isinstance(node, int) or not 0 <= node < self.nodes:
            raise ClusterError(
                f"node {node!r} is not in this cluster: its {self.nodes} nodes are 0 to {self.nodes - 1}"
            )
        index = bisect_right(self._first_nodes, node) - 1
        size = self.groups[index].devices_per_node
        start = self._first_ranks[index] + (node - self._first_nodes[index]) * size
        return range(start, start + size)

    def link_between(self, rank_a: int, rank_b: int, *, concurrent: int = 1) -> Link:
        """The link that a message from ``rank_a`` to ``rank_b`` takes, with the bandwidth that is left to it.

        ``concurrent``: the number of such messages that leave the node at once, over a port that its devices share.
        Raises ClusterError when the ranks are the same, or not in the cluster.
        """
        if rank_a == rank_b:
            raise ClusterError(f"rank {rank_a!r} has no link to itself; a message between two ranks was expected")
        return self.link_for_group((rank_a, rank_b), concurrent=concurrent)

    def link_for_group(self, ranks: Iterable[int], *, concurrent: int = 1) -> Link:
        """The slowest link that a ring over ``ranks`` crosses, with the bandwidth that each member has of it.

        Inside a node that is the node's own link, which ``concurrent`` messages share where its devices do. Across
        nodes, k members in the same node drive k ports together when every device has its own; where the node has one
        port, they share it, with ``concurrent`` such groups at once. Never faster than the slowest intra-node link that
        the ring also needs, and never sooner: each step of a ring waits for its slowest hop. For a single rank, its
        node's link.
        Raises ClusterError when ``ranks`` is empty, repeats a rank, or holds one that is not in the cluster.
        """
        check.whole("link_for_group", "concurrent", concurrent, at_least=1)
        return self._link(self._spread(ranks if isinstance(ranks, range) else tuple(ranks)), concurrent)

    def _link(self, spread: "_Spread", concurrent: int) -> Link:
        if spread.nodes == 1:
            return _between_flows(self.groups[spread.groups[0]].intra_node, concurrent)
        inside = [self.groups[group].intra_node for group in spread.crowded]
        outside = self._ports(spread, concurrent)
        slowest = min((*inside, outside), key=lambda link: link.effective_bandwidth_bytes_per_s)
        latency_s = max(link.latency_s for link in (*inside, outside))
        # What was measured over the slowest alone says nothing of a way that has slower hops.
        measured = slowest.measured if latency_s == slowest.latency_s else CollectiveTable()
        return replace(slowest, latency_s=latency_s, measured=measured)

    def group(self, ranks: Iterable[int]) -> Group:
        """The group that runs collectives over ``ranks``, while every other device of their nodes runs the same ones in
        groups of its own: they share what leaves the node. Raises ClusterError as ``link_for_group`` does."""
        spread = self._spread(ranks if isinstance(ranks, range) else tuple(ranks))
        largest = max(self.groups[group].devices_per_node for group in spread.groups)
        beside = max(1, largest // spread.fewest)
        if spread.nodes == 1:
            # A ring in one node has a hop from every member; one that leaves the node has a hop less in it.
            inside = self.groups[spread.groups[0]].intra_node
            return Group(spread.members, 1, _between_flows(inside, beside * spread.members))
        inside = self._link(spread, 1)
        hops = beside * max(1, spread.fewest - 1)
        links = [_between_flows(self.groups[group].intra_node, hops) for group in spread.crowded]
        slowest = min(links, key=lambda link: link.effective_bandwidth_bytes_per_s, default=inside)
        if any(link.latency_s > slowest.latency_s for link in links):  # each step waits for the slowest hop
            slowest = replace(slowest, latency_s=max(link.latency_s for link in links), measured=CollectiveTable())
        outside = self._ports(spread, beside)
        return Group(spread.members, spread.nodes, slowest, outside, spread.fewest if spread.is_even else 0)

    def _spread(self, members: Sequence[int]) -> "_Spread":
        """The distribution of a group over the nodes. Many ranks at one distance, on nodes that are alike, are counted
        at once: a search asks for groups of hundreds of thousands. Raises ClusterError as ``link_for_group`` does."""
        if len(members) == 0:
            raise ClusterError("a group needs at least one rank; given none")
        if isinstance(members, range) and len(self.groups) == 1 and members.step > 0:
            self._place(members[0])
            self._place(members[-1])
            nodes = np.arange(members.start, members.stop, members.step) // self.groups[0].devices_per_node
            counts = np.diff(np.flatnonzero(np.diff(nodes, prepend=-1, append=-1)))
            fewest, most = int(counts.min()), int(counts.max())
            return _Spread(len(members), len(counts), fewest, fewest == most, (0,), (0,) if most > 1 else ())
        if len(set(members)) != len(members):
            raise ClusterError(f"a group names each rank once; given {tuple(members)}")
        on = Counter(map(self._place, members))
        groups = tuple(dict.fromkeys(group for group, _ in on))
        crowded = tuple(sorted({group for (group, _), count in on.items() if count > 1}))
        fewest, is_even = min(on.values()), len(set(on.values())) == 1
        return _Spread(len(members), len(on), fewest, is_even, groups, crowded)

    def _ports(self, spread: "_Spread", concurrent: int) -> Link:
        """The link out of a node as one ring sees it, with the node with the fewest members deciding. Between regions
        it is the slower of that and the link between them."""
        if self.inter_node is None:  # _settle gives every cluster of several nodes a link
            raise ClusterError(_NO_INTER_NODE)
        port = self._shared(self.inter_node, spread, concurrent)
        if self.inter_region is None or len({self.groups[group].region for group in spread.groups}) == 1:
            return port
        far = self._shared(self.inter_region, spread, concurrent)
        slower = min((port, far), key=lambda link: link.effective_bandwidth_bytes_per_s)
        return replace(slower, latency_s=max(port.latency_s, far.latency_s))

    def _shared(self, link: Link, spread: "_Spread", concurrent: int) -> Link:
        if link.sharing == "device":
            return link.scaled(spread.fewest)
        return link.scaled(1 / concurrent)

    def _place(self, rank: int) -> tuple[int, int]:
        """The group and the node that hold ``rank``."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise ClusterError(
                f"rank {rank!r} is not in this cluster: its {self.world_size} ranks are 0 to {self.world_size - 1}"
            )
        index = bisect_right(self._first_ranks, rank) - 1
        place = rank - self._first_ranks[index]
        return index, self._first_nodes[index] + place // self.groups[index].devices_per_node

    def __str__(self) -> str:
        parts = (f"{group.nodes} × {group.devices_per_node} {group.device.name}" for group in self.groups)
        return " + ".join(parts)


def _between_flows(link: Link, flows: int) -> Link:
    """A node's own link as one of so many flows at once has it: all of it, where each device has its own."""
    return link if link.sharing == "device" else link.scaled(1 / flows)


def _resolve(
    device: str | Path | Device | Profile, intra_node: str | Link | None, inter_node: str | Link | None
) -> tuple[Device, Link, Link | None]:
    """The device, and the links given or its usual ones. Raises ClusterError for an unknown name or no inner link."""
    if isinstance(device, Device):
        usual = _usual_links(device)
    else:
        profile = device if isinstance(device, Profile) else load_profile(device)
        device, usual = profile.device, (profile.intra_node, profile.inter_node)
    inside, outside = _link(intra_node) or usual[0], _link(inter_node) or usual[1]
    if inside is None:
        raise ClusterError(
            f"device {device.name!r} is not in the catalogue, so it needs intra_node: the name of a link, or a Link"
        )
    return device, inside, outside


def _link(given: str | Link | None) -> Link | None:
    """A link by name or value. Raises ClusterError for an unknown name, or for what is neither."""
    return given if given is None or isinstance(given, Link) else load_link(given)


def _usual_links(device: Device) -> tuple[Link, Link] | tuple[None, None]:
    """The links of the catalogue's profile of that name, for a device that was adapted from it."""
    if device.name not in profile_names():
        return None, None
    profile = load_profile(device.name)
    return profile.intra_node, profile.inter_node
