"""The values that units hold, read and hand on: which share memory, and through which gradients flow."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from shardwright.core.cost.saved_activations import Kept, aliases
from shardwright.core.model.fold import Unit
from shardwright.core.model.graph import Graph


@dataclass(frozen=True, slots=True)
class SharedValue:
    """A value that several units hold. Units on one rank share its memory."""

    tensor: int
    keepers: tuple[int, ...]
    """The units whose backward passes read it."""
    enterers: tuple[int, ...]
    """The units that it enters, which hold it when they are recomputed."""
    maker: int = -1
    """The unit that makes it; -1: none does."""


class ValueFlow:
    """The values of one graph: aliases and users of tensors, and what the backward passes of units read of them."""

    def __init__(self, graph: Graph, apart: Collection[int] = ()) -> None:
        self.graph = graph
        self._alias = aliases(graph)
        self._parameters = {p.tensor: p.trainable for p in graph.parameters}
        self._users: dict[int, list[int]] = {}
        for index, op in enumerate(graph.ops):
            for tensor in op.inputs:
                self._users.setdefault(tensor, []).append(index)
        self._needs_gradient = self._gradient_flow()
        self.kept = Kept(graph, self._alias, self._needs_gradient, apart)

    def _gradient_flow(self) -> set[int]:
        """The tensors through which a gradient reaches a trainable parameter, or an activation that enters the
        graph."""
        needing = {t for t, trainable in self._parameters.items() if trainable}
        needing.update(t for t in self.graph.inputs if self.graph.tensors[t].role == "activation")
        for op in self.graph.ops:
            if any(t in needing for t in op.inputs):
                needing.update(t for t in op.outputs if self.graph.tensors[t].carries_gradients)
        return needing

    def needs_gradient(self, tensor: int) -> bool:
        """Whether a gradient flows through the tensor, to a trainable parameter or an activation that enters the
        graph."""
        return tensor in self._needs_gradient

    def memory_of(self, tensor: int) -> int:
        """The tensor whose memory this one shares; itself where it is no view."""
        return self._alias.get(tensor, tensor)

    def entering(self, unit: Unit, made_here: Collection[int]) -> Iterator[int]:
        """The activations that come from earlier units and through which a gradient flows."""
        for op in self.graph.ops[unit.first_op : unit.end_op]:
            for t in op.inputs:
                if t not in made_here and t in self._needs_gradient and t not in self._parameters:
                    yield t

    def shared(self, units: Sequence[Unit], *, fuses_dropout: bool = True) -> tuple[SharedValue, ...]:
        """The values that several units hold for their backward passes, those kept whole and those that enter; and
        those that enter a unit which does not keep them. The latter stay where they come from another rank.
        ``fuses_dropout``: whether attention with dropout is a kernel of its own, which keeps its operands."""
        kept_by = self.kept.by if fuses_dropout else self.kept.by_unfused
        keepers: dict[int, dict[int, None]] = {}
        enterers: dict[int, dict[int, None]] = {}
        for unit in units:
            ops = range(unit.first_op, unit.end_op)
            made_here = {t for i in ops for t in self.graph.ops[i].outputs}
            for index in ops:
                for root in kept_by(self.graph.ops[index]):
                    keepers.setdefault(root, {})[unit.index] = None
            for tensor in self.entering(unit, made_here):
                enterers.setdefault(self.memory_of(tensor), {})[unit.index] = None
        unit_of = {index: unit.index for unit in units for index in range(unit.first_op, unit.end_op)}
        found = []
        for root in sorted(keepers.keys() | enterers.keys()):
            kept, entered = keepers.get(root, {}), enterers.get(root, {})
            if len(kept.keys() | entered.keys()) > 1 or not entered.keys() <= kept.keys():
                made = self.graph.producer.get(root)
                maker = -1 if made is None else unit_of[made]
                found.append(SharedValue(root, tuple(kept), tuple(entered), maker))
        return tuple(found)

    def passing_by(self, units: Sequence[Unit]) -> tuple[tuple[int, ...], ...]:
        """The values, for each unit, that are made before it and read after it, and whose gradients wait while its
        backward runs. A part of a concatenation stands for the whole, as its gradient is a part of that of the
        whole."""
        unit_of = {index: unit.index for unit in units for index in range(unit.first_op, unit.end_op)}
        waiting: list[set[int]] = [set() for _ in units]
        for tensor in self._needs_gradient - self._parameters.keys():
            readers, made = self._users.get(tensor, []), self.graph.producer.get(tensor)
            if not readers or made is None:
                continue
            last = self.graph.ops[max(readers)]
            held = last.outputs[0] if last.kind == "concat" else self.memory_of(tensor)
            for unit in range(unit_of[made] + 1, unit_of[max(readers)]):
                waiting[unit].add(held)
        return tuple(tuple(sorted(values)) for values in waiting)

    def batch_readers(self, units: Sequence[Unit]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Every tensor of the batch, and the units that read it."""
        unit_of = {index: unit.index for unit in units for index in range(unit.first_op, unit.end_op)}
        return tuple(
            (tensor, tuple(sorted({unit_of[user] for user in self._users.get(tensor, ())})))
            for tensor in self.graph.inputs
            if self.graph.tensors[tensor].role == "input"
        )

    def buffer_users(self, units: Sequence[Unit]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Every buffer of the model, and the units on whose ranks it lies: those that read it or call the module that
        holds it. Where ranks run modules, a buffer that no called module holds lies on all of them."""
        runs_modules = not self.graph.capabilities.single_controller
        unit_of = {index: unit.index for unit in units for index in range(unit.first_op, unit.end_op)}
        found = []
        for tensor, value in enumerate(self.graph.tensors):
            if value.role != "buffer":
                continue
            readers = {unit_of[user] for user in self._users.get(tensor, ())}
            holding = {u.index for u in units for c in u.calls if not c.path or value.name.startswith(f"{c.path}.")}
            if runs_modules and not holding:
                holding = {unit.index for unit in units}
            users = readers | holding if runs_modules else readers or holding
            found.append((tensor, tuple(sorted(users))))
        return tuple(found)

    def batch_statistics_bytes(self, unit: Unit) -> int:
        """Bytes of the mean and variance in fp64 of what the unit's ops norm by the batch: those known before a
        step."""
        found = 0
        for op in self.graph.ops[unit.first_op : unit.end_op]:
            if op.kind == "normalization":
                out = self.graph.tensors[op.outputs[0]]
                dims = list(zip(out.shape(1), out.per_sample, op.output_labels[0], strict=True))
                if any(each and op.role(label) == "statistic" for _, each, label in dims):
                    found += 2 * 8 * math.prod(size for size, _, label in dims if op.role(label) != "statistic")
        return found
