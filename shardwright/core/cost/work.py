"""What a unit does: FLOPs, bytes moved, bytes kept for the backward pass, and what splitting a dim adds.

Counted from the graph, never fitted. The backward pass follows from the kinds of op: a contraction runs once more for
every operand that needs a gradient; the bytes of the rest are those of the forward pass read again with the gradients.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from shardwright.core.cost.kept import Kept, aliases
from shardwright.core.cost.live import LiveBytes
from shardwright.core.fold import Unit
from shardwright.core.graph import ITEM_BYTES, Graph, Op
from shardwright.core.rules.axes import Dim

Precision = Literal["fp32", "bf16", "fp16"]
PRECISION_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

FREE_KINDS = frozenset({"view", "create"})
PRODUCT_KINDS = frozenset({"contraction", "attention"})


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product or attention, on one rank."""

    flops: int
    size_bytes: int
    """Operands read and result written."""
    batches: int
    m: int
    n: int
    k: int
    """``batches`` products of m × k by k × n; all 0 for an attention in one kernel."""
    backward_input: float
    """The backward for the activations, as a multiple of the forward's FLOPs."""
    backward_weight: float


@dataclass(frozen=True, slots=True)
class UnitWork:
    """One microbatch of one unit on one rank of the tensor axis."""

    products: tuple[Product, ...]
    vector_bytes: int
    """Memory traffic of everything else in the forward pass, chains of elementwise ops fused."""
    kernels: int
    saved_bytes: int
    """Activations kept for the backward pass when nothing is recomputed."""
    saved_selective_bytes: int
    """The same with the softmax part of attention recomputed (arXiv 2205.05198, section 5)."""
    selective_products: tuple[Product, ...]
    """The products that selective recompute runs once more."""
    selective_vector_bytes: int
    """The traffic of the rest that it runs once more."""
    unfused_dropout_bytes: int
    """Kept beside ``saved_bytes`` where dropout is no kernel of its own: masks as wide as the values, and of attention
    with dropout the softmax, the mask and their product."""
    unfused_dropout_selective_bytes: int
    """The same beside ``saved_selective_bytes``."""
    entering_bytes: int
    """Activations that come from earlier units: all that is kept under full recompute."""
    passing_bytes: int
    """The most that a forward and backward hold beside what is kept: values and gradients under way."""
    forward_reduced: tuple[int, ...]
    """Bytes of every all-reduce over the tensor axis in the forward pass."""
    backward_reduced: tuple[int, ...]
    backward_gathered: tuple[int, ...] = ()
    """Bytes of every operand that sequence parallelism gathers again for the gradient of a weight."""

    @property
    def forward_flops(self) -> int:
        return sum(p.flops for p in self.products)

    @property
    def backward_flops(self) -> float:
        return sum(p.flops * (p.backward_input + p.backward_weight) for p in self.products)


def contraction_flops(graph: Graph, op: Op, batch: int) -> int:
    """2 · (product of all label sizes) for a contraction; both products of an attention; 0 for other kinds."""
    if op.kind == "contraction":
        return 2 * math.prod(graph.label_sizes(op, batch).values())
    if op.kind == "attention":
        query, _key, value = (graph.tensors[t].shape(batch) for t in op.inputs[:3])
        labels = op.input_labels
        sizes = graph.label_sizes(op, batch)
        keys = math.prod(sizes[x] for x in set(labels[1]) - set(labels[0]) - {-1})  # -1: one head for all queries
        return 2 * keys * (math.prod(query) + math.prod(query[:-1]) * value[-1])
    return 0


def forward_flops(graph: Graph, batch: int) -> int:
    """Matrix-product FLOPs of the whole forward pass (attention included)."""
    return sum(contraction_flops(graph, op, batch) for op in graph.ops)


class WorkCounter:
    """Counts the work of units of one graph. Holds what all units share: aliases, who uses what."""

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
        """The tensors through which a gradient reaches a trainable parameter."""
        needing = {t for t, trainable in self._parameters.items() if trainable}
        for op in self.graph.ops:
            if any(t in needing for t in op.inputs):
                needing.update(t for t in op.outputs if self.graph.tensors[t].is_floating)
        return needing

    def needs_gradient(self, tensor: int) -> bool:
        """Whether a gradient flows through the tensor to a trainable parameter."""
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
        split: Collection[Dim] = (),
        degree: int = 1,
        *,
        sequence_parallel: bool = False,
    ) -> UnitWork:
        """The work of one microbatch of ``batch`` samples with the dims in ``split`` cut into ``degree`` pieces.

        ``sequence_parallel``: what ``split`` leaves whole on every rank of the tensor axis is divided along the
        sequence (arXiv 2205.05198, section 4.2.2), and gathered only as the operand of a split product.
        """
        graph, cut = self.graph, frozenset(split)
        cut_tensors = {tensor for tensor, _ in cut}
        kept: dict[int, int] = {}
        kept_by: dict[int, list[int]] = {}
        mask_bytes: dict[int, int] = {}
        attended: dict[int, int] = {}  # what attention with dropout keeps where it is one kernel
        products: list[Product] = []
        forward: list[int] = []
        partial_gradients: dict[int, int] = {}
        again: list[Product] = []
        vector_bytes = vector_again = scores = unfused = statistics = 0

        def gathered(tensor: int) -> int:
            size = self.size_bytes(tensor, batch, precision)
            return size // degree if tensor in cut_tensors else size

        def held(tensor: int) -> int:
            if sequence_parallel and tensor not in cut_tensors and self._along_the_sequence(tensor):
                return self.size_bytes(tensor, batch, precision) // degree
            return gathered(tensor)

        ops = range(unit.first_op, unit.end_op)
        made_here = {t: i for i in ops for t in graph.ops[i].outputs}
        for index in ops:
            op = graph.ops[index]
            labels = self._split_labels(op, cut) if cut else set()
            share = degree if labels else 1
            for label in labels:
                role = op.role(label)
                if role in ("sum", "index"):
                    forward.extend(gathered(t) for t in op.outputs)
                elif role == "statistic":
                    whole = graph.label_sizes(op, batch)[label]
                    forward.extend(2 * self.size_bytes(t, batch, precision) // whole for t in op.outputs[:1])
            if labels:
                for tensor, of_tensor in zip(op.inputs, op.input_labels, strict=True):
                    if (
                        tensor in self._needs_gradient
                        and not labels & set(of_tensor)
                        and tensor not in self._parameters
                    ):
                        root = self._root(tensor)
                        partial_gradients[root] = gathered(root)
            if op.kind in PRODUCT_KINDS:
                size = sum(gathered(t) for t in (*op.inputs, *op.outputs))
                products.append(self._product(op, batch, share, labels, degree, size))
                if index in self._kept.computed_again:
                    again.append(products[-1])
            elif op.kind not in FREE_KINDS:
                moved = self._unfused_bytes(op, unit, made_here, held)
                vector_bytes += moved
                vector_again += moved if index in self._kept.computed_again else 0
            entries = self._kept.score_elements(op, batch)
            scores += entries * PRECISION_BYTES[precision] // share
            if rows := self._kept.statistics(op, batch):
                along = sequence_parallel and self._along_the_sequence(op.outputs[0])
                statistics += rows // (degree if along else share)
            drops = self._kept.drops_scores(op)
            if drops:
                copies = self._kept.unfused_elements(op, batch) - entries
                unfused += copies * PRECISION_BYTES[precision] // share
            if roots := self._kept.by(op):
                kept_by[index] = roots
                (attended if drops else kept).update((root, held(root)) for root in roots)
            for mask in self._kept.masks(op):
                kept[-1 - mask] = mask_bytes[index] = held(mask) // PRECISION_BYTES[precision]
        unfused -= sum(size for key, size in attended.items() if key not in kept)
        kept.update(attended)
        masks = {key: size * (PRECISION_BYTES[precision] - 1) for key, size in kept.items() if key < 0}
        entering = {
            self._root(t)
            for op in graph.ops[unit.first_op : unit.end_op]
            for t in op.inputs
            if t not in made_here and t in self._needs_gradient and t not in self._parameters
        }
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
            entering_bytes=sum(held(t) for t in entering),
            passing_bytes=self._live.beside_kept(ops, kept_by, mask_bytes, held),
            forward_reduced=tuple(forward),
            backward_reduced=tuple(partial_gradients.values()),
            backward_gathered=tuple(partial_gradients.values()) if sequence_parallel else (),
        )

    def _along_the_sequence(self, tensor: int) -> bool:
        """Whether the tensor is an activation with a batch, a sequence and features."""
        value = self.graph.tensors[tensor]
        return value.role == "activation" and value.has_batch and len(value.fixed) >= 3

    def _root(self, tensor: int) -> int:
        return self._alias.get(tensor, tensor)

    def _split_labels(self, op: Op, cut: frozenset[Dim]) -> set[int]:
        return {
            label
            for tensor, labels in zip((*op.inputs, *op.outputs), op.labels, strict=True)
            for dim, label in enumerate(labels)
            if label >= 0 and (tensor, dim) in cut
        }

    def _product(self, op: Op, batch: int, share: int, split: Collection[int], degree: int, size_bytes: int) -> Product:
        flops = contraction_flops(self.graph, op, batch) // share
        if op.kind == "attention":
            # Five products against two: the scores are computed again (FlashAttention, arXiv 2205.14135).
            back = 2.5 if any(t in self._needs_gradient for t in op.inputs) else 0.0
            return Product(flops, size_bytes, 0, 0, 0, 0, back, 0.0)
        trained = [t for t in op.inputs if t in self._needs_gradient]
        weights = [t for t in trained if self._is_weight(t)]
        sizes = {
            label: max(1, size // degree) if label in split else size
            for label, size in self.graph.label_sizes(op, batch).items()
        }
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
        """A parameter, or a view or cast of one."""
        while tensor not in self._parameters:
            made = self.graph.producer.get(tensor)
            if made is None or len(self.graph.ops[made].inputs) != 1:
                return False
            tensor = self.graph.ops[made].inputs[0]
        return True

    def _unfused_bytes(self, op: Op, unit: Unit, made_here: dict[int, int], held: Callable[[int], int]) -> int:
        """Bytes that remain when chains of elementwise ops run as one kernel: operands that a product or another unit
        made, and results that one of those reads."""
        moved = 0
        for tensor in op.inputs:
            made = made_here.get(self._root(tensor))
            if made is None or self.graph.ops[made].kind in PRODUCT_KINDS:
                # A lookup reads only the rows that it returns.
                moved += held(op.outputs[0]) if op.kind == "gather" and tensor == op.inputs[0] else held(tensor)
        for tensor in op.outputs:
            users = self._users.get(tensor, [])
            if any(not unit.first_op <= u < unit.end_op or self._is_far(u) for u in users):
                moved += held(tensor)
        return moved

    def _chains(self, unit: Unit) -> int:
        """How many kernels the ops beside the products make when those that feed each other are fused: the connected
        parts of the unit without its products. However finely a framework decomposes them, the number is the same."""
        chain: dict[int, int] = {}  # memory → an op of its chain
        parent: dict[int, int] = {}

        def root(op: int) -> int:
            while parent[op] != op:
                op = parent[op]
            return op

        for index in range(unit.first_op, unit.end_op):
            op = self.graph.ops[index]
            if op.kind in FREE_KINDS or op.kind in PRODUCT_KINDS:
                continue
            parent[index] = index
            for tensor in op.inputs:
                if (before := chain.get(self._root(tensor))) is not None:
                    parent[root(before)] = index
            chain.update((tensor, index) for tensor in op.outputs)
        return sum(parent[op] == op for op in parent)

    def _is_far(self, user: int) -> bool:
        """Whether the op, or what its view feeds, is a product."""
        op = self.graph.ops[user]
        if op.kind == "view":
            return any(self._is_far(u) for t in op.outputs for u in self._users.get(t, []))
        return op.kind in PRODUCT_KINDS
