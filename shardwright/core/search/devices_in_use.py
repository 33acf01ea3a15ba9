"""The number of devices that are worth using: the parts of a cluster that a plan may be made for.

More devices are not always faster: a slow node holds up the fast ones, and a slow link can cost more than the devices
behind it bring. The search compares the best plans of the parts. Ranks are counted over a part's own nodes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cluster.node_group import NodeGroup
from shardwright.core.errors import PlanError
from shardwright.core.search.request import Request

MOST_PARTS = 64
"""The most parts. Beyond it, each kind of node is used whole or left out; if that is still too many, the slowest kinds
are left out one after another."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some nodes of a cluster, or all."""

    cluster: Cluster
    left_out: str
    """The nodes and devices that the part leaves out, in words; empty for none."""


def parts(cluster: Cluster, request: Request) -> list[Part]:
    """The parts that the request lets a plan use: the whole cluster first, then parts with one kind of node, then the
    others. The fastest come first, so that a part that cannot be fastest is seen early.

    Raises PlanError for a number of devices that no part has, with the nearest that one has.
    """
    alike = len({replace(group, nodes=1, region="") for group in cluster.groups}) == 1
    if request.devices == "all" or (request.devices is None and alike):
        return [Part(cluster, "")]
    if isinstance(request.devices, int):
        return _of_so_many(cluster, request.devices)
    given = [d for d in (request.pp, request.tp, request.dp) if d is not None]
    found = [part for part in _parts(cluster, _counts(cluster.groups)) if _admits(part.cluster.world_size, given)]
    # Where no part admits the pinned degrees, the error for the whole cluster says what would fit.
    return found or [Part(cluster, "")]


def _of_so_many(cluster: Cluster, asked: int) -> list[Part]:
    """Every part with the number of devices asked for. Raises PlanError, with the nearest, where there is none."""
    held = [group.devices_per_node for group in cluster.groups]
    sizes: dict[int, list[tuple[int, ...]]] = {}
    for counts in product(*(range(group.nodes, -1, -1) for group in cluster.groups)):
        sizes.setdefault(sum(n * each for n, each in zip(counts, held, strict=True)), []).append(counts)
    single = [tuple(int(i == k) for i in range(len(held))) for k, each in enumerate(held) if asked < each]
    if asked not in sizes and not single:
        near = min((size for size in sizes if size), key=lambda size: abs(size - asked))
        raise PlanError(f"devices={asked}: no nodes of {cluster} have so many together; the nearest is {near}")
    found = _parts(cluster, [*sizes.get(asked, ()), *single], devices=asked)
    return [part for part in found if part.cluster.world_size == asked]


def _admits(world: int, given: Sequence[int]) -> bool:
    return world % math.prod(given) == 0 if len(given) < 3 else world == math.prod(given)


def _parts(cluster: Cluster, counts_of: Iterable[tuple[int, ...]], devices: int | None = None) -> list[Part]:
    """The parts with so many nodes of each kind; of one node also ``devices`` of its devices, or powers of two."""
    found: dict[Cluster, Part] = {}
    for counts in counts_of:
        used = [replace(group, nodes=n) for group, n in zip(cluster.groups, counts, strict=True) if n]
        if not used:
            continue
        made = Cluster.of_groups(used, cluster.inter_node, cluster.inter_region)
        left = [(g.nodes - n, g) for g, n in zip(cluster.groups, counts, strict=True) if n < g.nodes]
        said = " + ".join(f"{n} × {group.devices_per_node} {group.device.name}" for n, group in left)
        found.setdefault(made, Part(made, said))
        if made.nodes == 1:
            fewer = _fewer(used[0].devices_per_node)
            for part in _of_a_node(made, used[0], said, fewer if devices is None else (devices,)):
                found.setdefault(part.cluster, part)
    return sorted(found.values(), key=_order)


def _order(part: Part) -> tuple[bool, int, float]:
    groups = part.cluster.groups
    return bool(part.left_out), len(groups), -sum(g.devices * max(g.device.peak_flops_per_s.values()) for g in groups)


def _of_a_node(node: Cluster, group: NodeGroup, left_out: str, numbers: Iterable[int]) -> Iterator[Part]:
    """The parts that are some devices of one node."""
    for each in numbers:
        if each >= group.devices_per_node:
            continue
        used = Cluster.of_groups([replace(group, devices_per_node=each)], node.inter_node)
        said = f"{group.devices_per_node - each} {group.device.name} of its node"
        yield Part(used, f"{left_out} + {said}" if left_out else said)


def _counts(groups: Sequence[NodeGroup]) -> Iterator[tuple[int, ...]]:
    """The numbers of nodes of each kind that are tried."""
    none = (0,) if len(groups) > 1 else ()
    options = [(group.nodes, *_fewer(group.nodes), *none) for group in groups]
    if len(groups) > 1 and math.prod(map(len, options)) > MOST_PARTS:
        options = [(group.nodes, 0) for group in groups]
    if len(groups) == 1 or math.prod(map(len, options)) <= MOST_PARTS:
        yield from product(*options)
        return
    fastest = sorted(range(len(groups)), key=lambda i: -max(groups[i].device.peak_flops_per_s.values()))
    for kept in range(len(groups), 0, -1):
        yield tuple(group.nodes if i in fastest[:kept] else 0 for i, group in enumerate(groups))


def _fewer(count: int) -> tuple[int, ...]:
    """The powers of two below a number, falling."""
    return tuple(2**power for power in reversed(range(count.bit_length())) if 2**power < count)
