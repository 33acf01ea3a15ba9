"""The protocols by which a collective library carries messages over a kind of wire, from a data file.

A protocol that starts soon and has short hops (NCCL's LL, which sends a flag with every word) leaves less of the
bandwidth; one that reaches all of it (Simple) waits for whole chunks at every hop. A library takes the faster one for
the size of the message, the number of ranks and the collective, so that bandwidth grows with the message.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from shardwright.core.cluster.hardware import check
from shardwright.core.errors import ClusterError, nearest

SIMPLE = "simple"
"""The protocol of large messages: a hop of a ring takes the latency of its link."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol on one kind of wire.

    start_s: seconds of every collective, however small and of however few ranks.
    ring_hop_share, tree_hop_share: the time of a hop of a ring and of a tree, as a share of the link's latency.
    bandwidth_share: the share that is left of what large messages reach.
    most_bandwidth_bytes_per_s: the bandwidth that it does not exceed on any link; None: no such limit.

    Raises ClusterError when a constant is not finite or out of its range.
    """

    name: str
    start_s: float = 0.0
    ring_hop_share: float = 1.0
    tree_hop_share: float = 1.0
    bandwidth_share: float = 1.0
    most_bandwidth_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        owner = f"protocol {self.name!r}"
        check.positive(owner, "start_s", self.start_s, zero_allowed=True)
        check.positive(owner, "ring_hop_share", self.ring_hop_share)
        check.positive(owner, "tree_hop_share", self.tree_hop_share)
        check.positive(owner, "bandwidth_share", self.bandwidth_share, at_most=1.0)
        if self.most_bandwidth_bytes_per_s is not None:
            check.positive(owner, "most_bandwidth_bytes_per_s", self.most_bandwidth_bytes_per_s)


PLAIN = (Protocol(SIMPLE),)
"""The protocols of a wire that nothing more is known of: latency and bandwidth alone."""


def transport_names() -> tuple[str, ...]:
    """The kinds of wire whose protocols are known, sorted."""
    return tuple(sorted(_transports()))


def protocols_of(transport: str) -> tuple[Protocol, ...]:
    """The protocols of a kind of wire; of "" the plain one. Raises ClusterError for another name, with the nearest."""
    if not transport:
        return PLAIN
    known = _transports()
    if transport not in known:
        raise ClusterError(f"transport {transport!r} is not known; {nearest(str(transport), known)}")
    return known[transport]


@cache
def _transports() -> dict[str, tuple[Protocol, ...]]:
    text = (files("shardwright.core.cluster.hardware") / "protocols.toml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(text)["transports"]
    found = {}
    for transport, protocols in tables.items():
        for name, constants in protocols.items():
            owner = f"protocols.toml: {transport}.{name}"
            check.origins(owner, {constant: given["origin"] for constant, given in constants.items()})
        found[transport] = tuple(
            Protocol(name, **{constant: given["value"] for constant, given in constants.items()})
            for name, constants in protocols.items()
        )
    return found
