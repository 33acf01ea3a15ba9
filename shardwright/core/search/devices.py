"""How many devices are worth using: the parts of a cluster that a plan may be made for.

More devices are not always faster: a slow node holds up the fast ones beside it, a slow link costs more than the
devices behind it bring. The search compares the best plans of the parts; ranks are counted over a part's own nodes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shardwright.core.cluster import Cluster, NodeGroup
from shardwright.core.errors import PlanError
from shardwright.core.request import Request

MOST_PARTS = 64
"""Beyond so many, kinds of node are used whole or left out; and beyond so many of these, the slowest are left out."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some nodes of a cluster, or all."""

    cluster: Cluster
    left_out: str
    """What it does without, in words; empty for nothing."""


def parts(cluster: Cluster, request: Request) -> list[Part]:
    """What the request lets a plan use: the whole cluster first, then nodes of one kind, then the others; by falling
    speed, so that what cannot be fastest is seen early.

    Raises PlanError for a number of devices that no part has, with the nearest that one has.
    """
    if request.devices == "all" or (request.devices is None and len(cluster.groups) == 1):
        return [Part(cluster, "")]
    given = [d for d in (request.pp, request.tp, request.dp) if d is not None]
    asked = request.devices if isinstance(request.devices, int) else None
    found = [part for part in _all(cluster, every=asked is not None) if _admits(part.cluster.world_size, given)]
    if asked is not None:
        of_so_many = [part for part in found if part.cluster.world_size == asked]
        if not of_so_many:
            near = min((part.cluster.world_size for part in found), key=lambda size: abs(size - asked))
            raise PlanError(f"devices={asked}: no nodes of {cluster} have so many together; the nearest is {near}")
        return of_so_many
    # Where nothing goes with the pinned degrees, the whole cluster says what would.
    return found or [Part(cluster, "")]


def _admits(world: int, given: Sequence[int]) -> bool:
    return world % math.prod(given) == 0 if len(given) < 3 else world == math.prod(given)


def _all(cluster: Cluster, *, every: bool) -> list[Part]:
    """Of ``every`` number of nodes, or of powers of two."""
    found: dict[Cluster, Part] = {}
    for counts in _counts(cluster.groups, every=every):
        used = [replace(group, nodes=n) for group, n in zip(cluster.groups, counts, strict=True) if n]
        if not used:
            continue
        made = Cluster.of_groups(used, cluster.inter_node, cluster.inter_region)
        left = [(g.nodes - n, g) for g, n in zip(cluster.groups, counts, strict=True) if n < g.nodes]
        said = " + ".join(f"{n} × {group.devices_per_node} {group.device.name}" for n, group in left)
        found.setdefault(made, Part(made, said))
        if made.nodes == 1:
            for part in _of_a_node(made, used[0], said, every=every):
                found.setdefault(part.cluster, part)
    return sorted(found.values(), key=_order)


def _order(part: Part) -> tuple[bool, int, float]:
    groups = part.cluster.groups
    return bool(part.left_out), len(groups), -sum(g.devices * max(g.device.peak_flops_per_s.values()) for g in groups)


def _of_a_node(node: Cluster, group: NodeGroup, left_out: str, *, every: bool) -> Iterator[Part]:
    """Some devices of one node."""
    for each in _fewer(group.devices_per_node, every=every):
        used = Cluster.of_groups([replace(group, devices_per_node=each)], node.inter_node)
        said = f"{group.devices_per_node - each} {group.device.name} of its node"
        yield Part(used, f"{left_out} + {said}" if left_out else said)


def _counts(groups: Sequence[NodeGroup], *, every: bool) -> Iterator[tuple[int, ...]]:
    """How many nodes of each kind are used."""
    none = (0,) if len(groups) > 1 else ()
    options = [(group.nodes, *_fewer(group.nodes, every=every), *none) for group in groups]
    if len(groups) > 1 and math.prod(map(len, options)) > MOST_PARTS:
        options = [(group.nodes, 0) for group in groups]
    if len(groups) == 1 or math.prod(map(len, options)) <= MOST_PARTS:
        yield from product(*options)
        return
    fastest = sorted(range(len(groups)), key=lambda i: -max(groups[i].device.peak_flops_per_s.values()))
    for kept in range(len(groups), 0, -1):
        yield tuple(group.nodes if i in fastest[:kept] else 0 for i, group in enumerate(groups))


def _fewer(count: int, *, every: bool) -> tuple[int, ...]:
    """Every number below, or the powers of two, falling."""
    if every:
        return tuple(range(count - 1, 0, -1))
    return tuple(2**power for power in reversed(range(count.bit_length())) if 2**power < count)
