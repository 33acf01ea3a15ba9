"""What the units of a model cost in slices of its sequence, counted once for all choices of a search."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.cost.work import Product
from shardwright.core.model.graph import Graph, Op
from shardwright.core.slices.graph_of_slice import carried_bytes, graph_of_slice
from shardwright.core.slices.sequence_ops import SequenceOps, sequence_inputs, sequence_ops
from shardwright.core.slices.unit_parts import keep_together, require_sliceable, whole_calls
from shardwright.core.tables.cost_tables import CostTables, Place
from shardwright.core.values.found_once import found_once

Slice = tuple[int, int]
"""A slice: its length, and the tokens before it."""
Ways = Callable[[int, int], int]
"""The number of shards of an operand, by its op and its place among the inputs and then the outputs."""
REMEMBERED = 32
"""The number of slices whose ops are remembered; what units cost in them is remembered of all."""
BLOCK = 128
"""The queries that a kernel of causal attention takes at a time: keys behind all of them are passed over. Prior:
FlashAttention's blocks (arXiv 2307.08691, section 3.1)."""


@dataclass(frozen=True, slots=True)
class SliceWork:
    """The counts of one slice: its ops, their share of the sequence's tokens, and the cost of every unit, the last one
    without what runs behind all slices."""

    counter: WorkCounter
    share: float
    units: tuple[UnitCost, ...]

    @property
    def graph(self) -> Graph:
        """The graph of the slice's tokens (`graph_of_slice`)."""
        return self.counter.graph


@dataclass(frozen=True, slots=True)
class Behind:
    """What runs once behind the last slice, in bytes of one microbatch."""

    kept: int = 0
    forward: int = 0
    """What its forward holds beside what it keeps."""
    backward: int = 0
    """The same of its backward."""
    read: int = 0
    """What it reads of what slices make, and so what its gradients take."""


def _given(graph: Graph) -> list[int]:
    """The activations that no op of a graph makes: of a slice, the keys and values up to its end."""
    return [tensor for tensor in graph.inputs if graph.tensors[tensor].role == "activation"]


class _Skipping(WorkCounter):
    """A counter of attention by kernels that pass over what is hidden, where each token sees those before it."""

    def __init__(self, graph: Graph, causal: Collection[int], apart: Collection[int] = ()) -> None:
        super().__init__(graph, apart)
        self._causal = {id(graph.ops[number]) for number in causal}

    def product(self, op: Op, batch: int, ways: Mapping[int, int], size_bytes: int) -> Product:
        made = super().product(op, batch, ways, size_bytes)
        if id(op) not in self._causal:
            return made
        query = self.graph.tensors[op.inputs[0]].fixed
        tokens = max(1, query[-2])
        return replace(made, flops=round(made.flops * min(1.0, (1 + BLOCK / tokens) / 2)))


class SliceCounts:
    """The costs of units in slices, by the kinds of their ops, and in whole sequences by the same count.

    Raises PlanError for a model without a sequence, CaptureError for one that cannot run in slices.
    """

    def __init__(self, tables: CostTables) -> None:
        self.tables, graph = tables, tables.graph
        dims = sequence_inputs(graph)
        self.ops: SequenceOps = keep_together(graph, sequence_ops(graph, dims), whole_calls(graph))
        require_sliceable(graph, self.ops)
        tensor, dim = next(iter(dims.items()))
        self.tokens = graph.tensors[tensor].fixed[dim]
        last = tables.folded.units[-1]
        behind = [op for op, need in enumerate(self.ops.needs) if need == "all" and op >= last.first_op]
        self._tail = min(behind, default=last.end_op)
        """The first op of the last unit that runs behind the last slice."""
        self._counters: OrderedDict[tuple[Slice | None, bool], WorkCounter] = OrderedDict()
        self._known: dict[object, UnitCost] = {}

    def unit(
        self,
        number: int,
        of: Slice | None,
        tp: int,
        microbatch: int,
        place: Place,
        *,
        with_tail: bool,
        alone: bool = False,
    ) -> UnitCost:
        """The cost of a unit in a slice, or in whole sequences (None). ``with_tail``: with what needs all tokens, which
        runs behind the last slice. ``alone``: as in `counter`."""
        unit = self.tables.folded.units[number]
        is_cut = number == len(self.tables.folded.units) - 1 and not with_tail
        key = self.tables.variants(tp)[number], is_cut, of, tp, microbatch, place, alone
        if key not in self._known:
            if is_cut:
                unit = replace(unit, end_op=max(unit.first_op, self._tail))
            self._known[key] = self.tables.counted(unit, tp, microbatch, place, counter=self.counter(of, alone=alone))
        return self._known[key]

    def behind(self, tp: int, microbatch: int, place: Place) -> UnitCost | None:
        """The cost of what runs once behind the last slice; None where nothing does."""
        unit = self.tables.folded.units[-1]
        if self._tail >= unit.end_op:
            return None
        own = replace(unit, first_op=self._tail)
        return self.tables.counted(own, tp, microbatch, place, counter=self.counter(None))

    def ways(self, tp: int) -> Ways:
        """The number of shards of operands at a tensor degree."""
        starts = [unit.first_op for unit in self.tables.folded.units]

        def found(op: int, place: int) -> int:
            if tp == 1:
                return 1
            unit = self.tables.folded.units[bisect_right(starts, op) - 1]
            layouts = self.tables.chosen(tp).realised(unit.index)
            return layouts.ways(layouts.operand(layouts.first_op + op - unit.first_op, place))

        return found

    def counter(self, of: Slice | None, *, alone: bool = False) -> WorkCounter:
        """The counter of the ops of a slice, or of whole sequences; without the footprints of units, which slices have
        not. ``alone``: it keeps neither keys and values of earlier slices nor what is made before all slices, which
        slices share."""
        if (of, alone) not in self._counters:
            if of is None:
                graph = replace(self.tables.graph, unit_memory=None, in_16_bits=None)
            else:
                graph = graph_of_slice(self.tables.graph, self.ops, *of)
            begins = of is None or of[1] == 0  # a slice behind others has a mask, and passes over nothing
            apart = self._shared(graph) if alone else ()
            self._counters[of, alone] = made = _Skipping(graph, self._skipped if begins else (), apart)
            if alone and of is not None:  # of the gradients of all keys, the slice before gets those that it knows
                made.handed_back = dict.fromkeys(_given(graph), of[1] / sum(of))
            while len(self._counters) > REMEMBERED:
                self._counters.popitem(last=False)
        self._counters.move_to_end((of, alone))
        return self._counters[of, alone]

    def _shared(self, graph: Graph) -> frozenset[int]:
        """The memory that a slice shares with others."""
        roots = self.counter(None).kept.roots
        made = {t for op, need in zip(graph.ops, self.ops.needs, strict=True) if need == "constant" for t in op.outputs}
        return frozenset(roots.get(t, t) for t in made.union(_given(graph)))

    @cached_property
    def _skipped(self) -> tuple[int, ...]:
        """The attention ops whose kernels pass over what is hidden: those of frameworks with kernels written by hand,
        without a mask of their own."""
        if self.tables.execution.kernels == "compiled":
            return ()
        ops = self.tables.graph.ops
        return tuple(op for op in self.ops.carried if ops[op].kind == "attention" and op not in self.ops.masks)

    @found_once
    def carried_bytes(self, microbatch: int) -> tuple[int, ...]:
        """The bytes of the keys and values of whole sequences in each unit."""
        graph, width = self.tables.graph, PRECISION_BYTES[self.tables.precision]
        inside = {unit.index: range(unit.first_op, unit.end_op) for unit in self.tables.folded.units}
        found = carried_bytes(graph, self.ops, inside, microbatch, width)
        return tuple(found[unit] for unit in inside)

    @cached_property
    def least_share(self) -> float:
        """The share of the seconds of whole sequences below which slices together do not get. Where kernels of whole
        ones do not pass over what is hidden, attention of a slice, which reads the keys up to its end alone, spares
        half of all pairs at best; attention is taken to be twice as slow for its FLOPs as other products are."""
        counter, precision = self.counter(None), self.tables.precision
        attention = others = 0.0
        for unit in self.tables.folded.units:
            for product in counter.count(unit, 1, precision).products:
                flops = product.flops * (1 + product.backward_input + product.backward_weight)
                if product.batches:
                    others += flops
                else:
                    attention += 2 * flops
        return 1.0 if self._skipped or not attention else 1 - attention / (2 * (attention + others))
