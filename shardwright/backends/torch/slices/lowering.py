"""The parts of a unit as functions: what runs before the first slice, for each slice, and behind the last.

The functions of slices are made of a trace at the slice's own length, which has the right sizes among its arguments;
its ops are those of the trace of the whole sequence, one by one. What is there whole comes in whole, and each function
takes its part of it. Attention has the keys and values of the slices before it, and hands its own on behind them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.program.program import Context
from shardwright.backends.torch.slices import slice_ops
from shardwright.backends.torch.tensor_parallel.generated_source import Var
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, Site, Traced
from shardwright.backends.torch.tensor_parallel.unit_call import Call, Lowering
from shardwright.backends.torch.tensor_parallel.unit_layouts import UnitLayout
from shardwright.backends.torch.tensor_parallel.unit_lowering import leave, lower_site, write
from shardwright.core.errors import CaptureError
from shardwright.core.layout.placements import Replicate
from shardwright.core.slices.sequence_ops import SequenceOps
from shardwright.core.slices.unit_parts import UnitParts

R = Replicate()
Kind = Literal["before", "slice", "behind"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A value on its way between parts: a graph tensor whole, or of one slice; or the keys (1) or values (2) that an
    attention op has up to the end of a slice."""

    tensor: int
    slice: int | None = None
    carried: tuple[int, int] | None = None
    """(attention op, operand)."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a unit, ready to run: ``function(*entering, *held)`` gives the tensors in ``leaves``."""

    name: str
    unit: int
    slice: int
    """The slice with which it runs: the first for what comes before all, the last for what comes behind."""
    kind: Kind
    function: Callable[..., tuple[Any, ...]]
    entering: tuple[Piece, ...]
    held: tuple[int, ...]
    leaves: tuple[Piece, ...]
    draws: tuple[Context, ...]


@dataclass(frozen=True, slots=True)
class Traces:
    """A model at the length of its sequence, and at those of its slices.

    Attributes:
        lengths: of the slices.
        whole: the trace of the whole sequence.
        sliced: the trace of each length.
    """

    lengths: tuple[int, ...]
    whole: Traced
    sliced: Mapping[int, Traced]
    ops: SequenceOps
    batch: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def start(self, number: int) -> int:
        """The tokens before a slice."""
        return sum(self.lengths[:number])


@dataclass(frozen=True, slots=True)
class Builder:
    """Makes the parts of units.

    Args:
        layouts: of every unit, on the tensor axis.
        wanted: the graph tensors that the step wants of the model.
        prefix: with which names begin.
    """

    traces: Traces
    layouts: Sequence[UnitLayout]
    parts: Sequence[UnitParts]
    wanted: frozenset[int]
    axis: Axis
    device: torch.device
    seed: Callable[[Context], None]
    summed: frozenset[int]
    prefix: str = ""

    def unit(self, number: int) -> list[Part]:
        """The parts of one unit, in the order in which they run. Raises NotReplayableError."""
        parts = self.parts[number]
        found = []
        if before := self._before(number, parts):
            found.append(before)
        if parts.sliced:
            found += [self._slice(number, parts, s) for s in range(len(self.traces.lengths))]
        if parts.behind:
            found.append(self._behind(number, parts))
        seen: dict[Context, Kind] = {}
        for part in found:
            for context in part.draws:
                if seen.setdefault(context, part.kind) != part.kind:
                    raise NotReplayableError(f"{context[0]} draws random numbers for slices and for the whole sequence")
        return found

    # -- the three kinds of parts ---------------------------------------------------------------------------------

    def _before(self, number: int, parts: UnitParts) -> Part | None:
        made = self._made(parts.before)
        leaves = [t for t in made if t in self._read_elsewhere(parts.before)]
        if not leaves:
            return None
        return self._whole(number, parts.before, "before", 0, leaves)

    def _slice(self, number: int, parts: UnitParts, which: int) -> Part:
        traces = self.traces
        whole, ops = traces.whole, traces.ops
        length, start = traces.lengths[which], traces.start(which)
        is_last = which == len(traces.lengths) - 1
        lowering = self._lowering(number, traces.sliced[length], f"unit {number} slice {which}")
        entering = [
            Piece(t, which if t in self._in_slices else None) for t in self._read(parts.sliced) if self._enters(t)
        ]
        attentions = [op for op in parts.sliced if op in ops.carried]
        if which:
            entering += [Piece(whole.graph.ops[op].inputs[i], which - 1, (op, i)) for op in attentions for i in (1, 2)]
        inputs = {piece: lowering.source.input() for piece in entering}
        held = self._held(lowering, parts.sliced)
        uncut = dict(lowering.at)
        for piece, var in inputs.items():
            if piece.carried is None:
                lowering.made(piece.tensor, var, self._enters_as(number, piece.tensor))
                if piece.slice is None:
                    uncut[piece.tensor] = lowering.at[piece.tensor]
        for tensor, var in uncut.items():
            dim = ops.constants.get(tensor, ops.dims.get(tensor))
            if dim is not None:
                lowering.at[tensor] = lowering.source.call(slice_ops.part_of, var, dim, start, length, traces.tokens)
        if not which:
            read_before = {t for earlier in self.parts[:number] for t in self._read(earlier.sliced)}
            made_here = set(self._made([op for each in self.parts for op in each.before]))
            given = {t: var for t, var in uncut.items() if t not in read_before and t not in made_here}
            self._require_causal(lowering, given)
        carried: list[tuple[Piece, Var]] = []

        def attend(call: Call, op: int) -> bool:
            site = self._whole_site(op)
            given = Call(lowering, site, call.pieces)
            slots = call.slots()
            operands = [slots[0]]
            for position in (1, 2):
                tensor = whole.graph.ops[op].inputs[position]
                own = slots[position]
                if which:
                    earlier = inputs[Piece(tensor, which - 1, (op, position))]
                    own = lowering.source.call(torch.cat, [earlier, own], ops.dims[tensor])
                if not is_last:
                    carried.append((Piece(tensor, which, (op, position)), own))
                operands.append(own)
            mask = ops.masks.get(op)
            if mask is None and not given.argument("is_causal", False):
                return False
            if mask is not None and mask not in uncut:
                raise NotReplayableError("the mask of an attention is made of what slices make")
            probability = float(given.argument("dropout_p", 0.0))
            if probability:
                lowering.seeded(site)
            made = lowering.source.call(
                slice_ops.attention, *operands, None if mask is None else uncut[mask], start, traces.tokens,
                probability, given.argument("scale"), bool(given.argument("enable_gqa", False)),
                is_kept=bool(probability),
            )  # fmt: skip
            call.give(0, 0, made)
            return True

        def drop(call: Call, op: int) -> bool:
            site = self._whole_site(op)
            given = Call(lowering, site, call.pieces)
            tensor = whole.graph.ops[op].inputs[0]
            probability = given.argument("p")
            if not given.argument("train", True) or not probability:
                return False
            lowering.seeded(site)
            shape = list(whole.graph.tensors[tensor].shape(traces.batch))
            made = lowering.source.call(
                slice_ops.dropout, call.inputs(0)[0], probability, shape, site.order, ops.dims[tensor], start, length,
                traces.tokens, is_kept=True,
            )  # fmt: skip
            call.give(0, 0, made)
            return True

        def own(call: Call) -> bool:
            site, op = call.site, next(o for o in call.site.ops if o is not None)
            if op in ops.carried and site.name == "scaled_dot_product_attention":
                if attend(call, op):
                    return True
                raise NotReplayableError("an attention says neither a mask nor is_causal")
            if op in ops.carried:
                raise NotReplayableError(f"{site.name} has no form behind the keys of earlier slices")
            if site.name == "dropout":
                return drop(call, op)
            if self._whole_site(op).draws:
                raise NotReplayableError(f"{site.name} draws random numbers along the sequence: dropout alone is known")
            return False

        self._lower(lowering, parts.sliced, own)
        made = self._made(parts.sliced)
        read = self._read_elsewhere(parts.sliced)
        leaves = [(Piece(t, which), self._leaving(lowering, t)) for t in made if t in read]
        leaves += [(piece, lowering.source.call(_own, var)) for piece, var in carried]
        return self._part(lowering, number, which, "slice", entering, held, leaves)

    def _behind(self, number: int, parts: UnitParts) -> Part:
        leaves = [t for t in self._made(parts.behind) if t in self.wanted]
        return self._whole(number, parts.behind, "behind", len(self.traces.lengths) - 1, leaves)

    def _whole(self, number: int, ops: Sequence[int], kind: Kind, which: int, leaves: Sequence[int]) -> Part:
        """The part of ops that run once, on whole tensors."""
        lowering = self._lowering(number, self.traces.whole, f"unit {number} {kind} slices")
        entering = [Piece(t) for t in self._read(ops) if self._enters(t)]
        inputs = {piece: lowering.source.input() for piece in entering}
        held = self._held(lowering, ops)
        for piece, var in inputs.items():
            lowering.made(piece.tensor, var, self._enters_as(number, piece.tensor))
        self._lower(lowering, ops)
        self._require_causal(lowering, {t: lowering.at[t] for t in leaves})
        given = [(Piece(t), self._leaving(lowering, t)) for t in leaves]
        return self._part(lowering, number, which, kind, entering, held, given)

    # -- what they share ------------------------------------------------------------------------------------------

    def _lowering(self, number: int, traced: Traced, name: str) -> Lowering:
        return Lowering(
            traced, self.layouts[number], self.axis, self.traces.batch, f"{self.prefix}{name}", self.device, self.seed,
            self.summed,
        )  # fmt: skip

    def _part(
        self, lowering: Lowering, unit: int, which: int, kind: Kind, entering: Sequence[Piece], held: Sequence[int],
        leaves: Sequence[tuple[Piece, Var]],
    ) -> Part:  # fmt: skip
        function = lowering.source.build(lowering.name, [var for _, var in leaves])
        return Part(
            lowering.name, unit, which, kind, function, tuple(entering), tuple(held),
            tuple(piece for piece, _ in leaves), tuple(lowering.draws),
        )  # fmt: skip

    def _lower(self, lowering: Lowering, ops: Sequence[int], own: Callable[[Call], bool] | None = None) -> None:
        inside, done = frozenset(ops), -1
        for op in ops:
            if op >= done:
                done = lower_site(lowering, op, inside, own)
        written = self.traces.whole.written
        made = set(self._made(ops))
        for buffer, now in written.items():
            if now not in made:
                continue
            if own is not None:
                raise NotReplayableError(f"{self._graph.tensors[buffer].name} is written to slice by slice")
            lowering.source.call(write, lowering.at[buffer], lowering.at[now], is_kept=True)

    def _held(self, lowering: Lowering, ops: Sequence[int]) -> list[int]:
        """The tensors that the model holds and ops read, as further arguments of the function."""
        tensors = self._graph.tensors
        read = dict.fromkeys(t for t in self._read(ops) if not self._enters(t))
        for site in self._sites(ops):
            read.update(
                (t, None) for t in site.inputs if t is not None and tensors[t].role not in ("activation", "input")
            )
        read.update((buffer, None) for buffer, now in self.traces.whole.written.items() if now in self._made(ops))
        for tensor in read:
            lowering.made(tensor, lowering.source.input(), lowering.layout.parameters.get(tensor, R))
        return list(read)

    def _sites(self, ops: Iterable[int]) -> list[Site]:
        whole = self.traces.whole
        return [whole.sites[i] for i in sorted({whole.site_of_op[op][0] for op in ops})]

    def _whole_site(self, op: int) -> Site:
        return self.traces.whole.sites[self.traces.whole.site_of_op[op][0]]

    @property
    def _graph(self) -> Any:
        return self.traces.whole.graph

    def _enters(self, tensor: int) -> bool:
        return self._graph.tensors[tensor].role in ("activation", "input")

    def _enters_as(self, unit: int, tensor: int) -> Any:
        layout = self.layouts[unit]
        if tensor in layout.enters:
            return layout.enters[tensor]
        return R

    def _leaving(self, lowering: Lowering, tensor: int) -> Var:
        leaves = lowering.layout.leaves
        return (
            leave(lowering, tensor, leaves[tensor][1])
            if tensor in leaves
            else lowering.source.call(_own, lowering.at[tensor])
        )

    def _made(self, ops: Sequence[int]) -> list[int]:
        return [t for op in ops for t in self._graph.ops[op].outputs]

    def _read(self, ops: Sequence[int]) -> list[int]:
        """The tensors that ops read and do not make, in order."""
        made = set(self._made(ops))
        return list(dict.fromkeys(t for op in ops for t in self._graph.ops[op].inputs if t not in made))

    def _read_elsewhere(self, ops: Sequence[int]) -> set[int]:
        """The tensors that other ops read, or the step."""
        inside = set(ops)
        found = set(self.wanted)
        for number, op in enumerate(self._graph.ops):
            if number not in inside:
                found.update(op.inputs)
        return found

    @property
    def _in_slices(self) -> set[int]:
        """The tensors that slices make."""
        return set(self._made([op for parts in self.parts for op in parts.sliced]))

    def _require_causal(self, lowering: Lowering, found: Mapping[int, Var]) -> None:
        """Look at the values of masks, at every microbatch."""
        for op, mask in self.traces.ops.masks.items():
            if mask in found:
                where = self._graph.calls[self._graph.ops[op].call].path or self._graph.model_name
                lowering.source.call(slice_ops.require_causal, found[mask], where, is_kept=True)
                found = {t: var for t, var in found.items() if t != mask}


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a tensor object of its own."""
    return tensor.view_as(tensor)


def alike(whole: Traced, other: Traced, length: int) -> Traced:
    """The trace at another length, whose ops are those of the whole sequence one by one.

    Raises CaptureError where they are not.
    """
    name, one, two = whole.graph.model_name, whole.graph, other.graph
    for a, b in zip(one.ops, two.ops, strict=False):
        if (a.name, a.inputs, a.outputs) != (b.name, b.inputs, b.outputs):
            where = one.calls[a.call].path or name
            raise CaptureError(
                f"{name} does otherwise at {length} tokens than at the length of its sequence: {b.name} in place of "
                f"{a.name} in {where}. Slices run the same ops at every length: take other lengths, or leave out slices"
            )
    if len(one.ops) != len(two.ops) or len(one.tensors) != len(two.tensors):
        raise CaptureError(
            f"{name} runs {len(two.ops)} ops at {length} tokens and {len(one.ops)} at the length of its sequence: "
            f"slices run the same ops at every length; take other lengths, or leave out slices"
        )
    return replace(other, constants=whole.constants)


SIZED = frozenset({"view", "copy"})
"""The kinds of ops whose arguments are sizes of what they are given."""


def require_same_numbers(whole: Traced, other: Traced, ops: SequenceOps, length: int) -> None:
    """Raise CaptureError where an op of slices computes with a number that follows from the length, as a product with
    one over it: in slices it would be another number."""
    for one, two in zip(whole.sites, other.sites, strict=True):
        present = [op for op in one.ops if op is not None]
        if not any(ops.needs[op] == "local" for op in present):  # attention has the numbers of the whole sequence
            continue
        may_differ = all(whole.graph.ops[op].kind in SIZED for op in present)
        given = (one.arguments, one.keywords), (two.arguments, two.keywords)
        if not may_differ and given[0] != given[1]:
            where = one.context[0] or whole.graph.model_name
            raise CaptureError(
                f"{one.name} in {where} computes with numbers that follow from the length of the sequence (other ones "
                f"at {length} tokens): slices would compute something else; leave out slices, or give it the number"
            )
