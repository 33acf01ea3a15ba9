"""The keys and values of a sequence, which its slices share in one memory, and the masks of later keys.

The first slice takes memory for the keys and values of the whole sequence, in which those behind it write theirs; it is
there until the first slice's backward, or, where that computes them again, until that of the second. Their gradients
come back from the slice behind. Attentions to a slice behind the first share a mask that hides later keys.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.cost.saved_activations import WITH_DROPOUT
from shardwright.core.model.fold import Unit
from shardwright.core.model.graph import Graph
from shardwright.core.search.slice_counts import SliceWork, Ways
from shardwright.core.slices.sequence_ops import SequenceOps
from shardwright.core.values.recompute_modes import Mode


@dataclass(frozen=True, slots=True)
class _Read:
    """Keys or values that an attention reads: the tensor, the op and the place among its operands."""

    tensor: int
    op: int
    place: int


class SharedKeys:
    """The keys and values of one microbatch in slices, in bytes on one rank.

    Args:
        whole: the graph of whole sequences.
        slices: of the sequence, in order.
        lengths: of these, in tokens.
        ways: the number of shards of an operand.
        fuses_dropout: whether attention with dropout is a kernel of its own, which keeps its operands.
    """

    def __init__(
        self,
        whole: Graph,
        ops: SequenceOps,
        slices: Sequence[SliceWork],
        lengths: Sequence[int],
        ways: Ways,
        batch: int,
        precision: str,
        *,
        fuses_dropout: bool,
    ) -> None:
        self.whole, self.ops, self.slices, self.lengths, self.ways = whole, ops, slices, lengths, ways
        self.batch, self.precision, self.fuses_dropout = batch, precision, fuses_dropout

    def handed(self, number: int, unit: Unit) -> int:
        """The bytes of the keys and values up to a slice's end that a unit reads, where there are slices before it."""
        return sum(self._size(number, read) for read in self._reads(number, unit)) if number else 0

    def kept_more(self, number: int, unit: Unit) -> int:
        """The bytes that a slice keeps of a unit's keys and values beside what was counted: the first has memory for
        the whole sequence in the place of its own, and the others nothing that is not there."""
        if number or len(self.slices) == 1:
            return 0
        kept = self._kept(unit)
        theirs = {root: read for read, root, is_theirs in kept.values() if is_theirs}
        counted = sum(self._size(0, replace(read, tensor=root)) for root, read in theirs.items())
        return self._whole_bytes(unit, kept) - counted

    def left_for_the_next(self, number: int, unit: Unit, mode: Mode) -> int:
        """The bytes of the memory for keys and values that the first slice takes and its own attentions do not keep."""
        if number or len(self.slices) == 1:
            return 0
        kept = self._kept(unit) if mode == "none" else {}
        every = range(len(self._reads(len(self.slices) - 1, unit)))
        return self._whole_bytes(unit, every) - self._whole_bytes(unit, kept)

    def has_mask(self, unit: Unit) -> bool:
        """Whether attentions of a unit are given a mask of later keys that the model has not, and that stays: what is
        computed op by op with dropout keeps its scores instead."""
        inside = [op for op in range(unit.first_op, unit.end_op) if op in self.ops.carried and op not in self.ops.masks]
        given = [self.whole.ops[op] for op in inside if self.whole.ops[op].kind == "attention"]
        return any(self.fuses_dropout or not op.name.endswith(WITH_DROPOUT) for op in given)

    def mask_bytes(self, number: int) -> int:
        """The bytes of that mask in a slice; the first has none, as attention knows it without."""
        if not number:
            return 0
        return self.lengths[number] * sum(self.lengths[: number + 1]) * PRECISION_BYTES[self.precision]

    def _reads(self, number: int, unit: Unit) -> list[_Read]:
        """The keys and values that the attentions of a unit read in a slice, each once."""
        graph, found = self.slices[number].graph, dict[int, _Read]()
        for op in range(unit.first_op, unit.end_op):
            for place in self._places(op):
                tensor = graph.ops[op].inputs[place]
                found.setdefault(tensor, _Read(tensor, op, place))
        return [*found.values()]

    def _places(self, op: int) -> list[int]:
        """The places of keys and values among the operands of an op."""
        carried, first = self.ops.carried.get(op, ()), int(self.whole.ops[op].kind == "attention")  # behind its query
        inputs = self.whole.ops[op].inputs if carried else ()
        return [place for place, tensor in enumerate(inputs) if place >= first and tensor in carried]

    def _size(self, number: int, read: _Read) -> int:
        whole = self.slices[number].counter.size_bytes(read.tensor, self.batch, self.precision)
        return whole // self.ways(read.op, read.place)

    def _whole_bytes(self, unit: Unit, places: Collection[int]) -> int:
        """The bytes of the last slice's keys and values, which are of the whole sequence, at some places among all that
        a unit reads."""
        last = len(self.slices) - 1
        return sum(self._size(last, read) for place, read in enumerate(self._reads(last, unit)) if place in places)

    def _kept(self, unit: Unit) -> dict[int, tuple[_Read, int, bool]]:
        """The keys and values that a unit's attentions keep in the first slice, by their places among all that it
        reads: what they read, the memory that is kept, and whether for nothing else."""
        graph, counter = self.slices[0].graph, self.slices[0].counter
        roots, theirs, others = counter.kept.roots, set[int](), set[int]()
        for op in range(unit.first_op, unit.end_op):
            if op not in self.ops.carried:
                others.update(counter.kept.by(graph.ops[op]))
                continue
            inputs = graph.ops[op].inputs
            keys = {roots.get(inputs[place], inputs[place]) for place in self._places(op)}
            kept = set(counter.kept.by(graph.ops[op]))
            first: int | None = roots.get(inputs[0], inputs[0])
            if graph.ops[op].name.endswith(WITH_DROPOUT) and not self.fuses_dropout:
                kept, first = {roots.get(inputs[2], inputs[2])}, None  # and a copy of the query
            theirs.update(keys.intersection(kept))
            others.update(root for root in kept if root not in keys or root == first)
        found = {}
        for place, read in enumerate(self._reads(0, unit)):
            root = roots.get(read.tensor, read.tensor)
            if root in theirs:
                found[place] = read, root, root not in others
        return found
