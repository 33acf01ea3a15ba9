"""The blocks of a model: the modules that a pipeline cut keeps whole.

A block is a member of an indexed family: ``h.0, h.1 …`` of a container, ``Block_0, Block_1 …`` or ``stage1, stage2 …``
of a module. Families nest (stages of blocks, an encoder of layers): a member that is mostly made of an inner family and
has no sibling like itself is opened, and the inner members are the blocks. Members are alike when most of their
parameters have the same shapes.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from shardwright.core.model.graph import Graph

Shape = tuple[int, ...]

NUMBERED = re.compile(r"^(?P<stem>.*?)_?(?P<index>\d+)$")
ALIKE = 0.5
"""The share of parameters, by shape, that two members have in common to count as alike."""
MOSTLY = 0.5
"""The share of a member's parameters that an inner family must hold for the member to be opened."""


@dataclass(slots=True)
class Node:
    """A module call, or a prefix of parameter names, in the tree of a model."""

    path: str
    children: list[int] = field(default_factory=list)
    shapes: Counter[Shape] = field(default_factory=Counter)
    """The shapes of the parameters used inside, with their numbers."""

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) * count for shape, count in self.shapes.items())


def call_tree(graph: Graph) -> list[Node]:
    """The module calls of a graph; node i is call i."""
    nodes = [Node(call.path) for call in graph.calls]
    for index, call in enumerate(graph.calls[1:], start=1):
        nodes[call.parent].children.append(index)
    shapes = {p.tensor: graph.tensors[p.tensor].fixed for p in graph.parameters}
    used: list[dict[int, None]] = [{} for _ in nodes]
    for op in graph.ops:
        used[op.call].update((t, None) for t in op.inputs if t in shapes)
    for index in reversed(range(len(nodes))):
        nodes[index].shapes.update(shapes[t] for t in used[index])
        if index:
            used[graph.calls[index].parent].update(used[index])
    return nodes


def parameter_tree(graph: Graph) -> list[Node]:
    """The prefixes of parameter names, for graphs without module calls; node 0 is the root, with path ''."""
    nodes = [Node("")]
    place = {"": 0}
    for parameter in graph.parameters:
        shape = graph.tensors[parameter.tensor].fixed
        parts = parameter.name.split(".")
        nodes[0].shapes[shape] += 1
        for depth in range(1, len(parts)):
            path = ".".join(parts[:depth])
            if path not in place:
                place[path] = len(nodes)
                nodes[place[".".join(parts[: depth - 1])]].children.append(len(nodes))
                nodes.append(Node(path))
            nodes[place[path]].shapes[shape] += 1
    return nodes


def find_blocks(nodes: list[Node], nesting: int = 0) -> set[int]:
    """The nodes that are blocks; none of them lies inside another. ``nesting``: how often blocks are opened, each into
    the blocks inside it, or into the modules that it is made of where there are none such."""
    found = _blocks_under(nodes, 0)
    for _ in range(nesting):
        found = [inner for block in found for inner in _opened(nodes, block)]
    return set(found)


def _opened(nodes: list[Node], block: int) -> list[int]:
    """The blocks inside a block, or its modules; itself where it is made of one or of none."""
    inner = _blocks_under(nodes, block) or nodes[block].children
    return inner if len(inner) > 1 else [block]


def _blocks_under(nodes: list[Node], parent: int) -> list[int]:
    found: list[int] = []
    families = _families(nodes, parent)
    for child in nodes[parent].children:
        inner = _blocks_under(nodes, child)
        siblings = families.get(child)
        if siblings is None or (inner and _holds_most(nodes, child, inner) and not _has_alike(nodes, child, siblings)):
            found += inner
        else:
            found.append(child)
    return found


def _families(nodes: list[Node], parent: int) -> dict[int, list[int]]:
    """The family of every child that belongs to an indexed one: a container's members (``h.0``) always; numbered
    modules (``Block_0``, ``stage1``) when there are several and they contain modules, so that ``fc1`` and ``ln_2`` form
    none."""
    members: dict[tuple[str, str], list[int]] = {}
    for child in nodes[parent].children:
        container, _, last = nodes[child].path.rpartition(".")
        match = NUMBERED.match(last)
        if match:
            members.setdefault((container, match["stem"]), []).append(child)
    families: dict[int, list[int]] = {}
    for (_, stem), children in members.items():
        several = len({nodes[c].path for c in children}) > 1
        if not stem or (several and any(nodes[c].children for c in children)):
            families.update((child, children) for child in children)
    return families


def _holds_most(nodes: list[Node], outer: int, inner: list[int]) -> bool:
    return sum(nodes[i].elements for i in inner) >= MOSTLY * nodes[outer].elements


def _has_alike(nodes: list[Node], one: int, siblings: list[int]) -> bool:
    mine = nodes[one].shapes
    for other in siblings:
        theirs = nodes[other].shapes
        larger = max(mine.total(), theirs.total())
        if other != one and larger and (mine & theirs).total() >= ALIKE * larger:
            return True
    return False
