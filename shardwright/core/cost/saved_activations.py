"""The tensors that the backward pass of each op reads, which the forward pass must keep."""

import math
from collections.abc import Collection, Iterable

from shardwright.core.model.graph import Graph, Op
from shardwright.core.model.op_memory import OpBytes, at

LINEAR_NAMES = frozenset(
    {"add", "sub", "rsub", "neg", "cast", "convert_element_type", "clone", "copy", "_to_copy", "to"}
)
"""Elementwise ops whose backward reads none of their operands."""

RESULT_NAMES = frozenset({"relu", "tanh", "sigmoid", "logistic", "exp", "sqrt", "rsqrt"})
"""Elementwise ops whose backward reads their result alone."""

FLOAT32_BYTES = 4

WITH_DROPOUT = "/dropout"
"""The end of the name of an attention that drops entries of its scores."""


def _kept_by_call(op: Op) -> list[int]:
    """The operands and results that the backward of a call reads, as its framework says."""
    assert op.memory is not None
    operands = (*op.inputs, *op.outputs)
    return [operands[place] for place in op.memory.keeps]


def aliases(graph: Graph) -> dict[int, int]:
    """Tensor → the tensor whose memory it shares, for the results of views."""
    roots: dict[int, int] = {}
    for op in graph.ops:
        if op.kind == "view" and op.inputs:
            source = roots.get(op.inputs[0], op.inputs[0])
            for tensor in op.outputs:
                roots[tensor] = source
    return roots


def _parts(graph: Graph, alias: dict[int, int]) -> dict[int, int]:
    """Tensor → the tensor that it is a part of: a part that is kept keeps the memory of the whole."""
    roots: dict[int, int] = {}
    for op in graph.ops:
        if op.kind in ("slice", "view") and op.inputs:
            source = op.inputs[0]
            source = roots.get(source, alias.get(source, source))
            if op.kind == "slice" or source in roots.values():
                roots.update((tensor, source) for tensor in op.outputs)
    return roots


class Kept:
    """The tensors that each op keeps for its backward, but those ``apart``, which are there anyway."""

    def __init__(
        self, graph: Graph, alias: dict[int, int], needs_gradient: Collection[int], apart: Collection[int] = ()
    ) -> None:
        self.graph, self._apart = graph, apart
        self.roots = alias | _parts(graph, alias)
        """Tensor → the tensor whose memory is kept for it: the whole, for views and parts."""
        self._needs_gradient = needs_gradient
        self._parameters = {p.tensor for p in graph.parameters}
        self._scores: set[int] = set()
        self.computed_again: set[int] = set()
        """The ops that selective recompute runs once more: from the scores to what the next product reads."""
        self._find_attention()

    def by(self, op: Op) -> list[int]:
        """The activations (as memory: views resolved) that the backward of the op reads."""
        return self._activations(self.read_by_backward(op))

    def by_unfused(self, op: Op) -> list[int]:
        """The same where an attention with dropout is no kernel of its own: the operands that it keeps as they are."""
        if not self.drops_scores(op):
            return self.by(op)
        return self._activations(_kept_by_call(op)) if op.memory is not None else []

    def read_by_backward(self, op: Op) -> list[int]:
        """All tensors that the backward of the op reads, parameters and the batch among them."""
        if not any(t in self._needs_gradient for t in op.inputs):
            return []
        if op.memory is not None and op.kind != "attention":
            return _kept_by_call(op)
        trained = [place for place, t in enumerate(op.inputs) if t in self._needs_gradient]
        # Each operand of a product is read for the gradient of the others.
        factors = [t for place, t in enumerate(op.inputs) if any(other != place for other in trained)]
        wanted: list[int] = []
        match op.kind:
            case "contraction":
                wanted = factors
            case "elementwise" if op.base_name == "mul":
                wanted = [t for t in factors if self._is_as_made(t)]
            case "attention":
                # A mask of numbers is kept too, but where it is trained: its gradient needs the scores alone.
                masks = [t for t in op.inputs[3:] if self.graph.tensors[t].is_floating]
                trained_mask = any(t in self._needs_gradient for t in masks)
                wanted = [*op.inputs[:3], *([] if trained_mask else masks), *op.outputs]
            case "softmax":
                wanted = list(op.outputs)
            case "elementwise" if op.base_name in RESULT_NAMES:
                wanted = list(op.outputs)
            case "normalization" | "opaque" | "sort":
                wanted = list(op.inputs)
            case "gather" | "scatter":
                wanted = list(op.inputs[1:])
            case "elementwise" if not self._is_linear(op):
                wanted = [t for t in op.inputs if self._is_as_made(t)]
        return wanted

    def _activations(self, wanted: Iterable[int]) -> list[int]:
        """The memory of some tensors, as far as it is that of activations."""
        roots = dict.fromkeys(self.roots.get(t, t) for t in wanted)
        # The batch is there anyway, all of a step.
        held = (t for t in roots if t not in self._parameters and self.graph.tensors[t].role == "activation")
        return [t for t in held if t not in self._apart]

    def seen(self, op: Op, precision: str) -> OpBytes | None:
        """The bytes of an op that is trained through, where the framework says them. Those of an attention are those
        of a kernel of its own, but for devices without one (`unfused`)."""
        if op.memory is None or op.kind == "attention" or not any(t in self._needs_gradient for t in op.inputs):
            return None
        return op.memory.bytes_of(precision)

    def masks(self, op: Op) -> tuple[int, ...]:
        """The results of which a one-byte mask is kept."""
        return op.outputs[:1] if op.kind == "dropout" and any(t in self._needs_gradient for t in op.inputs) else ()

    def score_bytes(self, op: Op, batch: int, width: int) -> int:
        """Bytes of the attention scores that are kept where the bias is trained, as its gradient needs them; else 0.

        Such an attention is computed in fp32 at least, op by op: where its operands are of fewer bytes (``width`` of an
        entry), copies of them are kept instead, and the bytes by which these are larger count too."""
        if op.kind != "attention" or not any(t in self._needs_gradient for t in op.inputs[3:]):
            return 0
        wide = max(width, FLOAT32_BYTES)
        operands = sum(self.graph.tensors[t].elements(batch) for t in op.inputs[:3])
        return self._scores_of(op, batch) * wide + operands * (wide - width)

    def widened(self, op: Op) -> tuple[int, ...]:
        """The positions of the operands of which a copy in the precision of the others is kept: a mask of true and
        false that is added to the scores of an attention in one kernel."""
        if op.kind != "attention" or not any(t in self._needs_gradient for t in op.inputs):
            return ()
        return tuple(i for i, t in enumerate(op.inputs) if i >= 3 and self.graph.tensors[t].dtype == "bool")

    def drops_scores(self, op: Op) -> bool:
        """Whether the op is an attention with dropout that is trained through."""
        dropping = op.kind == "attention" and op.name.endswith(WITH_DROPOUT)
        return dropping and any(t in self._needs_gradient for t in op.inputs)

    def unfused(self, op: Op, batch: int, precision: str, width: int) -> tuple[int, list[int]]:
        """What an attention with dropout keeps where it is no kernel of its own: bytes, and the activations among its
        operands. Where the framework does not say it, in fp32 at least: copies of query, key and value, the softmax,
        the mask, and the product of the two."""
        if op.memory is not None:
            return at(op.memory.bytes_of(precision).kept, batch), self.by_unfused(op)
        operands = sum(self.graph.tensors[t].elements(batch) for t in op.inputs[:3])
        return (operands + 3 * self._scores_of(op, batch)) * max(width, FLOAT32_BYTES), self.by_unfused(op)

    def unfused_scores_bytes(self, op: Op, batch: int, width: int) -> int:
        """Bytes of the product of queries and keys in such an attention."""
        return self._scores_of(op, batch) * max(width, FLOAT32_BYTES)

    def statistics(self, op: Op, batch: int) -> int:
        """Bytes that are kept of results beside tensors of the graph: the fp32 mean and scale of each row of a
        normalisation, the logarithm of each row's sum of an attention, the place of each maximum of PyTorch's
        max-pooling."""
        if not op.outputs or not any(t in self._needs_gradient for t in op.inputs):
            return 0
        out = self.graph.tensors[op.outputs[0]].shape(batch)
        if op.kind == "attention":
            return 4 * math.prod(out[:-1])
        if op.base_name.startswith("max_pool"):
            return 8 * math.prod(out)
        if op.kind != "normalization":
            return 0
        rows = [n for n, x in zip(out, op.output_labels[0], strict=True) if op.role(x) != "statistic"]
        return 2 * 4 * math.prod(rows)

    def _scores_of(self, op: Op, batch: int) -> int:
        sizes = self.graph.label_sizes(op, batch)
        labels = {x for x in (*op.input_labels[0][:-1], *op.input_labels[1][:-1]) if x >= 0}
        return math.prod(sizes[x] for x in labels)

    def is_attention_score(self, key: int) -> bool:
        """Whether the value kept under this key (a tensor, or -1 - tensor for a mask) lies between a softmax and the
        product that reads it: selective recompute keeps none of it."""
        return (key if key >= 0 else -1 - key) in self._scores

    def _find_attention(self) -> None:
        for op in self.graph.ops:
            if op.kind == "contraction":
                for tensor in op.inputs:
                    passed = self._back_to_softmax(tensor)
                    self._scores.update(passed)
                    self.computed_again.update(self.graph.producer[t] for t in passed)
                    if passed:
                        self._back_to_product(self.graph.ops[self.graph.producer[passed[-1]]].inputs[0])

    def _back_to_product(self, tensor: int) -> None:
        """Add the ops from a softmax's input back to the product that makes the scores."""
        while (made := self.graph.producer.get(tensor)) is not None:
            op = self.graph.ops[made]
            if op.kind not in ("contraction", "elementwise", "view", "copy"):
                return
            self.computed_again.add(made)
            if op.kind == "contraction":
                return
            tensor = op.inputs[0]

    def _back_to_softmax(self, tensor: int) -> list[int]:
        """The tensors from here back to a softmax's result, through dropout, casts and views; none if there is none."""
        passed: list[int] = []
        while (made := self.graph.producer.get(tensor)) is not None:
            op = self.graph.ops[made]
            passed.append(tensor)
            if op.kind == "softmax":
                return passed
            if op.kind not in ("dropout", "view", "copy") and not (op.kind == "elementwise" and len(op.inputs) == 1):
                break
            tensor = op.inputs[0]
        return []

    def _is_as_made(self, tensor: int) -> bool:
        """Whether the tensor is no normalised value. Such a value is computed again from the norm's input, which is
        kept already."""
        made = self.graph.producer.get(tensor)
        return made is None or self.graph.ops[made].kind != "normalization"

    def _is_linear(self, op: Op) -> bool:
        """Whether the op is a sum, a cast or a product by a constant, whose backward needs no operand again."""
        name = op.base_name
        if op.name.endswith("/bias"):  # of an op that the capture took apart: the sum with its bias
            return True
        return name in LINEAR_NAMES or (name in ("mul", "div") and len(op.inputs) == 1)
