"""A call of one unit that is to run on local tensors, and the state that all calls of the unit share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.backends.torch.capture.op_schemas import by_name
from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.machine.tensor_shards import local_shape
from shardwright.backends.torch.program.program import Context
from shardwright.backends.torch.tensor_parallel.collectives import convert
from shardwright.backends.torch.tensor_parallel.generated_source import Source, Var
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, Site, Slot, Traced
from shardwright.backends.torch.tensor_parallel.unit_layouts import Hop, OpLayout, UnitLayout
from shardwright.core.layout.placements import Partial, Placement, Replicate, Split
from shardwright.core.model.graph import Op
from shardwright.core.solver.unit_problem import dual

R, P = Replicate(), Partial("sum")


@dataclass(slots=True)
class Lowering:
    """The state that the calls of one unit share."""

    traced: Traced
    layout: UnitLayout
    axis: Axis
    batch: int
    name: str
    device: torch.device
    seed: Callable[[Context], None]
    summed: frozenset[int]
    """Parameters whose gradients are terms of a sum, on every reader."""
    fp8: frozenset[int] = frozenset()
    """Weights whose products are computed in fp8."""
    source: Source = field(default_factory=Source)
    at: dict[int, Var] = field(default_factory=dict)
    """Graph tensor → the variable where its readers find it."""
    place: dict[int, Placement] = field(default_factory=dict)
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

    def resolved(self, value: Any, slots: Mapping[int, Var] | None = None) -> Any:
        """Arguments with sizes at this batch, this run's device and, where they are given, values in place of slots."""
        if isinstance(value, Slot):
            return value if slots is None else slots[value.index]
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return [self.resolved(v, slots) for v in value]
        if isinstance(value, torch.device):
            return self.device
        return value.at(self.batch) if hasattr(value, "per_sample") else value

    def seeded(self, site: Site) -> None:
        """Seed the generator, before a random number is drawn, as the unsplit model has it there."""
        if site.context not in self.draws:
            self.draws[site.context] = None
            self.source.call(self.seed, site.context, is_kept=True)

    # -- values ---------------------------------------------------------------------------------------------------

    def hop(self, var: Var, hop: Hop) -> Var:
        if hop.is_idle:
            return var
        return self.source.call(convert, var, self.axis, hop.value, hop.gradient, self.name)

    def operand(self, tensor: int, hop: Hop) -> Var:
        """An input of an op, in the placement that the op wants."""
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
        """Note that a value was made. Its readers find it after the conversion that they share."""
        shared = self.layout.shared.get(tensor)
        if shared is not None:
            self.at[tensor], self.place[tensor] = self.hop(var, shared), shared.value[1]
        else:
            self.at[tensor], self.place[tensor] = var, place


@dataclass(slots=True)
class Call:
    """A call to be lowered: its pieces, each with its layout."""

    lowering: Lowering
    site: Site
    pieces: list[tuple[Op, OpLayout]]

    @property
    def numbers(self) -> list[int]:
        """The numbers of these pieces in the template."""
        return [p for p, op in enumerate(self.site.ops) if op is not None]

    @property
    def is_flat_product(self) -> bool:
        """Whether this is a product over flattened leading dims that the graph has unflattened."""
        op = self.pieces[0][0]
        piece = self.site.template.pieces[self.numbers[0]]
        return op.kind == "contraction" and len(op.labels[0]) != len(piece.labelled.labels[0])

    @property
    def is_replicated(self) -> bool:
        """Whether every rank does the whole call, on whole tensors."""
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
        together, whatever the piece wants."""
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
                    var = self.lowering.hop(var, self._to_whole(layout, position))
                found[slot] = self.detached(slot, var)
        for slot in range(self.site.template.inputs):
            if slot not in found:
                found[slot] = self._unlabelled(slot)
        return found

    def _to_whole(self, layout: OpLayout, position: int) -> Hop:
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
        if lowering.traced.graph.tensors[tensor].carries_gradients and lowering.place[tensor] != R:
            raise NotReplayableError(f"{self.site.name} reads a split tensor that the captured graph does not follow")
        return lowering.hop(lowering.at[tensor], Hop((lowering.place[tensor], R), None))

    def give(self, which: int, position: int, var: Var, *, whole: bool = False) -> None:
        """Give an output of a piece, in the placement of its layout; ``whole``: the output is whole, and is cut."""
        op, layout = self.pieces[which]
        tensor, place = op.outputs[position], layout.signature.outputs[position]
        if not self.site.grad:
            var = self.lowering.source.call(torch.Tensor.detach, var)
        if whole and place != R:
            flows = self.lowering.traced.graph.tensors[tensor].carries_gradients
            var = self.lowering.hop(var, Hop((R, place), (dual(place), R) if flows else None))
        self.lowering.made(tensor, var, place)

    def give_all(self, result: Var, *, whole: bool = False) -> None:
        """Give the outputs of the whole call, as the op itself returns them."""
        template = self.site.template
        first = template.inputs
        for which, number in enumerate(self.numbers):
            for position, slot in enumerate(template.pieces[number].outputs):
                output = slot - first
                if 0 <= output < len(template.outputs):
                    is_one = len(template.outputs) == 1 and not returns_sequence(self.site)
                    var = result if is_one else self.lowering.source.item(result, output)
                    self.give(which, position, var, whole=whole)

    def arguments(self, slots: Mapping[int, Var]) -> tuple[list[Any], dict[str, Any]]:
        resolved = self.lowering.resolved
        return (
            [resolved(a, slots) for a in self.site.arguments],
            {k: resolved(v, slots) for k, v in self.site.keywords},
        )

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by the schema's name, with sizes at this batch; tensors are left as slots."""
        given = by_name(self.site.function._schema, self.site.arguments, dict(self.site.keywords))
        return self.lowering.resolved(given[name]) if name in given else default

    def split_of(self, which: int, position: int, *, output: bool = False) -> Split | None:
        signature = self.pieces[which][1].signature
        place = signature.outputs[position] if output else signature.inputs[position]
        return place if isinstance(place, Split) else None


def returns_sequence(site: Site) -> bool:
    """Whether the op returns several tensors, or a list."""
    returns = site.function._schema.returns
    return len(returns) != 1 or str(returns[0].type).startswith("List")
