"""Nodes of one kind: what a cluster is made of."""

from dataclasses import dataclass

from shardwright.core.cluster.hardware import Device, Link, check
from shardwright.core.errors import ClusterError


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """A group of like nodes: their number, the devices that each holds, and the link inside each.

    Raises ClusterError when a count is not an integer of at least 1, or the device or link is not one.
    """

    device: Device
    nodes: int
    devices_per_node: int
    intra_node: Link
    region: str = ""
    """The place where the nodes stand; groups of one name stand together."""

    def __post_init__(self) -> None:
        check.whole("cluster", "nodes", self.nodes, at_least=1)
        check.whole("cluster", "devices_per_node", self.devices_per_node, at_least=1)
        for name, kind in (("device", Device), ("intra_node", Link), ("region", str)):
            if not isinstance(given := getattr(self, name), kind):
                raise ClusterError(f"a group of nodes needs {name} as a {kind.__name__}; given {given!r}")

    @property
    def devices(self) -> int:
        """The number of devices in the group."""
        return self.nodes * self.devices_per_node
