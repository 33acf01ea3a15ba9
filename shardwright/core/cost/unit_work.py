"""The work of a unit: FLOPs, bytes moved, bytes kept for the backward pass, and what splitting a dim adds.

The work is counted from the graph, never fitted. The backward pass follows from the kinds of op: a contraction runs
once more for every operand that needs a gradient; the bytes of the rest are those of the forward pass read again with
the gradients.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.cost.op_shards import Pieces
from shardwright.core.cost.opaque_flops import most_flops, result_of
from shardwright.core.cost.saved_activations import Kept, aliases
from shardwright.core.cost.working_memory import LiveBytes
from shardwright.core.layout.unit_layouts import Link, RealisedUnit, Step
from shardwright.core.model.fold import Unit
from shardwright.core.model.graph import ITEM_BYTES, Graph, Op

PRECISION_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

FREE_KINDS = frozenset({"view", "create"})
PRODUCT_KINDS = frozenset({"contraction", "attention"})
_ALONE_KINDS = PRODUCT_KINDS | {"opaque"}
"""The kinds of op that are kernels of their own, into which no elementwise op is fused."""


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product or attention, on one rank."""

    flops: int
    size_bytes: int
    """Bytes of the operands read and the result written."""
    batches: int
    m: int
    n: int
    k: int
    """``batches`` products of m × k by k × n; all 0 for an attention in one kernel."""
    backward_input: float
    """The FLOPs of the backward for the activations, as a multiple of the forward's."""
    backward_weight: float


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over a tensor axis."""

    kind: str
    """``all_reduce``, ``reduce_scatter``, ``all_gather`` or ``all_to_all``."""
    size_bytes: int
    """Bytes of one member's whole tensor: what is reduced, or what a gather gives."""
    axis: str = "tp"


@dataclass(frozen=True, slots=True)
class UnitWork:
    """The work of one microbatch of one unit on one rank of the tensor axis."""

    products: tuple[Product, ...]
    vector_bytes: int
    """Memory traffic of everything else in the forward pass, chains of elementwise ops fused."""
    kernels: int
    saved_bytes: int
    """Bytes of the activations kept for the backward pass when nothing is recomputed."""
    saved_selective_bytes: int
    """The same with the softmax part of attention recomputed (arXiv 2205.05198, section 5)."""
    selective_products: tuple[Product, ...]
    """The products that selective recompute runs once more."""
    selective_vector_bytes: int
    """The memory traffic of everything else that selective recompute runs once more."""
    unfused_dropout_bytes: int
    """Bytes kept beside ``saved_bytes`` where dropout is no kernel of its own: masks as wide as the values; and for
    attention with dropout the softmax, the mask and their product in place of its result. Below 0 where keys are so few
    that these are the smaller."""
    unfused_dropout_selective_bytes: int
    """The same beside ``saved_selective_bytes``."""
    entering_bytes: int
    """Bytes of the activations that come from earlier units: all that is kept under full recompute."""
    passing_bytes: int
    """The most bytes that a forward and backward hold beside what is kept: values and gradients under way."""
    forward_moved: tuple[Collective, ...]
    """Every collective over the tensor axis in the forward pass."""
    backward_moved: tuple[Collective, ...]
    backward_gathered: tuple[Collective, ...] = ()
    """The gathers of operands that are kept in shards, once more for the gradient of a weight."""
    step_moved: tuple[Collective, ...] = ()
    """Every collective over the tensor axis for the gradients of parameters, once a step."""
    given_bytes: int = 0
    """The bytes by which ``passing_bytes`` grows where the gradients that the unit is given stay to the end of its
    backward."""
    put_off_bytes: int | None = None
    """Bytes kept between the two halves of a split backward: the operands and the gradients of results from which the
    second half makes gradients of parameters. None: not known."""

    @property
    def forward_flops(self) -> int:
        return sum(p.flops for p in self.products)

    @property
    def backward_flops(self) -> float:
        return sum(p.flops * (p.backward_input + p.backward_weight) for p in self.products)


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


class WorkCounter:
    """A counter of the work of one graph's units. It holds what all units share: aliases and users of tensors."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._alias = aliases(graph)
        self._parameters = {p.tensor: p.trainable for p in graph.parameters}
        self._users: dict[int, list[int]] = {}
        for index, op in enumerate(graph.ops):
            for tensor in op.inputs:
                self._users.setdefault(tensor, []).append(index)
        self._needs_gradient = self._gradient_flow()
        self._kept = Kept(graph, self._alias, self._needs_gradient)
        self._live = LiveBytes(graph, self._alias, self._needs_gradient, self._parameters, self._users)

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

    def size_bytes(self, tensor: int, batch: int, precision: str) -> int:
        """Bytes of a tensor when floats are kept in ``precision``."""
        value = self.graph.tensors[tensor]
        width = PRECISION_BYTES[precision] if value.is_floating else ITEM_BYTES[value.dtype]
        return value.elements(batch) * width

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
        graph, cut = self.graph, Pieces(unit, layouts, self._kept.roots)
        kept: dict[int, int] = {}
        kept_by: dict[int, list[int]] = {}
        mask_bytes: dict[int, int] = {}
        attended: dict[int, int] = {}  # what attention with dropout keeps where it is one kernel
        products: list[Product] = []
        again: list[Product] = []
        small: list[Collective] = []
        vector_bytes = vector_again = scores = unfused = statistics = 0

        def memory(tensor: int) -> int:
            return self.size_bytes(tensor, batch, precision) // cut.memory_ways(tensor)

        def held(index: int, position: int) -> int:
            op = graph.ops[index]
            return self.size_bytes((*op.inputs, *op.outputs)[position], batch, precision) // cut.ways(index, position)

        def kept_bytes(index: int, root: int) -> int:
            inputs = enumerate(graph.ops[index].inputs)
            read = [cut.ways(index, i) for i, t in inputs if self.memory_of(t) == root] if gathered_stays else []
            return max([memory(root), *(self.size_bytes(root, batch, precision) // ways for ways in read)])

        ops = range(unit.first_op, unit.end_op)
        made_here = {t: i for i in ops for t in graph.ops[i].outputs}
        for index in ops:
            op = graph.ops[index]
            operands = len(op.inputs) + len(op.outputs)
            share = cut.share(index)
            for axis, label in cut.combined(index, op):
                whole = graph.label_sizes(op, batch)[label]
                size = 2 * self.size_bytes(op.outputs[0], batch, precision) // whole
                small.append(Collective("all_reduce", size, axis))
            if op.kind in _ALONE_KINDS:
                size = sum(held(index, i) for i in range(operands))
                products.append(self._product(op, batch, cut.of_labels(index, op), size))
                if index in self._kept.computed_again:
                    again.append(products[-1])
            elif op.kind not in FREE_KINDS:
                moved = self._unfused_bytes(index, unit, made_here, held)
                vector_bytes += moved
                vector_again += moved if index in self._kept.computed_again else 0
            entries = self._kept.score_elements(op, batch)
            scores += entries * PRECISION_BYTES[precision] // share
            of_op = self._kept.statistics(op, batch) // (share if not any(cut.combined(index, op)) else 1)
            statistics += of_op
            statistics += sum(held(index, i) * PRECISION_BYTES[precision] for i in self._kept.widened(op))
            if op.kind == "gather" and any(op.role(label) == "index" for label in cut.of_labels(index, op)):
                # For rows that lie on other ranks: places in the own shard, and which are there.
                statistics += sum((8 + 1) * graph.tensors[t].elements(batch) for t in op.inputs[1:])
            drops = self._kept.drops_scores(op)
            if drops:
                copies = self._kept.unfused_elements(op, batch) - entries
                unfused += copies * PRECISION_BYTES[precision] // share - of_op
            if roots := self._kept.by(op):
                kept_by[index] = roots
                found = attended if drops else kept
                found.update((root, max(found.get(root, 0), kept_bytes(index, root))) for root in roots)
            for mask in self._kept.masks(op):
                kept[-1 - mask] = mask_bytes[index] = held(index, len(op.inputs)) // PRECISION_BYTES[precision]
        unfused -= sum(size for key, size in attended.items() if key not in kept)
        kept.update(attended)
        masks = {key: size * (PRECISION_BYTES[precision] - 1) for key, size in kept.items() if key < 0}
        entering = {self.memory_of(t): cut.entering_ways(t) for t in self._entering(unit, made_here)}
        passing, passing_beside_given = self._live.beside_kept(ops, kept_by, mask_bytes, memory)
        forward, backward, gathered, at_the_end = self._collectives(layouts, batch, precision)
        return UnitWork(
            products=tuple(products),
            vector_bytes=vector_bytes,
            kernels=len(products) + self._chains(unit),
            saved_bytes=sum(kept.values()) + scores + statistics,
            saved_selective_bytes=statistics
            + sum(size for key, size in kept.items() if not self._kept.is_attention_score(key)),
            unfused_dropout_bytes=sum(masks.values()) + unfused,
            unfused_dropout_selective_bytes=sum(
                size for key, size in masks.items() if not self._kept.is_attention_score(key)
            ),
            selective_products=tuple(again),
            selective_vector_bytes=vector_again,
            entering_bytes=sum(self.size_bytes(t, batch, precision) // ways for t, ways in entering.items()),
            passing_bytes=passing,
            given_bytes=passing_beside_given - passing,
            forward_moved=(*forward, *small),
            backward_moved=backward,
            backward_gathered=gathered,
            step_moved=at_the_end,
            put_off_bytes=self._put_off_bytes(ops, cut, held),
        )

    def _put_off_bytes(self, ops: range, cut: Pieces, held: Callable[[int, int], int]) -> int:
        """Bytes of the factors of the gradients of weights. A product whose terms lie on several ranks may make its
        gradient at once: then the larger of its factors and its gradient counts."""
        read: dict[int, int] = {}
        found = 0
        for index in ops:
            op = self.graph.ops[index]
            trained = [self.memory_of(t) in self._parameters and t in self._needs_gradient for t in op.inputs]
            if op.kind not in ("contraction", "gather") or not any(trained):
                continue
            made = sum(held(index, len(op.inputs) + i) for i in range(len(op.outputs)))
            given = {self.memory_of(t): held(index, i) for i, t in enumerate(op.inputs) if not trained[i]}
            weights = sum(held(index, i) for i, is_trained in enumerate(trained) if is_trained)
            within = set(cut.of_labels(index, op)) - {label for dims in op.output_labels for label in dims}
            found += max(made, weights - sum(given.values())) if within else made
            read.update((root, max(size, read.get(root, 0))) for root, size in given.items())
        return found + sum(read.values())

    def _entering(self, unit: Unit, made_here: Collection[int]) -> Iterator[int]:
        """The activations that come from earlier units and through which a gradient flows."""
        for op in self.graph.ops[unit.first_op : unit.end_op]:
            for t in op.inputs:
                if t not in made_here and t in self._needs_gradient and t not in self._parameters:
                    yield t

    def shared(self, units: Sequence[Unit]) -> tuple[SharedValue, ...]:
        """The values that several units hold for their backward passes, those kept whole and those that enter; and
        those that enter a unit which does not keep them. The latter stay where they come from another rank."""
        keepers: dict[int, dict[int, None]] = {}
        enterers: dict[int, dict[int, None]] = {}
        for unit in units:
            ops = range(unit.first_op, unit.end_op)
            made_here = {t for i in ops for t in self.graph.ops[i].outputs}
            for index in ops:
                for root in self._kept.by(self.graph.ops[index]):
                    keepers.setdefault(root, {})[unit.index] = None
            for tensor in self._entering(unit, made_here):
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

    def _is_read_by_a_product(self, tensor: int) -> bool:
        return any(self._is_far(user) for user in self._users.get(tensor, []))

    def memory_of(self, tensor: int) -> int:
        """The tensor whose memory this one shares; itself where it is no view."""
        return self._alias.get(tensor, tensor)

    def _product(self, op: Op, batch: int, ways: Mapping[int, int], size_bytes: int) -> Product:
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

    def _unfused_bytes(
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

    def _chains(self, unit: Unit) -> int:
        """The number of kernels that the ops beside the products make when those that feed each other are fused: the
        connected parts of the unit without its products. However finely a framework decomposes them, the number is the
        same."""
        chain: dict[int, int] = {}  # memory → an op of its chain
        parent: dict[int, int] = {}

        def root(op: int) -> int:
            while parent[op] != op:
                op = parent[op]
            return op

        for index in range(unit.first_op, unit.end_op):
            op = self.graph.ops[index]
            if op.kind in FREE_KINDS or op.kind in _ALONE_KINDS:
                continue
            parent[index] = index
            for tensor in op.inputs:
                if (before := chain.get(self.memory_of(tensor))) is not None:
                    parent[root(before)] = index
            chain.update((tensor, index) for tensor in op.outputs)
        return sum(parent[op] == op for op in parent)

    def _is_far(self, user: int) -> bool:
        """Whether the op, or what its view feeds, is a product."""
        op = self.graph.ops[user]
        if op.kind == "view":
            return any(self._is_far(u) for t in op.outputs for u in self._users.get(t, []))
        return op.kind in _ALONE_KINDS
