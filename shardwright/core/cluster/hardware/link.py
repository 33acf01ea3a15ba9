"""A link: the speed at which bytes leave a device, and whether its node's devices share the wire."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from shardwright.core.cluster.hardware import check
from shardwright.core.cluster.hardware.collective_table import CollectiveTable
from shardwright.core.cluster.hardware.frozen_mapping import Table
from shardwright.core.cluster.hardware.protocol import Protocol, protocols_of
from shardwright.core.errors import ClusterError, nearest

Sharing = Literal["device", "node"]


@dataclass(frozen=True, slots=True)
class Link:
    """A link that joins devices inside a node, or a node to the others.

    bandwidth_bytes_per_s: the bandwidth in one direction, by data sheet; that of one device's own port when ``sharing``
        is "device", that of the whole node's port when it is "node" (all devices of the node then share it).
    latency_s: the time from the start of a message until its first byte arrives (the α of an α-β model).
    efficiency: the share of the bandwidth that large messages reach.
    transport: the kind of wire, whose protocols are known ("nvlink", "pci", "infiniband", "efa", "tcp"); "": nothing is
        known but latency and bandwidth.
    measured: the collectives that were measured over it, which stand in for all of these, for as many ranks.
    origins: the source of each constant.

    Raises ClusterError when a constant is not positive and finite, or an efficiency is above 1.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    sharing: Sharing = "device"
    efficiency: float = 1.0
    transport: str = ""
    measured: CollectiveTable = field(default_factory=CollectiveTable, repr=False)
    origins: Mapping[str, str] = field(default_factory=Table, compare=False, repr=False)

    def __post_init__(self) -> None:
        owner = f"link {self.name!r}"
        check.positive(owner, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        check.positive(owner, "latency_s", self.latency_s, zero_allowed=True)
        check.positive(owner, "efficiency", self.efficiency, at_most=1.0)
        if self.sharing not in get_args(Sharing):
            known = nearest(str(self.sharing), get_args(Sharing))
            raise ClusterError(f"{owner}: sharing {self.sharing!r} is not known; {known}")
        protocols_of(self.transport)
        for each in self.measured:
            if each.port_bytes_per_s > self.bandwidth_bytes_per_s * (1 + 1e-9):
                raise ClusterError(
                    f"{owner}: bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s:g}, and the {each.kind} of "
                    f"{each.ranks} ranks and {each.size_bytes} bytes in {each.seconds:g} s needs "
                    f"{each.port_bytes_per_s:g}: are they in other units?"
                )
        check.origins(owner, self.origins)
        object.__setattr__(self, "origins", Table(self.origins))

    @property
    def effective_bandwidth_bytes_per_s(self) -> float:
        """The bandwidth that large messages reach, in one direction."""
        return self.bandwidth_bytes_per_s * self.efficiency

    @property
    def protocols(self) -> tuple[Protocol, ...]:
        """The protocols that carry messages over it."""
        return protocols_of(self.transport)

    def bandwidth_by(self, protocol: Protocol) -> float:
        """The bytes per second, in one direction, that large messages reach with one of its protocols."""
        reached = self.effective_bandwidth_bytes_per_s * protocol.bandwidth_share
        most = protocol.most_bandwidth_bytes_per_s
        return reached if most is None else min(reached, most)

    def scaled(self, factor: float) -> "Link":
        """This link with ``factor`` times the bandwidth: several ports together, or one shared by several flows."""
        if factor == 1.0:
            return self
        # What was measured is that of the port itself.
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor, measured=CollectiveTable())
