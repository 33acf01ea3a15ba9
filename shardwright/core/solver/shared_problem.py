"""The facts that all layout problems of one graph share, whatever the axes; they are read once."""

from collections.abc import Mapping
from functools import cached_property

from shardwright.core.cost.saved_activations import Kept, aliases
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.layout.placements import Split
from shardwright.core.layout.signature import Signature
from shardwright.core.model.fold import Folded
from shardwright.core.model.graph import Graph, Op
from shardwright.core.model.structure import Slot, unit_slots
from shardwright.core.rules.dim_groups import Dim, DimGroup, dim_groups
from shardwright.core.rules.legal_signatures import divides, signatures
from shardwright.core.values.found_once import found_once


class Frame:
    """A folded graph as the solver sees it."""

    def __init__(self, folded: Folded, counter: WorkCounter | None = None) -> None:
        self.folded, self.graph = folded, folded.graph
        self.counter = counter or WorkCounter(folded.graph)

    @cached_property
    def kept(self) -> Kept:
        graph = self.graph
        needing = {t for t in range(len(graph.tensors)) if self.counter.needs_gradient(t)}
        return Kept(graph, aliases(graph), needing)

    @cached_property
    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        """The parameter slots of every unit."""
        return tuple(unit_slots(self.graph, unit) for unit in self.folded.units)

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """The tensors of the parameters that several units use."""
        users: dict[int, set[int]] = {}
        for unit in self.folded.units:
            for parameter in unit.parameters:
                users.setdefault(self.graph.parameters[parameter].tensor, set()).add(unit.index)
        return tuple(tensor for tensor, units in users.items() if len(units) > 1)

    @cached_property
    def main(self) -> tuple[int | None, ...]:
        """The tensor whose layout is chosen at the border after each unit: the largest that goes to the next unit and
        no further. Others cross whole."""
        graph, units = self.graph, self.folded.units
        unit_of = [unit.index for unit in units for _ in range(unit.first_op, unit.end_op)]
        readers: dict[int, set[int]] = {}
        for index, op in enumerate(graph.ops):
            for tensor in op.inputs:
                readers.setdefault(tensor, set()).add(unit_of[index])
        found: list[int | None] = []
        for unit in units[:-1]:
            made = [t for op in graph.ops[unit.first_op : unit.end_op] for t in op.outputs]
            crossing = [
                t
                for t in made
                if readers.get(t, set()) - {unit.index} == {unit.index + 1}
                and self.counter.needs_gradient(t)
                and t not in graph.outputs
            ]
            found.append(max(crossing, key=lambda t: graph.tensors[t].elements(2), default=None))
        return (*found, None)

    @cached_property
    def leaving(self) -> tuple[frozenset[int], ...]:
        """The tensors of each unit that other units read, or that the model returns."""
        made_in = {
            t: unit.index
            for unit in self.folded.units
            for op in self.graph.ops[unit.first_op : unit.end_op]
            for t in op.outputs
        }
        found: list[set[int]] = [set() for _ in self.folded.units]
        for tensor in self.graph.outputs:
            if tensor in made_in:
                found[made_in[tensor]].add(tensor)
        for unit in self.folded.units:
            for op in self.graph.ops[unit.first_op : unit.end_op]:
                for tensor in op.inputs:
                    if made_in.get(tensor, unit.index) != unit.index:
                        found[made_in[tensor]].add(tensor)
        return tuple(frozenset(tensors) for tensors in found)

    @found_once
    def groups(self, unit: int) -> tuple[DimGroup, ...]:
        """The groups of dims of a unit that are split together."""
        return dim_groups(self.graph, self.folded.units[unit])

    def split_with(self, unit: int, dim: Dim) -> frozenset[Dim]:
        """The dims that ops split together with a dim of a parameter, in the ops that read it or a view of it."""
        of = self.folded.units[unit]
        found, followed = {dim}, {dim}
        for op in self.graph.ops[of.first_op : of.end_op]:
            operands = [
                (label, (tensor, i))
                for tensor, labels in zip((*op.inputs, *op.outputs), op.labels, strict=True)
                for i, label in enumerate(labels)
                if label >= 0
            ]
            mine = {label for label, own in operands if own in followed and own[0] in op.inputs}
            tied = {own for label, own in operands if label in mine}
            found |= tied
            if len(op.inputs) == 1 and op.kind in ("view", "copy", "elementwise"):
                followed |= {own for own in tied if own[0] in op.outputs}
        return frozenset(found)

    @found_once
    def signatures(self, unit: int, batch: int) -> tuple[tuple[Signature, ...], ...]:
        """The signatures of each op of a unit along one axis, at ``batch`` samples."""
        of, able = self.folded.units[unit], self.graph.capabilities.block_layouts
        blocks = {dim: sizes for group in self.groups(unit) for dim, sizes in group.blocks} if able else {}
        return tuple(
            signatures(self.graph, op, batch, _label_blocks(self.graph, op, batch, blocks))
            for op in self.graph.ops[of.first_op : of.end_op]
        )

    def can_split(self, tensor: int, place: Split, ranks: int) -> bool:
        """Whether an axis of so many ranks can cut a tensor along a dim that holds no samples in equal pieces."""
        value = self.graph.tensors[tensor]
        return not value.per_sample[place.dim] and divides(value.shape(1), [(place, ranks)])

    @found_once
    def places(self, unit: int) -> dict[int, tuple[int, int]]:
        """The (op of the unit, operand) at which each tensor first occurs; units of one class have the same."""
        of, found = self.folded.units[unit], dict[int, tuple[int, int]]()
        for i, op in enumerate(self.graph.ops[of.first_op : of.end_op]):
            for j, tensor in enumerate((*op.inputs, *op.outputs)):
                found.setdefault(tensor, (i, j))
        return found


def _label_blocks(
    graph: Graph, op: Op, batch: int, blocks: Mapping[Dim, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    """The blocks that a unit's fused dims give to an op's labels, at the label's whole size."""
    if not blocks:
        return {}
    sizes = graph.label_sizes(op, batch)
    found: dict[int, tuple[int, ...]] = {}
    for tensor, labels in zip((*op.inputs, *op.outputs), op.labels, strict=True):
        for dim, (label, size) in enumerate(zip(labels, graph.tensors[tensor].shape(batch), strict=True)):
            parts = blocks.get((tensor, dim), ())
            if label >= 0 and parts and size == sizes[label]:
                found[label] = parts
    return found
