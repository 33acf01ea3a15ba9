"""Hand-written graphs for tests of the core: no framework is needed."""

from dataclasses import dataclass, field

from shardwright.core.capabilities import Capabilities
from shardwright.core.model.graph import Call, Graph, Op, OpKind, Parameter, Tensor, TensorRole
from shardwright.core.rules import op_rules as L

CAPABILITIES = Capabilities(
    framework="toy",
    axes=("pp", "dp", "tp"),
    split_backward=True,
    uneven_shards=False,
    partial_layouts=True,
    block_layouts=True,
    point_to_point=True,
    single_controller=True,
)
BATCH = 2


@dataclass
class Builder:
    """Collects tensors and ops. Shapes are given at batch 2; a dim of exactly -1 is the batch."""

    framework: str = "toy"
    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=lambda: [Call("", 0)])
    parameters: list[Parameter] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    call: int = 0

    def tensor(self, shape: tuple[int, ...], role: TensorRole = "activation", name: str = "", dtype="float32") -> int:
        fixed = tuple(0 if s == -1 else s for s in shape)
        slopes = tuple(1 if s == -1 else 0 for s in shape)
        self.tensors.append(Tensor(fixed, slopes, dtype, role, name))
        return len(self.tensors) - 1

    def parameter(self, name: str, *shape: int, aliases: tuple[str, ...] = ()) -> int:
        tensor = self.tensor(shape, "parameter", name)
        self.parameters.append(Parameter(name, tensor, aliases))
        return tensor

    def input(self, name: str, *shape: int, dtype: str = "int64") -> int:
        tensor = self.tensor(shape, "input", name, dtype)
        self.inputs.append(tensor)
        return tensor

    def enter(self, path: str) -> int:
        """Open a module call under the current one; returns the one to go back to."""
        before = self.call
        occurrence = sum(c.path == path for c in self.calls)
        self.calls.append(Call(path, before, occurrence))
        self.call = len(self.calls) - 1
        return before

    def leave(self, before: int) -> None:
        self.call = before

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.tensors[tensor].shape(BATCH)

    def op(self, kind: OpKind, name: str, inputs: list[int], out: tuple[int, ...], labelled: L.Labelled) -> int:
        result = self.tensor(out)
        self.ops.append(
            Op(kind, name, tuple(inputs), (result,), labelled.labels, labelled.special, labelled.offsets, self.call)
        )
        return result

    def elementwise(self, name: str, *inputs: int) -> int:
        widest = max(inputs, key=lambda t: len(self.shape(t)))
        value = self.tensors[widest]
        out = tuple(-1 if s else f for f, s in zip(value.fixed, value.per_sample, strict=True))
        shapes = [self.shape(t) for t in inputs]
        return self.op("elementwise", name, list(inputs), out, L.elementwise(shapes, [self.shape(widest)]))

    def linear(self, x: int, weight: int, bias: int | None, width: int, *, transposed: bool = False) -> int:
        right = "nk" if transposed else "kn"
        out = (-1, self.tensors[x].fixed[1], width)
        y = self.op("contraction", "mm", [x, weight], out, L.contraction("bsk", right, "bsn"))
        return y if bias is None else self.elementwise("add", y, bias)

    def norm(self, x: int, prefix: str, width: int) -> int:
        out = (-1, self.tensors[x].fixed[1], width)
        y = self.op("normalization", "layer_norm", [x], out, L.over_dims(self.shape(x), [2], "statistic"))
        y = self.elementwise("mul", y, self.parameter(f"{prefix}.weight", width))
        return self.elementwise("add", y, self.parameter(f"{prefix}.bias", width))

    def build(self, *outputs: int, name: str = "Toy") -> Graph:
        return Graph(
            CAPABILITIES,
            name,
            tuple(self.tensors),
            tuple(self.ops),
            tuple(self.calls),
            tuple(self.parameters),
            tuple(self.inputs),
            outputs,
            BATCH,
        )


def decoder(
    layers: int = 4,
    hidden: int = 32,
    heads: int = 4,
    vocabulary: int = 64,
    sequence: int = 16,
    *,
    transposed: bool = False,
    calls: bool = True,
    name: str = "Toy",
) -> Graph:
    """A GPT-2-like decoder: fused q|k|v, tied head, loss inside. ``transposed`` keeps weights as (out, in);
    without ``calls`` it looks like a pure JAX function."""
    b = Builder()

    def enter(path: str) -> int:
        return b.enter(path) if calls else 0

    def matrix(path: str, rows: int, columns: int) -> int:
        return b.parameter(path, *((columns, rows) if transposed else (rows, columns)))

    tokens = b.input("tokens", -1, sequence)
    targets = b.input("targets", -1, sequence)
    table = b.parameter("wte.weight", vocabulary, hidden, aliases=("head.weight",))
    back = enter("wte")
    x = b.op(
        "gather", "embedding", [table, tokens], (-1, sequence, hidden), L.gather((vocabulary, hidden), 0, (2, sequence))
    )
    b.leave(back)
    for layer in range(layers):
        back = enter(f"h.{layer}")
        p = f"h.{layer}"
        y = b.norm(x, f"{p}.ln_1", hidden)
        qkv = b.linear(
            y, matrix(f"{p}.c_attn", hidden, 3 * hidden), b.parameter(f"{p}.c_attn_b", 3 * hidden), 3 * hidden,
            transposed=transposed,
        )  # fmt: skip
        parts = [b.tensor((-1, sequence, hidden)) for _ in range(3)]
        cut = L.parts(b.shape(qkv), 2, [b.shape(t) for t in parts], [0, hidden, 2 * hidden])
        b.ops.append(Op("slice", "split", (qkv,), tuple(parts), cut.labels, cut.special, cut.offsets, b.call))
        width = hidden // heads
        split = []
        for part in parts:
            four = (2, sequence, heads, width)
            v = b.op("view", "view", [part], (-1, sequence, heads, width), L.reshape(b.shape(part), four))
            split.append(b.op("view", "transpose", [v], (-1, heads, sequence, width), L.transpose((0, 2, 1, 3))))
        a = b.op("attention", "sdpa", split, (-1, heads, sequence, width), L.attention("bhsd", "bhtd", "bhtd", "bhsd"))
        a = b.op("view", "transpose", [a], (-1, sequence, heads, width), L.transpose((0, 2, 1, 3)))
        merged = L.reshape((2, sequence, heads, width), (2, sequence, hidden))
        a = b.op("view", "view", [a], (-1, sequence, hidden), merged)
        a = b.linear(a, matrix(f"{p}.proj", hidden, hidden), b.parameter(f"{p}.proj_b", hidden), hidden,
                     transposed=transposed)  # fmt: skip
        x = b.elementwise("add", x, a)
        y = b.norm(x, f"{p}.ln_2", hidden)
        y = b.linear(y, matrix(f"{p}.fc", hidden, 4 * hidden), b.parameter(f"{p}.fc_b", 4 * hidden), 4 * hidden,
                     transposed=transposed)  # fmt: skip
        y = b.elementwise("gelu", y)
        y = b.linear(y, matrix(f"{p}.out", 4 * hidden, hidden), b.parameter(f"{p}.out_b", hidden), hidden,
                     transposed=transposed)  # fmt: skip
        x = b.elementwise("add", x, y)
        b.leave(back)
    back = enter("ln_f")
    x = b.norm(x, "ln_f", hidden)
    b.leave(back)
    back = enter("head")
    logits = b.op("contraction", "mm", [x, table], (-1, sequence, vocabulary), L.contraction("bsk", "nk", "bsn"))
    b.leave(back)
    logp = b.op("softmax", "log_softmax", [logits], (-1, sequence, vocabulary),
                L.over_dims(b.shape(logits), [2], "statistic"))  # fmt: skip
    picked = b.op("gather", "nll", [logp, targets], (-1, sequence),
                  L.Labelled(((0, 1, 2), (0, 1), (0, 1)), ((2, "index"),)))  # fmt: skip
    loss = b.op("reduction", "mean", [picked], (), L.reduction(b.shape(picked), [0, 1]))
    return b.build(loss, name=name)
