"""SageMaker's cut by the module tree (arXiv 2111.05972, section 4).

A node's cost is memory_weight · its share of the memory + (1 - memory_weight) · its share of the time. From the root
down, a node that has several devices divides its children, in their order, into runs whose largest cost is least, and
hands its devices to the runs by D'Hondt's method. Two traps of the method are closed here. A run never gets more
devices than it has units, so a large embedding, which cannot be divided, does not draw devices that would be idle.
Where a run would get no device, the children are divided into fewer runs, so the units of a device are always adjacent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import PlanError
from shardwright.core.partition.exact import min_max_cut, range_sums, require_units

Costs = NDArray[np.float64]

MEMORY_WEIGHT = 0.8
"""The weight of SageMaker's `optimize: memory`; it is 0.2 with `optimize: speed`."""


@dataclass(slots=True)
class Node:
    """A module that contains the units first … end-1."""

    first: int
    end: int
    children: list["Node"] = field(default_factory=list)

    @property
    def units(self) -> int:
        return self.end - self.first


def tree_of(paths: Sequence[str]) -> Node:
    """The module tree over units that run in this order, each with the path of the module around it."""
    return _grown([path.split(".") if path else [] for path in paths], 0, len(paths), 0)


def _grown(parts: list[list[str]], first: int, end: int, depth: int) -> Node:
    node = Node(first, end)
    if end - first == 1:
        return node
    at = first
    while at < end:
        name = parts[at][depth] if len(parts[at]) > depth else None
        stop = at + 1
        while name is not None and stop < end and len(parts[stop]) > depth and parts[stop][depth] == name:
            stop += 1
        node.children.append(Node(at, stop) if name is None else _grown(parts, at, stop, depth + 1))
        at = stop
    # A module whose only child covers the same units is that child.
    return node.children[0] if len(node.children) == 1 and node.children[0].children else node


def tree_cut(
    paths: Sequence[str],
    memory_bytes: Sequence[float],
    seconds: Sequence[float],
    stages: int,
    memory_weight: float = MEMORY_WEIGHT,
) -> list[int]:
    """The first unit of every stage.

    Args:
        paths: the path of each unit's module, in order; units of one path are adjacent.
        memory_bytes, seconds: the memory and the time of each unit.
        memory_weight: the weight of memory; 1 balances memory alone, 0 time alone.

    Raises PlanError: fewer units than stages, or a weight outside 0 … 1.
    """
    require_units(stages, len(paths))
    if not 0 <= memory_weight <= 1:
        raise PlanError(f"memory_weight={memory_weight}: expected a share between 0 (time) and 1 (memory)")
    costs = memory_weight * _shares(memory_bytes) + (1 - memory_weight) * _shares(seconds)
    starts = [0] * stages
    _hand_out(tree_of(paths), 0, stages, costs, starts)
    return starts


def dhondt(votes: Sequence[float], seats: int, most: Sequence[int]) -> list[int]:
    """The seats by D'Hondt's method: each goes to the largest votes / (seats so far + 1), none above its ``most``."""
    held = [0] * len(votes)
    for _ in range(seats):
        open_to = [i for i in range(len(votes)) if held[i] < most[i]]
        winner = max(open_to, key=lambda i: (votes[i] / (held[i] + 1), -held[i], -i))
        held[winner] += 1
    return held


def _shares(values: Sequence[float]) -> Costs:
    array = np.asarray(values, dtype=np.float64)
    return array / array.sum() if array.sum() > 0 else array


def _hand_out(node: Node, device: int, devices: int, costs: Costs, starts: list[int]) -> None:
    """Give the units of a node to ``devices`` devices from ``device`` on, and note where each begins."""
    if devices == 1:
        starts[device] = node.first
        return
    children = _children(node)
    if len(children) == 1:
        _hand_out(children[0], device, devices, costs, starts)
        return
    for run, seats in _runs(children, devices, costs):
        _hand_out(run, device, seats, costs, starts)
        device += seats


def _runs(children: list[Node], devices: int, costs: Costs) -> list[tuple[Node, int]]:
    """The runs of children of least largest cost, with their devices: as many as D'Hondt gives a device each."""
    sums = range_sums([float(costs[child.first : child.end].sum()) for child in children])
    for count in range(min(devices, len(children)), 1, -1):
        cut = min_max_cut(sums, sums, count) or [0]
        runs = [_run(children[a:b]) for a, b in zip(cut, (*cut[1:], len(children)), strict=True)]
        votes = [float(costs[run.first : run.end].sum()) for run in runs]
        held = dhondt(votes, devices, [run.units for run in runs])
        if all(held):
            return list(zip(runs, held, strict=True))
    # One module is so large that it gets all devices: its own children take its place.
    large = [child for child in children if child.units > 1]
    if large:
        opened = max(large, key=lambda child: float(costs[child.first : child.end].sum()))
        place = children.index(opened)
        return _runs([*children[:place], *_children(opened), *children[place + 1 :]], devices, costs)
    small = held.index(0)
    held[small], held[1 - small] = 1, held[1 - small] - 1
    return list(zip(runs, held, strict=True))


def _children(node: Node) -> list[Node]:
    return node.children or [Node(unit, unit + 1) for unit in range(node.first, node.end)]


def _run(children: list[Node]) -> Node:
    """Adjacent children as one node."""
    return children[0] if len(children) == 1 else Node(children[0].first, children[-1].end, children)
