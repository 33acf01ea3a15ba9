"""The work of a unit: FLOPs, bytes moved, bytes kept for the backward pass, and what splitting a dim adds.

The work is counted from the graph, never fitted. The backward pass follows from the kinds of op: a contraction runs
once more for every operand that needs a gradient; the bytes of the rest are those of the forward pass read again with
the gradients.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property

from shardwright.core.cost.op_kinds import ALONE_KINDS, FREE_KINDS, PRECISION_BYTES
from shardwright.core.cost.op_shards import Pieces
from shardwright.core.cost.opaque_flops import most_flops, result_of
from shardwright.core.cost.run_again import run_again
from shardwright.core.cost.unit_count import UnitCount
from shardwright.core.cost.value_flow import ValueFlow
from shardwright.core.cost.work import Collective, Product, UnitWork
from shardwright.core.cost.working_memory import LiveBytes
from shardwright.core.layout.unit_layouts import Link, RealisedUnit, Step
from shardwright.core.model.fold import Unit, fold
from shardwright.core.model.fp8_products import Fp8Products, fp8_products
from shardwright.core.model.graph import ITEM_BYTES, Graph, Op
from shardwright.core.model.parameter_calls import ParameterCall, parameter_calls
from shardwright.core.model.structure import structure_of
from shardwright.core.values.disjoint_sets import DisjointSets
from shardwright.core.values.found_once import found_once


def contraction_flops(graph: Graph, op: Op, batch: int) -> int:
    """Matrix-product FLOPs of an op: 2 · (product of all label sizes) for a contraction; both products of an attention;
    for an opaque op the most that such operands are usually for; 0 for other kinds."""
    if op.kind == "contraction":
        return 2 * math.prod(graph.label_sizes(op, batch).values())
    if op.kind == "attention":
        query, _key, value = (graph.tensors[t].shape(batch) for t in op.inputs[:3])
        labels = op.input_labels
        sizes = graph.label_sizes(op, batch)
        keys = math.prod(sizes[x] for x in set(labels[1]) - set(labels[0]) - {-1})  # -1: one head for all queries
        return 2 * keys * (math.prod(query) + math.prod(query[:-1]) * value[-1])
    return most_flops(graph, op, batch) if op.kind == "opaque" else 0


def forward_flops(graph: Graph, batch: int) -> int:
    """Matrix-product FLOPs of the whole forward pass (attention included)."""
    return sum(contraction_flops(graph, op, batch) for op in graph.ops)


class WorkCounter(ValueFlow):
    """A counter of the work of one graph's units. The memory of values ``apart`` is counted elsewhere."""

    def __init__(self, graph: Graph, apart: Collection[int] = ()) -> None:
        super().__init__(graph, apart)
        self._calls: dict[tuple[int, int], tuple[ParameterCall, ...]] = {}
        self.handed_back: Mapping[int, float] = {}
        """Value → the share of its gradient that is copied, of those whose gradient is divided with what made them."""
        self.unmade = frozenset(
            (*op.inputs, *op.outputs)[place] for op in graph.ops if op.memory is not None for place in op.memory.unmade
        )
        """The values that have no memory: those between ops that stand for one call."""
        self._given = frozenset(tensor for tensor in graph.inputs if graph.tensors[tensor].role == "activation")
        """The activations that no op makes."""
        kept_from: dict[int, int] = {}
        for index, op in enumerate(graph.ops):
            for root in self.kept.by(op):
                kept_from.setdefault(root, index)
        self.live = LiveBytes(graph, self._alias, self._needs_gradient, self._parameters, self._users, kept_from, apart)

    def calls(self, unit: Unit) -> tuple[ParameterCall, ...]:
        """The calls of a unit that use parameters."""
        ops = unit.first_op, unit.end_op  # which name a unit of this graph
        if ops not in self._calls:
            self._calls[ops] = parameter_calls(self.graph, unit, self._users)
        return self._calls[ops]

    def width(self, tensor: int, precision: str) -> int:
        """Bytes of an entry of a tensor when floats are kept in ``precision``."""
        value = self.graph.tensors[tensor]
        if not value.is_floating:
            return ITEM_BYTES[value.dtype]
        return PRECISION_BYTES["fp32" if value.stays_wide else precision]

    def size_bytes(self, tensor: int, batch: int, precision: str) -> int:
        """Bytes of a tensor when floats are kept in ``precision``."""
        return self.graph.tensors[tensor].elements(batch) * self.width(tensor, precision)

    def count(
        self,
        unit: Unit,
        batch: int,
        precision: str = "fp32",
        layouts: RealisedUnit | None = None,
        *,
        gathered_stays: bool = False,
    ) -> UnitWork:
        """The work of one microbatch of ``batch`` samples, on one rank when laid out as ``layouts`` says (the layouts
        of this unit; None: on one rank alone). ``gathered_stays``: what is gathered for an op and read by its backward
        is kept as it was gathered, and not gathered again."""
        pieces = Pieces(layouts, self.kept.roots)
        for index in range(unit.first_op, unit.end_op) if layouts is not None and self._given else ():
            for place, tensor in enumerate(self.graph.ops[index].inputs):
                if tensor in self._given:
                    pieces.note_given(tensor, index, place)
        count = UnitCount(self, unit, batch, precision, pieces, gathered_stays)
        for index in range(unit.first_op, unit.end_op):
            count.add_traffic(index)
            count.add_saved(index)
        return count.work(self._collectives(layouts, batch, precision, gathered_stays=gathered_stays))

    @found_once
    def run_again(self, unit: Unit, *, compiled: bool) -> frozenset[int]:
        """The ops of a unit that a recomputed backward runs (`cost.run_again`)."""
        return run_again(self.graph, self.kept, unit, compiled=compiled)

    @cached_property
    def fp8(self) -> Fp8Products:
        """The products that steps in fp8 compute in 8 bits."""
        folded = fold(self.graph)
        return fp8_products(folded, structure_of(folded)[0])

    def put_off_bytes(self, ops: range, cut: Pieces, held: Callable[[int, int], int]) -> int:
        """Bytes of the factors of the gradients of weights. A product whose terms lie on several ranks may make its
        gradient at once: then the larger of its factors and its gradient counts."""
        read: dict[int, int] = {}
        found = 0
        for index in self.put_off(ops):
            op = self.graph.ops[index]
            trained = self._trained(op)
            made = sum(held(index, len(op.inputs) + i) for i in range(len(op.outputs)))
            given = {self.memory_of(t): held(index, i) for i, t in enumerate(op.inputs) if not trained[i]}
            weights = sum(held(index, i) for i, is_trained in enumerate(trained) if is_trained)
            within = set(cut.of_labels(index, op)) - {label for dims in op.output_labels for label in dims}
            found += max(made, weights - sum(given.values())) if within else made
            read.update((root, max(size, read.get(root, 0))) for root, size in given.items())
        return found + sum(read.values())

    def put_off(self, ops: range) -> list[int]:
        """The ops whose gradients of weights a split backward makes in its second half."""
        found = (index for index in ops if self.graph.ops[index].kind in ("contraction", "gather"))
        return [index for index in found if any(self._trained(self.graph.ops[index]))]

    def _trained(self, op: Op) -> list[bool]:
        """Whether each operand of an op is a parameter that has a gradient."""
        return [self.memory_of(t) in self._parameters and t in self._needs_gradient for t in op.inputs]

    def weight_grad_bytes(self, put_off: Iterable[int], held: Callable[[int, int], int]) -> int:
        """The bytes of the largest gradient of a weight that is made before it is added to others: those of products
        of two matrices are added as they are made."""
        found = 0
        for index in put_off:
            op = self.graph.ops[index]
            if op.kind == "contraction" and "conv" not in op.name.rsplit("/")[-1].split(".")[-1]:
                continue
            sizes = (held(index, i) for i, is_trained in enumerate(self._trained(op)) if is_trained)
            found = max(found, *sizes)
        return found

    def _collectives(
        self, layouts: RealisedUnit | None, batch: int, precision: str, *, gathered_stays: bool
    ) -> tuple[tuple[Collective, ...], ...]:
        """The collectives of the forward pass, of the backward pass, those gathered again in the backward pass (none
        where what was gathered stays), and those of a step."""
        found: tuple[list[Collective], ...] = ([], [], [], [])
        forward, backward, again, at_the_end = found
        if layouts is None:
            return (), (), (), ()

        def collectives(link: Link, taken: Iterable[Step]) -> list[Collective]:
            whole = self.size_bytes(link.tensor, batch, precision)
            return [
                Collective(step.collective, whole // layouts.ways(step.others), layouts.axes[step.axis][0])
                for step in taken
                if step.collective
            ]

        for link in layouts.links:
            if link.is_parameter:
                at_the_end += collectives(link, link.backward)
                continue  # cut where it lies
            ahead = collectives(link, link.forward)
            forward += ahead
            backward += collectives(link, link.backward)
            if link.flows and not gathered_stays and self._is_read_by_a_product(link.tensor):
                again += [c for c in ahead if c.kind == "all_gather"]
        return tuple(map(tuple, found))

    def is_read_within(self, tensor: int, ops: range) -> bool:
        """Whether no other ops read a tensor."""
        return all(user in ops for user in self._users.get(tensor, ()))

    def _is_read_by_a_product(self, tensor: int) -> bool:
        return any(self._is_far(user) for user in self._users.get(tensor, []))

    def product(self, op: Op, batch: int, ways: Mapping[int, int], size_bytes: int) -> Product:
        flops = contraction_flops(self.graph, op, batch) // math.prod(ways.values())
        has_backward = any(t in self._needs_gradient for t in op.inputs)
        if op.kind == "attention":
            # Five products against two: the scores are computed again (FlashAttention, arXiv 2205.14135).
            return Product(flops, size_bytes, 0, 0, 0, 0, 2.5 if has_backward else 0.0, 0.0)
        if op.kind == "opaque":
            shape = result_of(self.graph, op, batch).shape(batch)
            m, n = max(1, math.prod(shape[:-1])), max(1, math.prod(shape[-1:]))
            return Product(flops, size_bytes, 1, m, n, -(-flops // (2 * m * n)), 2.0 if has_backward else 0.0, 0.0)
        trained = [t for t in op.inputs if t in self._needs_gradient]
        weights = [t for t in trained if self._is_weight(t)]
        sizes = {label: max(1, size // ways.get(label, 1)) for label, size in self.graph.label_sizes(op, batch).items()}
        left, right, out = (
            set(labels) for labels in (op.labels[0], op.labels[min(1, len(op.inputs) - 1)], op.labels[-1])
        )
        batches = math.prod(sizes[x] for x in left & right & out if x >= 0)
        n = math.prod(sizes[x] for x in (right & out) - left if x >= 0)
        m = max(1, math.prod(sizes[x] for x in out if x >= 0) // (batches * n))
        k = max(1, flops // (2 * batches * m * n))
        back, again = float(len(trained) - len(weights)), float(len(weights))
        return Product(flops, size_bytes, batches, m, n, k, back, again)

    def _is_weight(self, tensor: int) -> bool:
        """Whether the tensor is a parameter, or a view or cast of one."""
        while tensor not in self._parameters:
            made = self.graph.producer.get(tensor)
            if made is None or len(self.graph.ops[made].inputs) != 1:
                return False
            tensor = self.graph.ops[made].inputs[0]
        return True

    def unfused_bytes(
        self, index: int, unit: Unit, made_here: Mapping[int, int], held: Callable[[int, int], int]
    ) -> int:
        """Bytes that remain when chains of elementwise ops run as one kernel: operands that a product or another unit
        made, and results that one of those reads."""
        moved, op = 0, self.graph.ops[index]
        for position, tensor in enumerate(op.inputs):
            made = made_here.get(self.memory_of(tensor))
            if made is None or self.graph.ops[made].kind in ALONE_KINDS:
                # A lookup reads only the rows that it returns.
                is_table = op.kind == "gather" and tensor == op.inputs[0]
                moved += held(index, len(op.inputs) if is_table else position)
        for position, tensor in enumerate(op.outputs, start=len(op.inputs)):
            users = self._users.get(tensor, [])
            if any(not unit.first_op <= u < unit.end_op or self._is_far(u) for u in users):
                moved += held(index, position)
        return moved

    def whole_bytes(self, op: Op, held: Callable[[int], int]) -> int:
        """Bytes that an op moves as a kernel of its own: it reads its operands and writes its results; a lookup reads
        only the rows that it returns."""
        is_table = op.kind == "gather"
        operands = range(1 if is_table else 0, len(op.inputs) + len(op.outputs))
        return sum(map(held, operands)) + (held(len(op.inputs)) if is_table else 0)

    def chains(self, unit: Unit) -> int:
        """The number of kernels that the ops beside the products make when those that feed each other are fused: the
        connected parts of the unit without its products. However finely a framework decomposes them, the number is the
        same."""
        chain: dict[int, int] = {}  # memory → an op of its chain
        chains: DisjointSets[int] = DisjointSets()
        for index in range(unit.first_op, unit.end_op):
            op = self.graph.ops[index]
            if op.kind in FREE_KINDS or op.kind in ALONE_KINDS:
                continue
            chains.add(index)
            for tensor in op.inputs:
                if (before := chain.get(self.memory_of(tensor))) is not None:
                    chains.merge(before, index)
            chain.update((tensor, index) for tensor in op.outputs)
        return len(chains)

    def _is_far(self, user: int) -> bool:
        """Whether the op, or what its view feeds, is a product."""
        op = self.graph.ops[user]
        if op.kind == "view":
            return any(self._is_far(u) for t in op.outputs for u in self._users.get(t, []))
        return op.kind in ALONE_KINDS
