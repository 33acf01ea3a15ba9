"""One unit's ops as a function of local tensors, with the collectives that the solver chose between them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.backends.torch.program import Context
from shardwright.backends.torch.tensor_parallel import compute as compute
from shardwright.backends.torch.tensor_parallel import local
from shardwright.backends.torch.tensor_parallel import views as views
from shardwright.backends.torch.tensor_parallel.collectives import Axis, convert
from shardwright.backends.torch.tensor_parallel.layouts import Hop, OpLayout, UnitLayout
from shardwright.backends.torch.tensor_parallel.pieces import local_shape
from shardwright.backends.torch.tensor_parallel.source import Source, Var
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, Site, Slot, Traced
from shardwright.core.graph import Op
from shardwright.core.layout import Partial, Placement, Replicate, Split
from shardwright.core.solver.problem import dual

R, P = Replicate(), Partial("sum")


@dataclass(frozen=True, slots=True)
class Lowered:
    """A unit ready to run: ``function(*entering, *held)`` gives the tensors in ``leaves``."""

    name: str
    function: Callable[..., tuple[Any, ...]]
    text: str
    entering: tuple[int, ...]
    """Graph tensors that earlier units made, or inputs of the model, in order."""
    held: tuple[int, ...]
    """Graph tensors that the model holds: parameters, buffers, constants."""
    leaves: tuple[int, ...]
    draws: tuple[Context, ...]
    whole_ops: tuple[str, ...]
    """Names of ops that run whole although the layouts split them: no piecewise form is known here."""


@dataclass(slots=True)
class Lowering:
    """What the lowering of one unit shares."""

    traced: Traced
    layout: UnitLayout
    axis: Axis
    batch: int
    name: str
    device: torch.device
    seed: Callable[[Context], None]
    summed: frozenset[int]
    """Parameters whose gradients are terms of a sum, on every reader."""
    source: Source = field(default_factory=Source)
    at: dict[int, Var] = field(default_factory=dict)
    """Graph tensor → where its readers find it."""
    place: dict[int, Placement] = field(default_factory=dict)
    source_of: dict[int, Var] = field(default_factory=dict)
    """Graph tensor → the argument of the function, for those that come from outside."""
    draws: dict[Context, None] = field(default_factory=dict)
    whole_ops: list[str] = field(default_factory=list)

    # -- what the rules of ops ask --------------------------------------------------------------------------------

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.traced.graph.tensors[tensor].shape(self.batch)

    def local(self, tensor: int, place: Placement) -> tuple[int, ...]:
        return local_shape(self.shape(tensor), place, self.axis.size)

    def dtype(self, tensor: int) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.traced.graph.tensors[tensor].dtype)
        return found

    def resolved(self, value: Any, slots: Mapping[int, Var]) -> Any:
        """Arguments with values in place of slots, sizes at this batch, this run's device."""
        if isinstance(value, Slot):
            return slots[value.index]
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return [self.resolved(v, slots) for v in value]
        if isinstance(value, torch.device):
            return self.device
        return value.at(self.batch) if hasattr(value, "per_sample") else value

    def seeded(self, site: Site) -> None:
        """Before a random number is drawn: the generator as the unsplit model has it there."""
        if site.context not in self.draws:
            self.draws[site.context] = None
            self.source.call(self.seed, site.context, is_kept=True)

    # -- values ---------------------------------------------------------------------------------------------------

    def hop(self, var: Var, hop: Hop, *, fresh: bool = False) -> Var:
        if hop.is_idle:
            return var
        return self.source.call(convert, var, self.axis, hop.value, hop.gradient, self.name, fresh)

    def operand(self, tensor: int, hop: Hop) -> Var:
        """An input of an op, where the op wants it."""
        if tensor not in self.layout.parameters:
            return self.hop(self.at[tensor], hop)
        if hop.gradient is None:
            return self.hop(self.at[tensor], hop)
        before, after = hop.value
        gradient = hop.gradient[0]
        if before != after:  # held whole, used in pieces: each piece's gradient is a term of the whole one
            return self.hop(self.at[tensor], Hop(hop.value, (gradient, P)))
        if tensor in self.summed and isinstance(gradient, Replicate):
            return self.hop(self.at[tensor], Hop(hop.value, (R, P)))
        return self.at[tensor]

    def made(self, tensor: int, var: Var, place: Placement) -> None:
        """A value was made; its readers find it after the conversion that they share."""
        shared = self.layout.shared.get(tensor)
        if shared is not None:
            self.at[tensor], self.place[tensor] = self.hop(var, shared), shared.value[1]
        else:
            self.at[tensor], self.place[tensor] = var, place

    # -- the unit -------------------------------------------------------------------------------------------------

    def run(self) -> Lowered:
        unit, graph = self.layout.unit, self.traced.graph
        inside = range(unit.first_op, unit.end_op)
        made = {t for i in inside for t in graph.ops[i].outputs}
        read: dict[int, None] = {}
        for i in inside:
            read.update((t, None) for t in graph.ops[i].inputs if t not in made)
        for i in sorted({self.traced.site_of_op[i][0] for i in inside}):
            named = [t for t in self.traced.sites[i].inputs if t is not None and t not in made]
            read.update((t, None) for t in named if graph.tensors[t].role not in ("activation", "input"))
        written = {now: buffer for buffer, now in self.traced.written.items() if now in made}
        read.update((buffer, None) for buffer in written.values())
        roles = {t: graph.tensors[t].role for t in read}
        entering = tuple(t for t in read if roles[t] in ("activation", "input"))
        held = tuple(t for t in read if t not in entering)
        for tensor in (*entering, *held):
            place = self.layout.parameters.get(tensor, self.layout.enters.get(tensor, R))
            self.source_of[tensor] = self.source.input()
            self.made(tensor, self.source_of[tensor], place)
        for i in inside:
            if i >= self._next:
                self._site(i)
        for now, buffer in written.items():
            value = self.hop(self.at[now], Hop((self.place[now], R), None))
            self.source.call(_write, self.source_of[buffer], value, is_kept=True)
        leaves = tuple(self.layout.leaves)
        outputs = [self._leave(t, self.layout.leaves[t][1]) for t in leaves]
        return Lowered(
            self.name, self.source.build(self.name, outputs), self.source.text(self.name, outputs), entering, held,
            leaves, tuple(self.draws), tuple(self.whole_ops),
        )  # fmt: skip

    _next: int = 0

    def _leave(self, tensor: int, hop: Hop) -> Var:
        """A value as later units find it, a tensor of its own."""
        return self.source.call(_own, self.hop(self.at[tensor], hop))

    def _site(self, first: int) -> None:
        """Lower the call behind an op, and with it as many ops as it became."""
        graph, unit = self.traced.graph, self.layout.unit
        index, piece = self.traced.site_of_op[first]
        site = self.traced.sites[index]
        present = [op for op in site.ops if op is not None]
        is_whole = piece == min(p for p, op in enumerate(site.ops) if op is not None) and all(
            unit.first_op <= op < unit.end_op for op in present
        )
        if not is_whole:
            raise NotReplayableError(f"the ops of {site.name} lie in two units")
        call = Call(self, site, [(graph.ops[op], self.layout.ops[op - unit.first_op]) for op in present])
        self._next = max(present) + 1
        if local.lower(call):
            return
        self.whole_ops.append(site.name)
        local.run_whole(call)


@dataclass(slots=True)
class Call:
    """A call to be lowered: its pieces, each with its layout."""

    lowering: Lowering
    site: Site
    pieces: list[tuple[Op, OpLayout]]

    @property
    def numbers(self) -> list[int]:
        """Which pieces of the template these are."""
        return [p for p, op in enumerate(self.site.ops) if op is not None]

    @property
    def is_flat_product(self) -> bool:
        """A product over flattened leading dims that the graph has unflattened."""
        op = self.pieces[0][0]
        piece = self.site.template.pieces[self.numbers[0]]
        return op.kind == "contraction" and len(op.labels[0]) != len(piece.labelled.labels[0])

    @property
    def is_replicated(self) -> bool:
        """Whether every rank does all of it, on whole tensors."""
        return (
            all(
                all(isinstance(p, Replicate) for p in (*layout.signature.inputs, *layout.signature.outputs))
                for _, layout in self.pieces
            )
            and not self.converts_between
        )

    @property
    def between(self) -> set[int]:
        """Tensors that one piece makes for another."""
        made: set[int] = set()
        read: set[int] = set()
        for op, _ in self.pieces:
            read |= made & set(op.inputs)
            made |= set(op.outputs)
        return read

    @property
    def converts_between(self) -> bool:
        """Whether a value is converted on its way from one piece to another."""
        between = self.between
        shared = self.lowering.layout.shared
        return any(t in shared and not shared[t].is_idle for t in between) or any(
            t in between and not hop.is_idle
            for op, layout in self.pieces
            for t, hop in zip(op.inputs, layout.inputs, strict=True)
        )

    def detached(self, slot: int | None, var: Var) -> Var:
        if slot is not None and slot < len(self.site.detached) and self.site.detached[slot]:
            return self.lowering.source.call(torch.Tensor.detach, var)
        return var

    def inputs(self, which: int) -> list[Var]:
        """The operands of one piece, converted as its layout says."""
        op, layout = self.pieces[which]
        slots = self.site.template.pieces[self.numbers[which]].inputs if not self.site.is_write else ()
        return [
            self.detached(slots[i] if i < len(slots) else None, self.lowering.operand(tensor, layout.inputs[i]))
            for i, tensor in enumerate(op.inputs)
        ]

    def slots(self, *, whole: bool = False) -> dict[int, Var]:
        """The tensors of the call by slot, converted as the first piece that reads each wants it; ``whole``: put
        together, whatever it wants."""
        found: dict[int, Var] = {}
        between = self.between
        for which, number in enumerate(self.numbers):
            op, layout = self.pieces[which]
            for position, slot in enumerate(self.site.template.pieces[number].inputs):
                tensor = op.inputs[position]
                if slot in found or tensor in between:
                    continue
                var = self.lowering.operand(tensor, layout.inputs[position])
                if whole:
                    var = self.lowering.hop(var, self._to_whole(tensor, layout, position))
                found[slot] = self.detached(slot, var)
        for slot in range(self.site.template.inputs):
            if slot not in found:
                found[slot] = self._unlabelled(slot)
        return found

    def _to_whole(self, tensor: int, layout: OpLayout, position: int) -> Hop:
        given = layout.signature.inputs[position]
        hop = layout.inputs[position]
        return Hop((given, R), None if hop.gradient is None else (R, hop.gradient[0]))

    def _unlabelled(self, slot: int) -> Var:
        """A tensor that the call reads and the graph does not follow, such as the borders of groups."""
        known = dict(self.site.constants)
        if slot in known:
            return self.lowering.source.constant(known[slot].to(self.lowering.device))
        tensor = self.site.inputs[slot]
        lowering = self.lowering
        if tensor is None or tensor not in lowering.at:
            raise NotReplayableError(f"{self.site.name} reads a tensor that the captured graph does not follow")
        if lowering.traced.graph.tensors[tensor].is_floating and lowering.place[tensor] != R:
            raise NotReplayableError(f"{self.site.name} reads a split tensor that the captured graph does not follow")
        return lowering.hop(lowering.at[tensor], Hop((lowering.place[tensor], R), None))

    def give(self, which: int, position: int, var: Var, *, whole: bool = False) -> None:
        """An output of a piece, which lies as its layout says; ``whole``: it is whole, and is cut."""
        op, layout = self.pieces[which]
        tensor, place = op.outputs[position], layout.signature.outputs[position]
        if not self.site.grad:
            var = self.lowering.source.call(torch.Tensor.detach, var)
        if whole and place != R:
            flows = self.lowering.traced.graph.tensors[tensor].is_floating
            var = self.lowering.hop(var, Hop((R, place), (dual(place), R) if flows else None))
        self.lowering.made(tensor, var, place)

    def give_all(self, result: Var, *, whole: bool = False) -> None:
        """The outputs of the whole call, as the op itself returns them."""
        template = self.site.template
        first = template.inputs
        for which, number in enumerate(self.numbers):
            for position, slot in enumerate(template.pieces[number].outputs):
                output = slot - first
                if 0 <= output < len(template.outputs):
                    is_one = len(template.outputs) == 1 and not local.returns_sequence(self.site)
                    var = result if is_one else self.lowering.source.item(result, output)
                    self.give(which, position, var, whole=whole)

    def arguments(self, slots: Mapping[int, Var]) -> tuple[list[Any], dict[str, Any]]:
        resolved = self.lowering.resolved
        return (
            [resolved(a, slots) for a in self.site.arguments],
            {k: resolved(v, slots) for k, v in self.site.keywords},
        )

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by the schema's name, sizes at this batch; tensors are left as slots."""
        for given, argument in zip(self.site.arguments, self.site.function._schema.arguments, strict=False):
            if argument.name == name:
                return self._plain(given)
        for key, value in self.site.keywords:
            if key == name:
                return self._plain(value)
        for argument in self.site.function._schema.arguments:
            if argument.name == name and argument.has_default_value():
                return argument.default_value
        return default

    def _plain(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return [self._plain(v) for v in value]
        return value.at(self.lowering.batch) if hasattr(value, "per_sample") else value

    def split_of(self, which: int, position: int, *, output: bool = False) -> Split | None:
        signature = self.pieces[which][1].signature
        place = signature.outputs[position] if output else signature.inputs[position]
        return place if isinstance(place, Split) else None


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a tensor object of its own."""
    return tensor.view_as(tensor)


def _write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Leave a value in a buffer of the model."""
    with torch.no_grad():
        buffer.copy_(value)


def summed_parameters(layouts: Sequence[UnitLayout], traced: Traced) -> frozenset[int]:
    """The parameters held whole whose gradient, on some reader, is a term of a sum."""
    found = set()
    for layout in layouts:
        ops = traced.graph.ops[layout.unit.first_op : layout.unit.end_op]
        for op, chosen in zip(ops, layout.ops, strict=True):
            for tensor, hop in zip(op.inputs, chosen.inputs, strict=True):
                if tensor in layout.parameters and hop.gradient is not None and hop.gradient[0] != hop.gradient[1]:
                    found.add(tensor)
    return frozenset(found)
