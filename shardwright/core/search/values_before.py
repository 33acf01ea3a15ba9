"""What is made before the first slice of a sequence, whole, and read by its slices: positions, rotary tables, masks.

A rank has it from the first slice's forward on, in one memory of which slices take their parts. How long it stays,
those that hold it say: a backward that reads it, and a unit that is computed again; a slice that hands a gradient back,
which is as large as all of it and waits for the first slice's backward; else the forward of the last slice is its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import Unit
from shardwright.core.search.slice_counts import SliceWork, Ways
from shardwright.core.slices.sequence_ops import SequenceOps
from shardwright.core.values.recompute_modes import Mode


@dataclass(frozen=True, slots=True)
class HeldBefore:
    """The bytes of such values on a stage, of one microbatch, by how long they stay."""

    kept: int = 0
    """To the backward of the first slice."""
    handed_on: int = 0
    """To that of the second."""
    waiting: int = 0
    """To the forward of the last."""
    gradients: int = 0
    """Their gradients from one slice."""


class ValuesBefore:
    """The values of one microbatch that are made before its first slice; the arguments are those of `SharedKeys`, with
    ``counter`` of whole sequences."""

    def __init__(
        self,
        counter: WorkCounter,
        ops: SequenceOps,
        slices: Sequence[SliceWork],
        ways: Ways,
        batch: int,
        precision: str,
    ) -> None:
        self.counter, self.ops, self.slices, self.ways = counter, ops, slices, ways
        self.batch, self.precision = batch, precision

    def held(self, units: Sequence[Unit], modes: Sequence[Mode]) -> HeldBefore:
        """The bytes on a stage of some units."""
        stays: dict[int, int] = {}
        sizes: dict[int, int] = {}
        flowing: set[int] = set()
        for unit, mode in zip(units, modes, strict=True):
            for op, place, tensor in self._reads(unit):
                root = self._root(tensor)
                sizes[root] = max(sizes.get(root, 0), self._size(op, place, root))
                is_kept, flows = mode != "none" or root in self._kept_by(op), self.counter.needs_gradient(tensor)
                flowing.update([root] if flows else [])
                stays[root] = max(stays.get(root, 0), 2 if is_kept else 1 if flows else 0)
        waiting, handed_on, kept = (
            sum(size for root, size in sizes.items() if stays[root] == level) for level in range(3)
        )
        return HeldBefore(kept, handed_on, waiting, sum(sizes[root] for root in flowing))

    def entering(self, number: int, unit: Unit) -> int:
        """The bytes of them that were counted as entering a unit in a slice."""
        of, found = self.slices[number].counter, dict[int, int]()
        for op, place, tensor in self._reads(unit):
            given = of.graph.ops[op].inputs[place]
            if of.needs_gradient(given) and self.counter.graph.producer[tensor] < unit.first_op:
                size = of.size_bytes(given, self.batch, self.precision)
                found[of.memory_of(given)] = size // self.ways(op, place)
        return sum(found.values())

    @cached_property
    def memories(self) -> frozenset[int]:
        """The memory of all of them."""
        return frozenset(map(self._root, self._made))

    def _reads(self, unit: Unit) -> list[tuple[int, int, int]]:
        """What slices of a unit read of them: (op, place among its operands, tensor)."""
        graph, needs = self.counter.graph, self.ops.needs
        return [
            (op, place, tensor)
            for op in range(unit.first_op, unit.end_op)
            if needs[op] in ("local", "causal")
            for place, tensor in enumerate(graph.ops[op].inputs)
            if tensor in self._made
        ]

    @cached_property
    def _made(self) -> frozenset[int]:
        graph = self.counter.graph
        found = {
            t for op, need in zip(graph.ops, self.ops.needs, strict=True) if need == "constant" for t in op.outputs
        }
        return frozenset(t for t in found if graph.tensors[self._root(t)].role == "activation")

    def _root(self, tensor: int) -> int:
        return self.counter.kept.roots.get(tensor, tensor)

    def _kept_by(self, op: int) -> list[int]:
        return self.counter.kept.by(self.counter.graph.ops[op])

    def _size(self, op: int, place: int, root: int) -> int:
        return self.counter.size_bytes(root, self.batch, self.precision) // self.ways(op, place)
