"""The links of a mesh on a cluster, looked up once and shared by all candidates of a search."""

import math

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cluster.groups import Group
from shardwright.core.cluster.hardware import Device, Link
from shardwright.core.layout.mesh import Mesh
from shardwright.core.tables.cost_tables import Place
from shardwright.core.values.found_once import found_once


class Links:
    """The groups, message links and devices of meshes on one cluster, remembered by their first rank."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._groups: dict[tuple[int, int, int], Group] = {}
        self._period = cluster.groups[0].devices_per_node if len(cluster.groups) == 1 else 0

    @found_once
    def alike(self, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """The pipeline ranks in sets whose data groups and devices are the same."""
        found: dict[object, list[int]] = {}
        for pp in range(mesh.axis_size("pp")):
            kinds = self.devices(mesh, pp)
            found.setdefault((self.axis(mesh, pp, "dp"), kinds), []).append(pp)
        return tuple(map(tuple, found.values()))

    @found_once
    def alike_in_groups(self, mesh: Mesh, ways: int | None) -> tuple[tuple[int, ...], ...]:
        """The pipeline ranks in sets that are also alike in their shard groups of ``ways``: those of one data group may
        lie on one node, and those of another on two."""
        found: dict[object, list[int]] = {}
        for number, alike in enumerate(self.alike(mesh)):
            for pp in alike:
                found.setdefault((number, self.shard_groups(mesh, pp, ways)), []).append(pp)
        return tuple(map(tuple, found.values()))

    @found_once
    def pipelines_share_nodes(self, mesh: Mesh) -> bool:
        """Whether there are several pipeline ranks, and those of one pipeline are alike and all on one node."""
        pp, node_of = mesh.axis_size("pp"), self.cluster.node_of
        near = mesh.stride("pp")
        reach = (pp - 1) * near
        # On equal nodes the placement repeats once a pipeline and a node begin at the same rank.
        several = min(mesh.size, math.lcm(near * pp, self._period)) if self._period else mesh.size
        firsts = (rank for begin in range(0, several, near * pp) for rank in range(begin, begin + near))
        return pp > 1 and self.cluster.is_uniform and all(node_of(rank) == node_of(rank + reach) for rank in firsts)

    @found_once
    def axis(self, mesh: Mesh, pp: int, axis: str) -> Group:
        """The group along an axis of the first rank of a pipeline rank."""
        return self._group(mesh.rank({"pp": pp}), mesh.axis_size(axis), mesh.stride(axis))

    @found_once
    def shard_groups(self, mesh: Mesh, pp: int, ways: int | None) -> tuple[Group, Group | None, int]:
        """The first shard group of a data group divided into groups of ``ways`` (None: one group), the replicas of its
        first shard (None where there is one group), and the number of ranks that share."""
        members, stride = mesh.axis_size("dp"), mesh.stride("dp")
        count = ways or members
        first = mesh.rank({"pp": pp})
        across = self._group(first, members // count, stride * count) if count < members else None
        return self._group(first, count, stride), across, count

    @found_once
    def places(self, mesh: Mesh) -> tuple[tuple[Place, ...], ...]:
        """The kinds of place of each pipeline rank's ranks; one where all are alike."""
        return tuple(
            tuple(dict.fromkeys(self._place(mesh, rank, stage) for rank in ranks))
            for stage, ranks in enumerate(self._representatives(mesh))
        )

    @found_once
    def devices(self, mesh: Mesh, pp: int) -> tuple[Device, ...]:
        """The kinds of device of a pipeline rank."""
        return tuple(self.cluster.device(rank) for rank in self._representatives(mesh)[pp])

    def memory_bytes(self, mesh: Mesh, pp: int) -> int:
        """The memory of the smallest device of a pipeline rank."""
        return min(self.cluster.memory_bytes(rank) for rank in self._representatives(mesh)[pp])

    @found_once
    def _representatives(self, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """One rank of each kind of device, for each pipeline rank."""
        pp, stride = mesh.axis_size("pp"), mesh.stride("pp")
        if self.cluster.is_uniform:
            return tuple((mesh.rank({"pp": stage}),) for stage in range(pp))
        found: list[dict[Device, int]] = [{} for _ in range(pp)]
        for rank in range(mesh.size):
            found[rank // stride % pp].setdefault(self.cluster.device(rank), rank)
        return tuple(tuple(kinds.values()) for kinds in found)

    def _place(self, mesh: Mesh, rank: int, stage: int) -> Place:
        tp, pp = mesh.axis_size("tp"), mesh.axis_size("pp")
        first = rank - mesh.coordinates(rank)["tp"] * mesh.stride("tp")
        entering: Link | None = None
        if pp > 1:
            source = rank - mesh.coordinates(rank)["pp"] * mesh.stride("pp") + (stage - 1) % pp * mesh.stride("pp")
            node = self.cluster.ranks_of(self.cluster.node_of(source))
            size, stride = pp, mesh.stride("pp")
            mine = source // stride % size
            beside = sum(1 for other in node if other < mesh.size and other // stride % size == mine)
            entering = self.cluster.link_between(source, rank, concurrent=max(1, beside))
        return Place(self.cluster.device(rank), self._group(first, tp, mesh.stride("tp")), entering, pp > 1)

    def _group(self, first: int, size: int, stride: int) -> Group:
        key = (first % self._period if self._period else first, size, stride)
        if key not in self._groups:
            self._groups[key] = self.cluster.group(range(first, first + size * stride, stride))
        return self._groups[key]
