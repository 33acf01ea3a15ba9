"""Megatron's GPT as a graph, written out without a framework, so that published runs of it can be predicted.

The block is that of arXiv 1909.08053 as Megatron-LM ran it up to 2022: fused q|k|v, attention as two products around a
softmax (not one kernel), dropout after the softmax and after both projections, GELU, biases everywhere, a head tied to
the embedding, learned positions, the loss in float32. A published run of it with a fused attention kernel has
``fused_attention=True``.
"""

from dataclasses import dataclass, field

from shardwright.core.capabilities import Capabilities
from shardwright.core.execution import Execution
from shardwright.core.model.graph import Call, Graph, Op, OpKind, Parameter, Tensor, TensorRole
from shardwright.core.rules import op_rules as L

CAPABILITIES = Capabilities(
    framework="published",
    axes=("pp", "dp", "tp"),
    split_backward=True,
    uneven_shards=False,
    partial_layouts=True,
    block_layouts=True,
    point_to_point=True,
    single_controller=False,
)
EXECUTION = Execution("megatron-lm", "2022", tensor_chunks=1)
"""Kernels fused by hand but for the loss and a softmax of few heads, and no traffic hidden but messages between
stages."""
_B = 2
"""The batch at which shapes are handed to the label rules."""


@dataclass
class _Builder:
    """Collects tensors, ops, calls and parameters; a dim of -1 is the batch."""

    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=lambda: [Call("", 0)])
    parameters: list[Parameter] = field(default_factory=list)
    call: int = 0

    def tensor(
        self,
        shape: tuple[int, ...],
        role: TensorRole = "activation",
        name: str = "",
        dtype: str = "float32",
        *,
        stays_wide: bool = False,
    ) -> int:
        fixed = tuple(0 if s == -1 else s for s in shape)
        self.tensors.append(Tensor(fixed, tuple(int(s == -1) for s in shape), dtype, role, name, stays_wide))
        return len(self.tensors) - 1

    def parameter(self, name: str, *shape: int, aliases: tuple[str, ...] = ()) -> int:
        tensor = self.tensor(shape, "parameter", name)
        self.parameters.append(Parameter(name, tensor, aliases))
        return tensor

    def enter(self, path: str) -> None:
        self.calls.append(Call(path, 0))
        self.call = len(self.calls) - 1

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.tensors[tensor].shape(_B)

    def op(
        self,
        kind: OpKind,
        name: str,
        inputs: list[int],
        out: tuple[int, ...],
        labelled: L.Labelled,
        *,
        stays_wide: bool = False,
    ) -> int:
        is_float = stays_wide or any(self.tensors[t].is_floating for t in inputs)
        result = self.tensor(out, dtype="float32" if is_float else "int64", stays_wide=stays_wide)
        self.ops.append(
            Op(kind, name, tuple(inputs), (result,), labelled.labels, labelled.special, labelled.offsets, self.call)
        )
        return result

    def like(self, tensor: int) -> tuple[int, ...]:
        value = self.tensors[tensor]
        return tuple(-1 if s else f for f, s in zip(value.fixed, value.per_sample, strict=True))

    def elementwise(self, name: str, *inputs: int, kind: OpKind = "elementwise") -> int:
        widest = max(inputs, key=lambda t: len(self.shape(t)))
        labelled = L.elementwise([self.shape(t) for t in inputs], [self.shape(widest)])
        return self.op(kind, name, list(inputs), self.like(widest), labelled)

    def linear(self, x: int, path: str, rows: int, columns: int) -> int:
        weight = self.parameter(f"{path}.weight", rows, columns)
        out = (-1, self.tensors[x].fixed[1], columns)
        y = self.op("contraction", "mm", [x, weight], out, L.contraction("bsk", "kn", "bsn"))
        return self.elementwise("add", y, self.parameter(f"{path}.bias", columns))

    def norm(self, x: int, path: str) -> int:
        width = self.tensors[x].fixed[-1]
        y = self.op("normalization", "layer_norm", [x], self.like(x), L.over_dims(self.shape(x), [2], "statistic"))
        y = self.elementwise("mul", y, self.parameter(f"{path}.weight", width))
        return self.elementwise("add", y, self.parameter(f"{path}.bias", width))

    def dropout(self, x: int) -> int:
        return self.elementwise("dropout", x, kind="dropout")


def gpt(
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int = 51200,
    *,
    fused_attention: bool = False,
    feed_forward: int | None = None,
) -> Graph:
    """The graph of a GPT, loss included."""
    b = _Builder()
    inner = feed_forward or 4 * hidden
    inputs = [b.tensor((-1, sequence), "input", name, "int64") for name in ("tokens", "targets")]
    table = b.parameter("embedding.weight", vocabulary, hidden, aliases=("head.weight",))
    b.enter("embedding")
    shape = (-1, sequence, hidden)
    x = b.op("gather", "embedding", [table, inputs[0]], shape, L.gather((vocabulary, hidden), 0, (_B, sequence)))
    x = b.elementwise("add", x, b.parameter("positions", sequence, hidden))
    x = b.dropout(x)
    for layer in range(layers):
        path = f"layers.{layer}"
        b.enter(path)
        y = _attention(b, b.norm(x, f"{path}.norm_1"), path, hidden, heads, sequence, fused_attention)
        x = b.elementwise("add", x, b.dropout(y))
        y = b.linear(b.norm(x, f"{path}.norm_2"), f"{path}.up", hidden, inner)
        y = b.linear(b.elementwise("gelu", y), f"{path}.down", inner, hidden)
        x = b.elementwise("add", x, b.dropout(y))
    b.enter("final_norm")
    x = b.norm(x, "final_norm")
    b.enter("head")
    wide = (-1, sequence, vocabulary)
    logits = b.op("contraction", "mm", [x, table], wide, L.contraction("bsk", "nk", "bsn"))
    b.call = 0
    loss = _loss(b, logits, inputs[1])
    return Graph(
        CAPABILITIES,
        f"GPT {layers} × {hidden}",
        tuple(b.tensors),
        tuple(b.ops),
        tuple(b.calls),
        tuple(b.parameters),
        tuple(inputs),
        (loss,),
        _B,
        execution=EXECUTION,
    )


def _loss(b: _Builder, logits: int, targets: int) -> int:
    """The loss over a vocabulary that may be split, as Megatron-LM computes it, op by op in float32
    (megatron/core/tensor_parallel/cross_entropy.py): which targets are the rank's own, and the softmax in parts. Those
    parts and their backward, which is written by hand, move 52 bytes for each logit; one op in their place, 42."""
    by_token, by_word = b.like(targets), b.like(logits)
    mask = b.elementwise("or", b.elementwise("lt", targets), b.elementwise("ge", targets))
    own = b.elementwise("where", b.elementwise("sub", targets), mask)
    shape = b.shape(logits)
    logits = b.op("elementwise", "float", [logits], by_word, L.elementwise([shape], [shape]), stays_wide=True)
    over_words = L.over_dims(shape, [2], "statistic")
    logp = b.op("softmax", "log_softmax", [logits], by_word, over_words, stays_wide=True)
    picking = L.Labelled(((0, 1, 2), (0, 1), (0, 1)), ((2, "index"),))
    picked = b.op("gather", "nll", [logp, own], by_token, picking, stays_wide=True)
    return b.op("reduction", "mean", [picked], (), L.reduction(b.shape(picked), [0, 1]), stays_wide=True)


def _attention(b: _Builder, y: int, path: str, hidden: int, heads: int, sequence: int, fused: bool) -> int:
    width = hidden // heads
    qkv = b.linear(y, f"{path}.qkv", hidden, 3 * hidden)
    parts = [b.tensor((-1, sequence, hidden)) for _ in range(3)]
    cut = L.parts(b.shape(qkv), 2, [b.shape(t) for t in parts], [0, hidden, 2 * hidden])
    b.ops.append(Op("view", "split", (qkv,), tuple(parts), cut.labels, cut.special, cut.offsets, b.call))
    by_head = []
    four = (-1, sequence, heads, width)
    for part in parts:
        v = b.op("view", "view", [part], four, L.reshape(b.shape(part), (_B, *four[1:])))
        by_head.append(b.op("view", "transpose", [v], (-1, heads, sequence, width), L.transpose((0, 2, 1, 3))))
    q, k, v = by_head
    if fused:
        labelled = L.attention("bhsd", "bhtd", "bhtd", "bhsd")
        a = b.op("attention", "attention", [q, k, v], (-1, heads, sequence, width), labelled)
    else:
        square = (-1, heads, sequence, sequence)
        scores = b.op("contraction", "bmm", [q, k], square, L.contraction("bhsd", "bhtd", "bhst"))
        weights = b.op("softmax", "softmax", [scores], square, L.over_dims(b.shape(scores), [3], "statistic"))
        labelled = L.contraction("bhst", "bhtd", "bhsd")
        a = b.op("contraction", "bmm", [b.dropout(weights), v], (-1, heads, sequence, width), labelled)
    a = b.op("view", "transpose", [a], four, L.transpose((0, 2, 1, 3)))
    a = b.op("view", "view", [a], (-1, sequence, hidden), L.reshape((_B, *four[1:]), (_B, sequence, hidden)))
    return b.linear(a, f"{path}.projection", hidden, hidden)
