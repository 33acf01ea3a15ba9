"""The work of a unit: FLOPs, bytes moved, bytes kept for the backward pass, and what splitting a dim adds.

The work is counted from the graph, never fitted. The backward pass follows from the kinds of op: a contraction runs
once more for every operand that needs a gradient; the bytes of the rest are those of the forward pass read again with
the gradients.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial

from shardwright.core.cost.fp8_casts import casts
from shardwright.core.cost.handwritten_kernels import loss_ops, softmax_op_by_op
from shardwright.core.cost.op_shards import Pieces
from shardwright.core.cost.opaque_flops import most_flops, result_of
from shardwright.core.cost.run_again import run_again
from shardwright.core.cost.value_flow import ValueFlow
from shardwright.core.cost.work import Collective, ForwardPart, Product, Result, UnitWork
from shardwright.core.cost.working_memory import LiveBytes, PhaseBytes
from shardwright.core.layout.unit_layouts import Link, RealisedUnit, Step
from shardwright.core.model.fold import Unit, fold, module_inside
from shardwright.core.model.fp8_products import Fp8Products, fp8_products
from shardwright.core.model.graph import ITEM_BYTES, Graph, Op
from shardwright.core.model.op_memory import at
from shardwright.core.model.parameter_calls import ParameterCall, parameter_calls
from shardwright.core.model.structure import structure_of
from shardwright.core.values.disjoint_sets import DisjointSets
from shardwright.core.values.found_once import found_once

PRECISION_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of a value between ops in steps of a precision: those of fp8 keep their values in bf16."""

FREE_KINDS = frozenset({"view", "create"})
PRODUCT_KINDS = frozenset({"contraction", "attention"})
_ALONE_KINDS = PRODUCT_KINDS | {"opaque"}
"""The kinds of op that are kernels of their own, into which no elementwise op is fused."""


def is_part_of_a_kernel(op: Op) -> bool:
    """Whether an op was told from the rest of a framework's op, whose one kernel does both: the bias of a linear layer,
    scale and shift of a norm. Their names say of what they are a part: ``aten.addmm/bias``."""
    return "/" in op.name


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
    """A counter of the work of one graph's units."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._calls: dict[tuple[int, int], tuple[ParameterCall, ...]] = {}
        self.unmade = frozenset(
            (*op.inputs, *op.outputs)[place] for op in graph.ops if op.memory is not None for place in op.memory.unmade
        )
        """The values that have no memory: those between ops that stand for one call."""
        kept_from: dict[int, int] = {}
        for index, op in enumerate(graph.ops):
            for root in self.kept.by(op):
                kept_from.setdefault(root, index)
        self.live = LiveBytes(graph, self._alias, self._needs_gradient, self._parameters, self._users, kept_from)

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
        count = _UnitCount(self, unit, batch, precision, Pieces(unit, layouts, self.kept.roots), gathered_stays)
        for index in range(unit.first_op, unit.end_op):
            count.add_traffic(index)
            count.add_saved(index)
        return count.work(self._collectives(layouts, batch, precision))

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
        self, layouts: RealisedUnit | None, batch: int, precision: str
    ) -> tuple[tuple[Collective, ...], ...]:
        """The collectives of the forward pass, of the backward pass, those gathered again in the backward pass, and
        those of a step."""
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
            if link.flows and self._is_read_by_a_product(link.tensor):
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
            if made is None or self.graph.ops[made].kind in _ALONE_KINDS:
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
            if op.kind in FREE_KINDS or op.kind in _ALONE_KINDS:
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
        return op.kind in _ALONE_KINDS


class _UnitCount:
    """The work of one unit, added up op by op."""

    def __init__(
        self, counter: WorkCounter, unit: Unit, batch: int, precision: str, cut: Pieces, gathered_stays: bool
    ) -> None:
        self.counter, self.unit, self.batch, self.precision, self.cut = counter, unit, batch, precision, cut
        self.gathered_stays = gathered_stays
        self.ops = range(unit.first_op, unit.end_op)
        self.made_here = {t: i for i in self.ops for t in counter.graph.ops[i].outputs}
        self.products: list[Product] = []
        self.again: list[Product] = []
        self.traffic: dict[int, tuple[int, int]] = {}
        """The bytes that each op beside the products moves: in a chain, and as a kernel of its own."""
        self.products_of: dict[int, Product] = {}
        self.again_as = tuple(counter.run_again(unit, compiled=compiled) for compiled in (False, True))
        """The ops that a recomputed backward runs, as in `UnitWork.not_again`."""
        self.results: list[tuple[Result, int]] = []
        """The result of each product, and the memory of that."""
        self.small: list[Collective] = []
        self.small_backward: list[Collective] = []
        self.fp8 = counter.fp8.ops if precision == "fp8" else {}
        """Op → the position of its weight, for the products in fp8."""
        self.working: dict[int, tuple[int, int]] = {}
        """Op → the bytes that it takes for a while in the forward and in the backward pass, beside what it reads."""
        self.vector_bytes = self.vector_again = 0
        self.eager_bytes = self.eager_again = self.eager_kernels = 0
        self.loss_ops = loss_ops(counter.graph, self.ops, _ALONE_KINDS)
        self.op_by_op_bytes = self.op_by_op_kernels = self.loss_kernels = 0
        self.kept: dict[int, int] = {}
        self.kept_by: dict[int, list[int]] = {}
        self.mask_bytes: dict[int, int] = {}
        self.attended: dict[int, int] = {}
        """What attention with dropout keeps where it is one kernel."""
        self.kept_unfused: dict[int, int] = {}
        """What it keeps where it is none, beside `unfused`."""
        self.scores = self.unfused = self.statistics = self.unfused_scores = 0

    def size_bytes(self, tensor: int) -> int:
        """Bytes of a whole tensor."""
        return self.counter.size_bytes(tensor, self.batch, self.precision)

    def memory(self, tensor: int) -> int:
        """Bytes of a tensor on one rank, as it lies between ops."""
        if tensor in self.counter.unmade:
            return 0
        return self.size_bytes(tensor) // self.cut.memory_ways(tensor)

    def held(self, index: int, position: int) -> int:
        """Bytes of an operand of an op on one rank."""
        op = self.counter.graph.ops[index]
        return self.size_bytes((*op.inputs, *op.outputs)[position]) // self.cut.ways(index, position)

    def _kept_bytes(self, index: int, root: int) -> int:
        """Bytes that an op keeps of a value on one rank."""
        inputs = enumerate(self.counter.graph.ops[index].inputs)
        if not self.gathered_stays:
            return self.memory(root)
        read = [self.cut.ways(index, i) for i, t in inputs if self.counter.memory_of(t) == root]
        return max([self.memory(root), *(self.size_bytes(root) // ways for ways in read)])

    def add_traffic(self, index: int) -> None:
        """Add an op's product or memory traffic, and the small sums inside it."""
        op, graph, is_again = (
            self.counter.graph.ops[index],
            self.counter.graph,
            index in self.counter.kept.computed_again,
        )
        for axis, label in self.cut.combined(index, op):
            whole = graph.label_sizes(op, self.batch)[label]
            self.small.append(Collective("all_reduce", 2 * self.size_bytes(op.outputs[0]) // whole, axis))
        if op.kind in _ALONE_KINDS:
            size = sum(self.held(index, i) for i in range(len(op.inputs) + len(op.outputs)))
            made = self.counter.product(op, self.batch, self.cut.of_labels(index, op), size)
            self.products.append(self._in_fp8(index, made) if index in self.fp8 else made)
            result = sum(self.held(index, len(op.inputs) + i) for i in range(len(op.outputs)))
            self.products_of[index] = self.products[-1]
            is_read = index in self.again_as[0], index in self.again_as[1]
            made_by = Result(
                module_inside(graph, self.unit, op), op.kind == "contraction", result, self.products[-1], is_read
            )
            self.results.append((made_by, self._root(op.outputs[0])))
            if is_again:
                self.again.append(self.products[-1])
        elif op.kind not in FREE_KINDS:
            moved = self.counter.unfused_bytes(index, self.unit, self.made_here, self.held)
            self.vector_bytes += moved
            self.vector_again += moved if is_again else 0
            self.traffic[index] = moved, 0
            if not is_part_of_a_kernel(op):
                whole = self.counter.whole_bytes(op, partial(self.held, index))
                self.traffic[index] = moved, whole
                self.eager_kernels += 1
                self.eager_bytes += whole
                self.eager_again += whole if is_again else 0
                if index in self.loss_ops:
                    self.op_by_op_bytes += whole - moved
                    self.loss_kernels += 1
                elif op.kind == "softmax" and self.counter.kept.is_attention_score(op.outputs[0]):
                    size, kernels = softmax_op_by_op(graph, op, self.batch, self.cut.of_labels(index, op))
                    self.op_by_op_bytes += size
                    self.op_by_op_kernels += kernels

    def _not_again(self, again: Collection[int]) -> ForwardPart:
        return self._part([index for index in self.ops if index not in again])

    def _part(self, ops: Collection[int]) -> ForwardPart:
        moved = [self.traffic.get(index, (0, 0)) for index in ops]
        products = tuple(self.products_of[index] for index in ops if index in self.products_of)
        return ForwardPart(products, sum(fused for fused, _ in moved), sum(whole for _, whole in moved))

    def _in_fp8(self, index: int, product: Product) -> Product:
        """A product computed in fp8, with its casts. The scale of an operand that several ranks share is that of the
        whole, so that they tell each other their largest entries."""
        width, weight = PRECISION_BYTES[self.precision], self.fp8[index]
        entries = [self.held(index, position) // width for position in (1 - weight, weight, 2)]
        taken = casts(*entries)
        self.working[index] = taken.forward_working_bytes, taken.backward_working_bytes
        split: dict[str, set[int]] = {}
        for axis, position in self.cut.split_operands(index):
            split.setdefault(axis, set()).add(position)
        for axis, positions in split.items():
            if positions - {2}:
                self.small.append(Collective("all_reduce", 2 * PRECISION_BYTES["fp32"], axis))
            if 2 in positions and product.backward_input + product.backward_weight:
                self.small_backward.append(Collective("all_reduce", PRECISION_BYTES["fp32"], axis))
        return replace(product, size_bytes=sum(entries[:2]) + width * entries[2], casts=taken)

    def add_saved(self, index: int) -> None:
        """Add what an op keeps for its backward."""
        counter, cut, batch = self.counter, self.cut, self.batch
        op, saved = counter.graph.ops[index], counter.kept
        width = counter.width(op.inputs[0], self.precision) if op.inputs else 0
        share = cut.share(index)
        if (seen := saved.seen(op, self.precision)) is not None:
            kept, forward, backward = (at(line, batch) // share for line in (seen.kept, seen.forward, seen.backward))
            if op.memory is not None and not op.memory.is_known:
                forward = backward = sum(self.held(index, n) for n in range(len(op.inputs) + len(op.outputs)))
            self.mask_bytes[index] = kept
            self.statistics += kept
            casts = self.working.get(index, (0, 0))  # of a product in fp8
            self.working[index] = forward + casts[0], backward + casts[1]
            self._add_kept(index, saved.by(op), self.kept)
            return
        scores = saved.score_bytes(op, batch, width)
        self.scores += scores // share
        of_op = saved.statistics(op, batch) // (share if not any(cut.combined(index, op)) else 1)
        self.statistics += of_op
        widened = sum(self.held(index, i) * width for i in saved.widened(op))
        self.statistics += widened
        if op.kind == "gather" and any(op.role(label) == "index" for label in cut.of_labels(index, op)):
            # For rows that lie on other ranks: places in the own shard, and which are there.
            self.statistics += sum((8 + 1) * counter.graph.tensors[t].elements(batch) for t in op.inputs[1:])
        drops = saved.drops_scores(op)
        if drops:
            whole, roots = saved.unfused(op, batch, self.precision, width)
            self.unfused += (whole - scores) // share - of_op - (widened if op.memory is not None else 0)
            self._note_kept(index, roots, self.kept_unfused)
            self.unfused_scores += saved.unfused_scores_bytes(op, batch, width) // share
        self._add_kept(index, saved.by(op), self.attended if drops else self.kept)
        for mask in saved.masks(op):
            entry = counter.width(mask, self.precision)
            self.kept[-1 - mask] = self.mask_bytes[index] = self.held(index, len(op.inputs)) // entry

    def _root(self, tensor: int) -> int:
        """The tensor whose memory this one is a view or a part of."""
        return self.counter.kept.roots.get(tensor, tensor)

    def _left(self) -> dict[int, int]:
        """The memory of the unit's own that its calls leave in objects, and its bytes on one rank. What a later unit
        reads is not among it: that enters the unit."""
        tensors, found = self.counter.graph.tensors, dict[int, int]()
        for tensor in self.made_here:
            root = self._root(tensor)
            if tensors[tensor].is_left and root in self.made_here and self.counter.is_read_within(tensor, self.ops):
                found[root] = self.memory(root)
        return found

    def _add_kept(self, index: int, roots: list[int], found: dict[int, int]) -> None:
        """Add the memory that an op keeps to what was found."""
        if roots:
            self.kept_by[index] = roots
            self._note_kept(index, roots, found)

    def _note_kept(self, index: int, roots: list[int], found: dict[int, int]) -> None:
        found.update((root, max(found.get(root, 0), self._kept_bytes(index, root))) for root in roots)

    def work(self, moved: tuple[tuple[Collective, ...], ...]) -> UnitWork:
        """The work of all ops that were added; ``moved`` are the collectives between them."""
        counter, is_score = self.counter, self.counter.kept.is_attention_score
        unfused = self.unfused + sum(
            sign * size
            for sign, found in ((1, self.kept_unfused), (-1, self.attended))
            for key, size in found.items()
            if key not in self.kept
        )
        kept = self.kept | self.attended
        masks = {key: size * (counter.width(-1 - key, self.precision) - 1) for key, size in kept.items() if key < 0}
        entering = {
            counter.memory_of(t): self.cut.entering_ways(t) for t in counter.entering(self.unit, self.made_here)
        }
        left = self._left()
        held = self.ops, self.kept_by, self.mask_bytes, self.memory, self.working
        passing, passing_beside_given = counter.live.beside_kept(*held)
        phases: tuple[PhaseBytes, ...] = ()
        if counter.graph.memory_traits.gathers_units:
            phases = counter.live.backward_phases(counter.calls(self.unit), *held)
        put_off = counter.put_off(self.ops)
        forward, backward, gathered, at_the_end = moved
        entered = sum(self.size_bytes(t) // ways for t, ways in entering.items())
        of_products = {root for _, root in self.results}
        left_beside = sum(size for root, size in left.items() if root not in of_products)
        held_anyway = sum(made.size_bytes for made, root in self.results if root in left)
        results = (replace(made, size_bytes=0) if root in left else made for made, root in self.results)
        return UnitWork(
            products=tuple(self.products),
            vector_bytes=self.vector_bytes,
            kernels=len(self.products) + counter.chains(self.unit),
            saved_bytes=sum(kept.values()) + self.scores + self.statistics,
            saved_selective_bytes=self.statistics + sum(size for key, size in kept.items() if not is_score(key)),
            unfused_dropout_bytes=sum(masks.values()) + unfused,
            unfused_dropout_selective_bytes=sum(size for key, size in masks.items() if not is_score(key)),
            selective_products=tuple(self.again),
            selective_vector_bytes=self.vector_again,
            entering_bytes=entered + sum(left.values()),
            left_bytes=(sum(left.values()), left_beside),
            fetched_bytes=counter.live.fetched(*held),
            passing_bytes=passing,
            given_bytes=passing_beside_given - passing,
            forward_moved=(*forward, *self.small),
            backward_moved=(*backward, *self.small_backward),
            backward_gathered=gathered,
            step_moved=at_the_end,
            put_off_bytes=counter.put_off_bytes(self.ops, self.cut, self.held),
            input_grad_bytes=counter.live.input_grad(put_off, *held),
            weight_grad_bytes=counter.weight_grad_bytes(put_off, self.held),
            forward_beside_bytes=counter.live.forward_beside_kept(*held) if phases else passing,
            phases=phases,
            beside_results_bytes=entered + left_beside + self.statistics + held_anyway,
            results=tuple(results),
            not_again=(self._not_again(self.again_as[0]), self._not_again(self.again_as[1])),
            own_again=self._part([index for index in self.ops if counter.graph.ops[index].is_run_again]),
            unfused_scores_bytes=self.unfused_scores,
            eager_bytes=self.eager_bytes,
            eager_selective_bytes=self.eager_again,
            eager_kernels=len(self.products) + self.eager_kernels,
            op_by_op_bytes=self.op_by_op_bytes,
            op_by_op_kernels=self.op_by_op_kernels + max(0, self.loss_kernels - 1),  # one is among `chains`
        )
