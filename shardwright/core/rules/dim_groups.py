"""The dims of a unit that belong together: the groups that a tensor axis can split together.

Labels tie dims within an op. Following them through the ops of a unit gives groups such as "the heads" or "the inner
width of the feed-forward". Splitting a group splits every tensor in it, and the ops that contract or look up along it
leave partial sums. Slices and concatenations of a dim (fused q|k|v) give it blocks, each of which is split by itself.
"""

import itertools
import math
from dataclasses import dataclass

from shardwright.core.model.fold import Unit
from shardwright.core.model.graph import Graph
from shardwright.core.values.disjoint_sets import DisjointSets

Dim = tuple[int, int]
"""A dim of a tensor, as (tensor, dim)."""


@dataclass(frozen=True, slots=True)
class DimGroup:
    """Dims that are split together."""

    dims: frozenset[Dim]
    divisor: int
    """The number that a degree must divide: the greatest common divisor of all part sizes."""
    blocks: tuple[tuple[Dim, tuple[int, ...]], ...]
    """The sizes of the parts of each dim that has parts."""
    obstacle: str
    """The reason why the group cannot be split, or ''."""

    def blocks_of(self, dim: Dim) -> tuple[int, ...]:
        return dict(self.blocks).get(dim, ())


def dim_groups(graph: Graph, unit: Unit, batch: int = 2) -> tuple[DimGroup, ...]:
    """The groups of a unit's dims that hold a dim of a parameter, in order of first use."""
    same: DisjointSets[Dim] = DisjointSets()
    tied: DisjointSets[Dim] = DisjointSets()
    cuts: dict[Dim, set[int]] = {}
    obstacles: dict[Dim, str] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    boundary = boundary_tensors(graph, unit)
    for op in graph.ops[unit.first_op : unit.end_op]:
        by_label: dict[int, list[Dim]] = {}
        for position, (tensor, labels) in enumerate(zip((*op.inputs, *op.outputs), op.labels, strict=True)):
            shape = shapes.setdefault(tensor, graph.tensors[tensor].shape(batch))
            for dim, label in enumerate(labels):
                if shape[dim] == 1:
                    continue
                same.add((tensor, dim))
                tied.add((tensor, dim))
                if label < 0 or op.role(label) == "whole":
                    obstacles.setdefault((tensor, dim), f"{op.name} needs it whole")
                elif tensor in boundary:
                    obstacles.setdefault((tensor, dim), "it leaves its unit")
                if label >= 0:
                    by_label.setdefault(label, []).append((tensor, dim))
            if op.kind in ("slice", "concat"):
                _note_cut(graph, op.labels, op.inputs, op.outputs, op.offsets, position, op.kind, shapes, batch, cuts)
        for dims in by_label.values():
            first_of_size: dict[int, Dim] = {}
            for tensor, dim in dims:
                tied.merge(dims[0], (tensor, dim))
                same.merge(first_of_size.setdefault(shapes[tensor][dim], (tensor, dim)), (tensor, dim))
    parts: dict[Dim, set[int]] = {}
    for whole, places in cuts.items():
        same.add(whole)
        parts.setdefault(same[whole], set()).update(places)
    members: dict[Dim, list[Dim]] = {}
    for member in tied:
        members.setdefault(tied[member], []).append(member)
    parameters = {p.tensor for p in graph.parameters}
    return tuple(
        _group(dims, shapes, same, parts, obstacles)
        for dims in members.values()
        if any(tensor in parameters for tensor, _ in dims)
    )


def boundary_tensors(graph: Graph, unit: Unit) -> frozenset[int]:
    """The activations that enter or leave a unit; they are whole on every rank of the tensor axis."""
    made = {t for op in graph.ops[unit.first_op : unit.end_op] for t in op.outputs}
    used = {t for op in graph.ops[unit.first_op : unit.end_op] for t in op.inputs}
    entering = {t for t in used - made if graph.tensors[t].role in ("activation", "input")}
    elsewhere = (*graph.ops[: unit.first_op], *graph.ops[unit.end_op :])
    leaving = made & ({t for op in elsewhere for t in op.inputs} | set(graph.outputs))
    return frozenset(entering | leaving)


def _note_cut(
    graph: Graph,
    labels: tuple[tuple[int, ...], ...],
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    offsets: tuple[int, ...],
    position: int,
    kind: str,
    shapes: dict[int, tuple[int, ...]],
    batch: int,
    cuts: dict[Dim, set[int]],
) -> None:
    """Note the borders of a part (an output of a slice, an input of a concatenation) in its whole."""
    is_part = position >= len(inputs) if kind == "slice" else position < len(inputs)
    if not is_part:
        return
    which = position - len(inputs) if kind == "slice" else position
    if which >= len(offsets):
        return
    whole, part = (inputs[0], outputs[which]) if kind == "slice" else (outputs[0], inputs[which])
    whole_shape = graph.tensors[whole].shape(batch)
    whole_labels = labels[0] if kind == "slice" else labels[-1]
    for dim, label in enumerate(labels[position]):
        if label < 0 or label not in whole_labels:
            continue
        whole_dim = whole_labels.index(label)
        size = graph.tensors[part].shape(batch)[dim]
        if size != whole_shape[whole_dim]:
            start = offsets[which]
            cuts.setdefault((whole, whole_dim), {0, whole_shape[whole_dim]}).update((start, start + size))


def _group(
    dims: list[Dim],
    shapes: dict[int, tuple[int, ...]],
    same: DisjointSets[Dim],
    parts: dict[Dim, set[int]],
    obstacles: dict[Dim, str],
) -> DimGroup:
    blocks: list[tuple[Dim, tuple[int, ...]]] = []
    divisor = 0
    for dim in dims:
        places = sorted(parts.get(same[dim], ()))
        sizes = tuple(b - a for a, b in itertools.pairwise(places)) if len(places) > 2 else ()
        if sizes:
            blocks.append((dim, sizes))
        divisor = math.gcd(divisor, *(sizes or (shapes[dim[0]][dim[1]],)))
    obstacle = next((obstacles[dim] for dim in dims if dim in obstacles), "")
    tensors = [tensor for tensor, _ in dims]
    if not obstacle and len(set(tensors)) != len(tensors):
        obstacle = "one tensor carries it twice"
    return DimGroup(frozenset(dims), divisor, tuple(blocks), obstacle)
