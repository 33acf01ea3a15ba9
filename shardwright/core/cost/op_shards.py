"""The number of shards of each operand of a unit's ops, from the unit's layouts."""

import math
from collections.abc import Iterator, Mapping

from shardwright.core.layout.placements import Split
from shardwright.core.layout.signature import Signature
from shardwright.core.layout.unit_layouts import RealisedUnit
from shardwright.core.model.graph import Op


class Pieces:
    """The number of shards of each operand and of each memory of a unit. ``layouts`` is that of this unit (None:
    nothing is split), and ``alias`` gives the tensor whose memory a view shares."""

    def __init__(self, layouts: RealisedUnit | None, alias: Mapping[int, int]) -> None:
        self._layouts, self._alias = layouts, alias
        self._lies: dict[int, int] = {}
        """Memory → the largest number of shards in which it lies before anything reads it."""
        self._read: dict[int, int] = {}
        """Memory → the smallest number of shards in which an op reads it."""
        if layouts is not None:
            for link in layouts.links:
                root = alias.get(link.tensor, link.tensor)
                self._lies[root] = max(self._lies.get(root, 1), layouts.ways(link.before))
                if link.reader is not None:
                    ways = layouts.ways(link.after)
                    self._read[root] = min(self._read.get(root, ways), ways)
            self._enters = {t: layouts.pieces(p) for t, p in layouts.enters}

    def ways(self, op: int, position: int) -> int:
        """The number of shards of an operand; ``position`` counts the inputs and then the outputs."""
        return 1 if self._layouts is None else self._layouts.ways(self._layouts.operand(op, position))

    def entering_ways(self, tensor: int) -> int:
        """The number of shards of a value that comes from earlier units, or from earlier ops of this one where its
        last ops are counted by themselves."""
        return 1 if self._layouts is None else self._enters.get(tensor, self.memory_ways(tensor))

    def note_given(self, tensor: int, op: int, position: int) -> None:
        """Note an operand that no op makes and the layouts do not name, such as the keys of earlier slices: it lies as
        it is read."""
        if self._layouts is not None and tensor not in self._lies:
            self._lies[tensor] = self.ways(op, position)

    def _along(self, op: int) -> Iterator[tuple[str, int, Signature]]:
        """The name and size of every axis, and the signature of an op along it."""
        if self._layouts is not None:
            chosen = self._layouts.signatures[op - self._layouts.first_op]
            yield from ((*axis, signature) for axis, signature in zip(self._layouts.axes, chosen, strict=True))

    def share(self, op: int) -> int:
        """The number of ranks among which an op's work is divided."""
        return math.prod(
            size for _, size, s in self._along(op) if any(isinstance(p, Split) for p in (*s.inputs, *s.outputs))
        )

    def of_labels(self, index: int, op: Op) -> dict[int, int]:
        """Label → the number of its shards, for the labels that are split."""
        found: dict[int, int] = {}
        for _, size, signature in self._along(index):
            labels = {
                dims[place.dim]
                for dims, place in zip(op.labels, (*signature.inputs, *signature.outputs), strict=True)
                if isinstance(place, Split)
            }
            for label in labels - {-1}:
                found[label] = found.get(label, 1) * size
        return found

    def combined(self, index: int, op: Op) -> Iterator[tuple[str, int]]:
        """(axis, label) of every reduction inside the op: the statistics of a softmax or norm along a split dim."""
        for axis, _, signature in self._along(index):
            if signature.need == "combine":
                place = next(p for p in signature.inputs if isinstance(p, Split))
                yield axis, op.labels[signature.inputs.index(place)][place.dim]

    def split_operands(self, op: int) -> Iterator[tuple[str, int]]:
        """(axis, position) of every operand of an op that is split; positions count the inputs and then the outputs."""
        for axis, _, signature in self._along(op):
            for position, place in enumerate((*signature.inputs, *signature.outputs)):
                if isinstance(place, Split):
                    yield axis, position

    def memory_ways(self, tensor: int) -> int:
        """The number of shards of a value in memory: the number before anything reads it, or the smallest with which an
        op reads it, where that is more. What is gathered for one op is not kept."""
        root = self._alias.get(tensor, tensor)
        return max(self._lies.get(root, 1), self._read.get(root, 1))
