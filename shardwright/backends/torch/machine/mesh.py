"""A core mesh laid over the ranks of this run: coordinates and process groups."""

from dataclasses import dataclass, field
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.core.errors import ClusterError
from shardwright.core.layout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class BoundMesh:
    """This process's place on a mesh, and one process group for each axis, shared by the ranks that differ on it only.

    ``groups`` lists, for each axis, the global ranks of this process's group, in order of their coordinate; ``nodes``
    gives the number of the node of each global rank, and is empty where that is not known.
    ``reads_peers`` says whether CPU ranks of one host may read each other's memory (`cross_memory`).
    """

    mesh: Mesh
    rank: int
    device: torch.device
    groups: dict[str, tuple[int, ...]]
    handles: dict[str, ProcessGroup] = field(repr=False)
    nodes: tuple[int, ...] = ()
    reads_peers: bool = True

    def coordinate(self, axis: str) -> int:
        return self.mesh.coordinates(self.rank)[axis]

    def size(self, axis: str) -> int:
        return self.mesh.axis_size(axis)

    def peer(self, axis: str, coordinate: int) -> int:
        """The global rank at ``coordinate`` on ``axis``, with this rank's other coordinates."""
        return self.groups[axis][coordinate]

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on every node, where `has_even_nodes`; else that of all."""
        return self._on_first_node if self.has_even_nodes else self.mesh.size

    @property
    def has_even_nodes(self) -> bool:
        """Whether every node has as many ranks, all neighbours."""
        each = self._on_first_node
        return self.mesh.size % each == 0 and all(node == rank // each for rank, node in enumerate(self.nodes))

    @property
    def _on_first_node(self) -> int:
        return next((rank for rank, node in enumerate(self.nodes) if node != self.nodes[0]), self.mesh.size)

    def describe(self) -> str:
        """This rank and its coordinates in words: ``rank 3 (pp 1, dp 1)``. Axes of size 1 are left out."""
        places = [f"{a} {c}" for a, c in self.mesh.coordinates(self.rank).items() if self.mesh.axis_size(a) > 1]
        return f"rank {self.rank}" + (f" ({', '.join(places)})" if places else "")


def bind(
    mesh: Mesh, device: torch.device | None = None, nodes: tuple[int, ...] = (), reads_peers: bool = True
) -> BoundMesh:
    """Lay the mesh over the default process group, which must exist. Every rank calls this at the same time. ``nodes``:
    the number of the node of each rank, where these are known.

    Raises ClusterError when the number of running ranks is not the mesh's.
    """
    if not dist.is_initialized():
        raise ClusterError("the process group is not there yet: call shardwright.torch.init first")
    running = dist.get_world_size()
    if running != mesh.size:
        sizes = " × ".join(f"{name} {size}" for name, size in zip(mesh.names, mesh.sizes, strict=True))
        raise ClusterError(f"the mesh {sizes} has {mesh.size} ranks, and {running} are running: start {mesh.size}")
    rank = dist.get_rank()
    groups: dict[str, tuple[int, ...]] = {}
    handles: dict[str, ProcessGroup] = {}
    for axis in mesh.names:
        for ranks in mesh.groups(axis):
            handle = process_group(ranks)
            if rank in ranks:
                if handle is None:
                    raise ClusterError(f"torch.distributed made no process group for ranks {ranks}")
                groups[axis], handles[axis] = ranks, handle
    return BoundMesh(mesh, rank, device or torch.device("cpu"), groups, handles, nodes, reads_peers)


_Key = tuple[tuple[int, ...], str]
_made: WeakValueDictionary[_Key, ProcessGroup] = WeakValueDictionary()
"""The groups made within the default process group. Each has threads and sockets of its own, so meshes share them. They
belong to torch, and go with the default group."""
_of_others: set[_Key] = set()
"""Groups that this rank took part in making and is not in."""
_made_within: ReferenceType[ProcessGroup] | None = None


def process_group(ranks: tuple[int, ...], use: str = "") -> ProcessGroup | None:
    """The process group of these ranks; None when this rank is not in it. Every rank takes part in making every group,
    in the same order, because torch asks for that. With a ``use``, a group of its own for it."""
    global _made_within
    whole = dist.group.WORLD
    assert whole is not None
    if _made_within is None or _made_within() is not whole:
        _made.clear()
        _of_others.clear()
        _made_within = ref(whole)
    if len(ranks) == dist.get_world_size() and not use:
        return whole
    key = (ranks, use)
    found = _made.get(key)
    if found is None and key not in _of_others:
        made = dist.new_group(list(ranks))
        if isinstance(made, ProcessGroup):
            found = _made[key] = made
        else:
            _of_others.add(key)
    return found
