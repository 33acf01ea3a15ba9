"""The prices of the solver: seconds of an op by the placements of its operands, seconds of a conversion, bytes held."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.core.cost.op_kinds import PRODUCT_KINDS
from shardwright.core.cost.saved_activations import Kept
from shardwright.core.cost.unit_work import WorkCounter, contraction_flops
from shardwright.core.layout.conversion_bytes import table_bytes
from shardwright.core.layout.placements import Partial, Replicate, Split
from shardwright.core.layout.signature import Signature
from shardwright.core.layout.unit_layouts import Places, steps
from shardwright.core.model.graph import Graph, Op

State = tuple[Places, Places]
"""The placements of a value, and those of its gradient."""


@dataclass(frozen=True, slots=True)
class AxisCost:
    """A tensor-like axis: its size, and the cost of a byte and a message on it."""

    name: str
    size: int
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    splits_batch: bool = False
    """Whether the axis may split the batch dim; tensor axes leave it to the data-parallel ones."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The facts about devices and the step that the solver is given."""

    axes: tuple[AxisCost, ...]
    flops_per_s: float
    memory_bytes_per_s: float
    batch: int = 1
    precision: str = "bf16"
    state_bytes_per_element: float = 16.0
    """The bytes of one entry's parameter, gradient and optimizer state."""
    microbatches: int = 1
    """The number of microbatches for which gradients of parameters are reduced once."""
    free_activations: bool = True
    """Whether values may be split along dims that no parameter has, such as the sequence. Without it a unit is split
    along the dims of its parameters that do not leave it: Megatron's first form (arXiv 1909.08053)."""
    split_borders: bool = False
    """Whether values that units hand on must be split along the sequence where it divides (arXiv 2205.05198)."""


class Prices:
    """The prices of the ops of one unit."""

    def __init__(
        self, graph: Graph, counter: WorkCounter, ops: Sequence[Op], setting: Setting, kept: Kept, parameters: set[int]
    ) -> None:
        self.graph, self.counter, self.ops, self.setting = graph, counter, ops, setting
        self.shape = {t: graph.tensors[t].shape(setting.batch) for op in ops for t in (*op.inputs, *op.outputs)}
        self._kept, self._parameters = kept, parameters
        self._sizes = tuple(axis.size for axis in setting.axes)
        self._bytes: dict[int, float] = {}
        self._conversions: dict[tuple[int, Places, Places, bool], float] = {}

    def flows(self, tensor: int) -> bool:
        return self.counter.needs_gradient(tensor) and self.graph.tensors[tensor].carries_gradients

    def local(self, tensor: int, places: Places) -> float:
        """The bytes of a rank's shard."""
        size = self._bytes.get(tensor)
        if size is None:
            size = float(self.counter.size_bytes(tensor, self.setting.batch, self.setting.precision))
            self._bytes[tensor] = size
        for place, ranks in zip(places, self._sizes, strict=True):
            if isinstance(place, Split):
                size /= ranks
        return size

    def state_bytes(self, tensor: int, places: Places) -> float:
        """The bytes of a parameter with its gradient and optimizer state."""
        whole = self.local(tensor, (Replicate(),) * len(self._sizes))
        entries = self.graph.tensors[tensor].elements(1) * self.setting.state_bytes_per_element
        return entries * self.local(tensor, places) / whole if whole else 0.0

    def seconds(self, op: Op, chosen: tuple[Signature, ...]) -> float:
        """The forward and backward seconds of an op on the shards of one rank."""
        tensors = (*op.inputs, *op.outputs)
        if op.kind in ("view", "create"):
            return 0.0
        share = 1
        for signature, axis in zip(chosen, self.setting.axes, strict=True):
            if any(isinstance(p, Split) for p in (*signature.inputs, *signature.outputs)):
                share *= axis.size
        moved = sum(self.local(t, operand(chosen, i)) for i, t in enumerate(tensors))
        if op.kind == "gather":  # a lookup reads only the rows that it returns
            moved -= self.local(op.inputs[0], operand(chosen, 0))
        trained = sum(self.flows(t) for t in op.inputs)
        seconds = moved / self.setting.memory_bytes_per_s * (3 if trained else 1)
        if op.kind in PRODUCT_KINDS:
            flops = contraction_flops(self.graph, op, self.setting.batch) / share
            again = 2.5 if op.kind == "attention" and trained else float(trained)
            seconds = max(flops / self.setting.flops_per_s * (1 + again), seconds)
        for signature, axis in zip(chosen, self.setting.axes, strict=True):
            if signature.need == "combine":  # two small reductions forward, one backward
                whole = next((p.dim for p in signature.inputs if isinstance(p, Split)), 0)
                rows = self.local(op.inputs[0], operand(chosen, 0)) * axis.size / self.shape[op.inputs[0]][whole]
                hops = 2 * (axis.size - 1)
                seconds += 3 * hops * (axis.latency_s + rows / axis.size / axis.bandwidth_bytes_per_s)
        return seconds

    def kept_bytes(self, op: Op, chosen: tuple[Signature, ...]) -> float:
        """The bytes of the op's results that some backward needs. They are counted once where they are made, because
        counting at each reader would count them several times."""
        if op.kind in ("view", "create") or not any(self.flows(t) for t in op.inputs):
            return 0.0
        size = 0.0
        for i, tensor in enumerate(op.outputs):
            if tensor in self._read_in_backward:
                size += self.local(tensor, operand(chosen, len(op.inputs) + i))
        return size

    @cached_property
    def _read_in_backward(self) -> set[int]:
        return {t for op in self.ops for t in self._kept.by(op)}

    def conversion_s(self, tensor: int, before: Places, after: Places, *, bucketed: bool = False) -> float:
        """Seconds to convert, axis after axis, the part of the tensor that the other axes leave. ``bucketed``
        conversions share one message with many others and pay no latency of their own."""
        if before == after:
            return 0.0
        key = (tensor, before, after, bucketed)
        found = self._conversions.get(key)
        if found is None:
            found = self._conversions[key] = self._conversion_s(tensor, before, after, bucketed=bucketed)
        return found

    def _conversion_s(self, tensor: int, before: Places, after: Places, *, bucketed: bool) -> float:
        total = 0.0
        for step in steps(before, after):
            axis = self.setting.axes[step.axis]
            moved = table_bytes(step.before, step.after, axis.size, self.local(tensor, step.others)) / axis.size
            if moved:
                is_twice = isinstance(step.before, Partial) and isinstance(step.after, Replicate)
                hops = (axis.size - 1) * (2 if is_twice else 1)
                total += (0.0 if bucketed else hops * axis.latency_s) + moved / axis.bandwidth_bytes_per_s
        return total

    def edge_s(self, tensor: int, given: State, wanted: State, flows: bool) -> float:
        """Seconds to hand a value on, and its gradient back."""
        if tensor in self._parameters:
            return self._parameter_s(tensor, given, wanted, flows)
        ahead = self.conversion_s(tensor, given[0], wanted[0])
        return ahead + (self.conversion_s(tensor, wanted[1], given[1]) if flows else 0.0)

    def _parameter_s(self, tensor: int, held: State, used: State, flows: bool) -> float:
        """Seconds to use a parameter. It is used as it is held: gathering parameters is a sharding policy, not a tensor
        layout. Its gradient is reduced once a step."""
        for place, use in zip(held[0], used[0], strict=True):
            if place != use and not (isinstance(place, Replicate) and isinstance(use, Split)):
                return float("inf")
        if not flows:
            return 0.0
        return self.conversion_s(tensor, used[1], held[1], bucketed=True) / self.setting.microbatches


def operand(chosen: tuple[Signature, ...], i: int) -> Places:
    """The placements of operand ``i``, inputs first and then outputs."""
    return tuple((*s.inputs, *s.outputs)[i] for s in chosen)
