"""The parts of a unit as functions: what runs before the first slice, for each slice, and behind the last.

The functions of slices are made of a trace at the slice's own length, which has the right sizes among its arguments;
its ops are those of the trace of the whole sequence, one by one. What is there whole comes in whole, and each function
takes its part of it. Attention has the keys and values of the slices before it, and hands its own on behind them.

On a tensor axis every op has the layout that it has in whole sequences, which leaves these in one piece.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.program.program import Context
from shardwright.backends.torch.slices import slice_ops
from shardwright.backends.torch.slices.reach import Reach
from shardwright.backends.torch.slices.slice_ops import SlicePlace
from shardwright.backends.torch.slices.traces import Kind, Part, Piece, Traces
from shardwright.backends.torch.tensor_parallel.generated_source import Var
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, Site, Traced
from shardwright.backends.torch.tensor_parallel.unit_call import Call, Lowering
from shardwright.backends.torch.tensor_parallel.unit_layouts import UnitLayout
from shardwright.backends.torch.tensor_parallel.unit_lowering import leave, lower_site, write
from shardwright.core.layout.placements import Placement, Replicate, Split
from shardwright.core.model.graph import Graph
from shardwright.core.slices.unit_parts import UnitParts

R = Replicate()
Leaving = list[tuple[Piece, Var, Placement]]


@dataclass(frozen=True)
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
        leaves = [t for t in made if t in self.wanted or self._readers.get(t, set()) - set(parts.before)]
        relayed = self._relayed(number)
        if not (leaves or relayed):
            return None
        return self._whole(number, parts.before, "before", 0, leaves, relayed)

    def _slice(self, number: int, parts: UnitParts, which: int) -> Part:
        traces, ops = self.traces, self.traces.ops
        lowering = self._lowering(number, traces.of_slice(which), f"unit {number} slice {which}")
        entering = self._entering(number, parts.sliced, which)
        if which:
            reaching = [(op, t) for op in parts.sliced for t in dict.fromkeys(ops.carried.get(op, ()))]
            reaching += [(op, ops.tails[op][0]) for op in parts.sliced if op in ops.tails]
            entering += [Piece(tensor, which - 1, carried=op) for op, tensor in reaching]
        inputs = {piece: lowering.source.input() for piece in entering}
        held = self._held(lowering, parts.sliced)
        uncut = dict(lowering.at)
        for piece, var in inputs.items():
            if piece.carried is None:
                self._enter(lowering, number, piece, var)
                if piece.slice is None:
                    uncut[piece.tensor] = lowering.at[piece.tensor]
        at = SlicePlace(traces.start(which), traces.lengths[which], traces.tokens)
        for tensor, var in uncut.items():
            dim = ops.constants.get(tensor, ops.dims.get(tensor))
            if dim is not None:
                rows = traces.rows(tensor, dim)
                lowering.at[tensor] = lowering.source.call(slice_ops.part_of, var, dim, at, rows)
            if tensor in ops.key_constants:
                keys = ops.key_constants[tensor]
                lowering.at[tensor] = lowering.source.call(slice_ops.keys_of, lowering.at[tensor], keys, at)
        if not which:
            read_before = {t for earlier in self.parts[:number] for t in self._read(earlier.sliced)}
            made_here = set(self._made([op for each in self.parts for op in each.before]))
            given = {t: var for t, var in uncut.items() if t not in read_before and t not in made_here}
            self._require_causal(lowering, given)
        reach = Reach(lowering, traces, which, inputs, uncut)
        self._lower(lowering, parts.sliced, reach)
        leaves = [
            leaf for t in self._made(parts.sliced) for leaf in self._leaving(lowering, number, t, parts.sliced, which)
        ]
        leaves += [(piece, lowering.source.call(_own, var), place) for piece, var, place in reach.carried]
        return self._part(lowering, number, which, "slice", entering, held, leaves)

    def _behind(self, number: int, parts: UnitParts) -> Part:
        leaves = [t for t in self._made(parts.behind) if t in self.wanted]
        return self._whole(number, parts.behind, "behind", len(self.traces.lengths) - 1, leaves)

    def _relayed(self, number: int) -> list[int]:
        """What slices of a unit read of what another unit makes before them. Their own unit hands it on to all of them,
        so that a rank is sent it once."""
        if len(self.traces.lengths) == 1:
            return []
        own = set(self._made(self.parts[number].before))
        made = {t for each in self.parts for t in self._made(each.before)} - own
        return [t for t in self._read(self.parts[number].sliced) if t in made and self._enters(t)]

    def _whole(
        self, number: int, ops: Sequence[int], kind: Kind, which: int, leaves: Sequence[int],
        relayed: Sequence[int] = (),
    ) -> Part:  # fmt: skip
        """The part of ops that run once, on whole tensors, and of what it relays to the unit's slices."""
        lowering = self._lowering(number, self.traces.whole, f"unit {number} {kind} slices")
        entering = list(dict.fromkeys([*self._entering(number, ops), *map(Piece, relayed)]))
        inputs = {piece: lowering.source.input() for piece in entering}
        held = self._held(lowering, ops)
        for piece, var in inputs.items():
            self._enter(lowering, number, piece, var)
        self._lower(lowering, ops)
        self._require_causal(lowering, {t: lowering.at[t] for t in leaves})
        given = [leaf for t in leaves for leaf in self._leaving(lowering, number, t, ops)]
        for t in relayed:
            own = lowering.source.call(_own, lowering.at[t])
            given.append((Piece(t, unit=number), own, lowering.place[t]))
        return self._part(lowering, number, which, kind, entering, held, given)

    # -- values between parts -------------------------------------------------------------------------------------

    def _entering(self, number: int, ops: Sequence[int], which: int | None = None) -> list[Piece]:
        """What ops of a unit read and others make: in slices, for those of a slice, where slices make it."""
        sliced = self._in_slices if which is not None else set()
        relayed = set(self._relayed(number)) if which is not None else set()
        apart = {t for t in self._read(ops) if t in relayed or self._lies_otherwise_inside(number, t)}
        return [
            Piece(t, which if t in sliced else None, unit=number if t in apart else None)
            for t in self._read(ops)
            if self._enters(t)
        ]

    def _lies_otherwise_inside(self, number: int, tensor: int) -> bool:
        """Whether a unit hands a tensor on in another layout than its own ops have it in."""
        leaves = self.layouts[number].leaves
        return tensor in leaves and not leaves[tensor][1].is_idle

    def _enter(self, lowering: Lowering, number: int, piece: Piece, var: Var) -> None:
        """Note a value that comes into a part: one that the same unit made is as its parts share it by now."""
        unit = self.layouts[number].unit
        maker = self._graph.producer.get(piece.tensor)
        if maker is not None and unit.first_op <= maker < unit.end_op:
            lowering.at[piece.tensor], lowering.place[piece.tensor] = var, self._inside(number, piece.tensor)
        else:
            lowering.made(piece.tensor, var, self.layouts[number].enters.get(piece.tensor, R))

    def _inside(self, number: int, tensor: int) -> Placement:
        """The placement in which the ops of a unit find a tensor that it makes."""
        layout = self.layouts[number]
        if tensor in layout.shared:
            return layout.shared[tensor].value[1]
        maker = self._graph.producer[tensor]
        outputs: tuple[Placement, ...] = layout.ops[maker - layout.unit.first_op].signature.outputs
        return outputs[self._graph.ops[maker].outputs.index(tensor)]

    def _leaving(
        self, lowering: Lowering, number: int, tensor: int, ops: Sequence[int], which: int | None = None
    ) -> Leaving:
        """A tensor that a part makes as other parts of the unit want it, as other units do, or as both do."""
        found: Leaving = []
        inside, differs = self._inside(number, tensor), self._lies_otherwise_inside(number, tensor)
        unit = self.layouts[number].unit
        readers = self._readers.get(tensor, set()) - set(ops)
        elsewhere = tensor in self.wanted or any(not unit.first_op <= op < unit.end_op for op in readers)
        if differs and any(unit.first_op <= op < unit.end_op for op in readers):
            own = lowering.source.call(_own, lowering.at[tensor])
            found.append((Piece(tensor, which, unit=number), own, inside))
        leaves = lowering.layout.leaves
        if elsewhere and tensor in leaves:
            place, hop = leaves[tensor]
            found.append((Piece(tensor, which), leave(lowering, tensor, hop), place))
        elif (elsewhere or readers) and not differs:
            found.append((Piece(tensor, which), lowering.source.call(_own, lowering.at[tensor]), inside))
        return found

    def require_whole_sequences(self) -> None:
        """Raise NotReplayableError where the tensor axis divides what slices are cut along."""
        ops, graph = self.traces.ops, self._graph
        dims, keys = {**ops.constants, **ops.dims}, {**ops.key_constants, **ops.keys}
        masks = set(ops.masks.values())
        for layout, parts in zip(self.layouts, self.parts, strict=True):
            lies = [*layout.enters.items(), *((t, hop.value[1]) for t, hop in layout.shared.items())]
            lies += [(t, place) for t, (place, _) in layout.leaves.items()]
            for op in (*parts.before, *parts.sliced):
                signature = layout.ops[op - layout.unit.first_op].signature
                lies += zip(graph.ops[op].inputs, signature.inputs, strict=True)
                lies += zip(graph.ops[op].outputs, signature.outputs, strict=True)
            for tensor, place in lies:
                if not isinstance(place, Split):
                    continue
                rank = len(graph.tensors[tensor].fixed)
                in_mask = tensor in masks and place.dim >= rank - 2
                if place.dim in (dims.get(tensor), keys.get(tensor)) or in_mask:
                    raise NotReplayableError(
                        "the plan divides its sequences over the tensor axis: plan with sequence_parallel=False"
                    )

    # -- what they share ------------------------------------------------------------------------------------------

    def _lowering(self, number: int, traced: Traced, name: str) -> Lowering:
        return Lowering(
            traced, self.layouts[number], self.axis, self.traces.batch, f"{self.prefix}{name}", self.device, self.seed,
            self.summed,
        )  # fmt: skip

    def _part(
        self, lowering: Lowering, unit: int, which: int, kind: Kind, entering: Sequence[Piece], held: Sequence[int],
        leaves: Leaving,
    ) -> Part:  # fmt: skip
        function = lowering.source.build(lowering.name, [var for _, var, _ in leaves])
        return Part(
            lowering.name, unit, which, kind, function, tuple(entering), tuple(held),
            tuple((piece, place) for piece, _, place in leaves), tuple(lowering.draws),
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

    @property
    def _graph(self) -> Graph:
        return self.traces.whole.graph

    def _enters(self, tensor: int) -> bool:
        return self._graph.tensors[tensor].role in ("activation", "input")

    def _made(self, ops: Sequence[int]) -> list[int]:
        return [t for op in ops for t in self._graph.ops[op].outputs]

    def _read(self, ops: Sequence[int]) -> list[int]:
        """The tensors that ops read and do not make, in order."""
        made = set(self._made(ops))
        return list(dict.fromkeys(t for op in ops for t in self._graph.ops[op].inputs if t not in made))

    @cached_property
    def _readers(self) -> dict[int, set[int]]:
        """Tensor → the ops that read it."""
        found: dict[int, set[int]] = {}
        for number, op in enumerate(self._graph.ops):
            for tensor in op.inputs:
                found.setdefault(tensor, set()).add(number)
        return found

    @cached_property
    def _in_slices(self) -> set[int]:
        """The tensors that slices make."""
        return set(self._made([op for parts in self.parts for op in parts.sliced]))

    def _require_causal(self, lowering: Lowering, found: Mapping[int, Var]) -> None:
        """Look at the values of masks, at every microbatch."""
        ops, seen = self.traces.ops, set[tuple[int, str]]()
        for op, mask in (*ops.masks.items(), *ops.hides.items()):
            name = self._graph.ops[op].base_name
            if mask not in found or (mask, name) in seen:
                continue
            seen.add((mask, name))
            where = self._graph.calls[self._graph.ops[op].call].path or self._graph.model_name
            if op in ops.masks:
                lowering.source.call(slice_ops.require_causal, found[mask], where, is_kept=True)
            else:
                dims = ops.constants[mask], ops.key_constants[mask]
                lowering.source.call(slice_ops.require_hides, found[mask], *dims, name, where, is_kept=True)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a tensor object of its own."""
    return tensor.view_as(tensor)
