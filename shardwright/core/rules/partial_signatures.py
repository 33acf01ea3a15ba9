"""The ways of partial values through an op: the operands that may be partial along an axis, and the outputs then.

No operand is split here: each is replicated or partial. (A scatter that adds along one dim is the exception.)
Contractions are linear in each operand, moves pass any reduction on, and entrywise ops follow `core.rules.linearity`.
Statistics, sorting and lookup positions pass nothing.
"""

from collections.abc import Iterator

from shardwright.core.layout.placements import Partial, Placement, Reduction, Replicate, Split
from shardwright.core.layout.signature import IDEMPOTENT, LINEAR, REDUCTIONS, Signature
from shardwright.core.model.graph import FLOATING, Graph, Op
from shardwright.core.rules import linearity as F


def partial_signatures(graph: Graph, op: Op) -> tuple[Signature, ...]:
    """The signatures of an op with partial values along an axis, the replicated one left out."""
    return tuple(dict.fromkeys(_all(graph, op)))


def _all(graph: Graph, op: Op) -> Iterator[Signature]:
    name = op.base_name
    match op.kind:
        case "contraction":
            for which in range(len(op.inputs)):
                yield from _pass(op, (which,), LINEAR)
        case "attention":
            yield from _pass(op, (2,), LINEAR)
        case "dropout":
            yield from _pass(op, (0,), LINEAR)
        case "view":
            if _same_dtype(graph, op):
                yield from _pass(op, (0,), REDUCTIONS)
        case "slice":
            yield from _pass(op, (0,), REDUCTIONS)
        case "concat":
            yield from _pass(op, tuple(range(len(op.inputs))), REDUCTIONS)
        case "copy":
            yield from _copies(op, name)
        case "gather":
            yield from _pass(op, (0,), REDUCTIONS)
        case "scatter":
            yield from _scatters(op, name)
        case "reduction":
            yield from _reductions(op, name)
        case "elementwise":
            yield from _elementwise(graph, op, name)
        case "normalization" | "softmax" | "sort" | "create" | "opaque":
            return


def _place(op: Op, held: tuple[int, ...], before: Reduction, after: Reduction) -> Signature:
    inputs: list[Placement] = [Partial(before) if i in held else Replicate() for i in range(len(op.inputs))]
    return Signature(tuple(inputs), (Partial(after),) * len(op.outputs))


def _pass(op: Op, held: tuple[int, ...], reductions: tuple[Reduction, ...]) -> Iterator[Signature]:
    """The signatures in which the operands ``held`` are partial, and the result is partial by the same reduction."""
    for reduction in reductions:
        yield _place(op, held, reduction, reduction)


def _same_dtype(graph: Graph, op: Op) -> bool:
    return len({graph.tensors[t].dtype for t in (*op.inputs, *op.outputs)}) == 1


def _copies(op: Op, name: str) -> Iterator[Signature]:
    if name in F.PADDING:
        yield from _pass(op, (0,), IDEMPOTENT)
    elif name in F.INTERPOLATING:
        yield from _pass(op, (0,), LINEAR)
    elif name in F.SETTING_SCATTERS:
        yield from _pass(op, (0, 1), REDUCTIONS)
    else:
        yield from _pass(op, (0,), REDUCTIONS)


def _scatters(op: Op, name: str) -> Iterator[Signature]:
    """The signatures of an op that writes its last operand into a copy of the first."""
    written = len(op.inputs) - 1
    if name.removesuffix("/write") != name or name in F.SETTING_SCATTERS:
        yield from _pass(op, (0, written), REDUCTIONS)
    elif name in F.ADDING_SCATTERS:
        yield from _pass(op, (0, written), LINEAR)
        yield from _pass(op, (0,), ("max", "min"))
        # Along the scattered dim, every rank may add its shard of the written values to its term of the target.
        if len(op.inputs) == 3 and op.labels[0].count(-1) == 1 and len(op.labels[1]) == len(op.labels[0]):
            part: Placement = Split(op.labels[0].index(-1))
            yield Signature((Partial("sum"), part, part), (Partial("sum"),))


def _reductions(op: Op, name: str) -> Iterator[Signature]:
    if len(op.inputs) != 1 or len(op.outputs) != 1:
        return
    if name in F.PASSES_SUMS or name.endswith(("/mean", "/sum")):
        yield from _pass(op, (0,), LINEAR)
    elif name in F.PASSES_MAX:
        yield from _pass(op, (0,), ("max",))
    elif name in F.PASSES_MIN:
        yield from _pass(op, (0,), ("min",))


def _elementwise(graph: Graph, op: Op, name: str) -> Iterator[Signature]:
    name = "add" if name.endswith("/bias") else "mul" if name.endswith("/weight") else name
    floating = all(graph.tensors[t].dtype in FLOATING for t in (*op.inputs, *op.outputs))
    if name in F.CHOICE and len(op.inputs) == 3:
        yield from _pass(op, F.CHOICE[name], REDUCTIONS)
    elif name in F.FILLED:
        # The filled tensor comes first in masked_fill, and after the condition in a choice with a constant.
        yield from _pass(op, (0,) if name == "masked_fill" else (1,), IDEMPOTENT)
    elif name in F.TRIANGLES:
        yield from _pass(op, (0,), REDUCTIONS)
    elif name in F.CUMULATIVE_LINEAR:
        yield from _pass(op, (0,), LINEAR)
    elif name in F.CUMULATIVE and len(op.outputs) == 1:
        yield from _pass(op, (0,), (F.CUMULATIVE[name],))
    elif len(op.inputs) == 1:
        yield from _of_one(op, name, floating)
    elif len(op.inputs) == 2:
        yield from _of_two(op, name, floating)


def _of_one(op: Op, name: str, floating: bool) -> Iterator[Signature]:
    from_torch = op.name.startswith("aten")
    if floating and (name in F.LINEAR_UNARY or (name in F.QUOTIENT and from_torch)):
        yield from _pass(op, (0,), LINEAR)
    if floating and name in F.AFFINE_UNARY:
        yield from _pass(op, (0,), ("mean",))
    # JAX keeps no trace of the side on which a constant stands, so its subtraction has no direction.
    up = name in F.UP or (name == "add") or (name in ("sub", "subtract") and from_torch)
    down = name in F.DOWN or name == "rsub"
    if up:
        yield from _pass(op, (0,), ("max", "min"))
    if down:
        yield _place(op, (0,), "max", "min")
        yield _place(op, (0,), "min", "max")


def _of_two(op: Op, name: str, floating: bool) -> Iterator[Signature]:
    if floating and name in F.ADDITIVE:
        yield from _pass(op, (0, 1), LINEAR)  # with means, one side may be replicated: it stands for a partial mean
    if floating and name in F.BILINEAR:
        yield from _pass(op, (0,), LINEAR)
        yield from _pass(op, (1,), LINEAR)
    if floating and name in F.QUOTIENT:
        yield from _pass(op, (0,), LINEAR)
    if name in F.LATTICE:
        yield from _pass(op, (0, 1), (F.LATTICE[name],))
    for which, direction in enumerate(F.BOTH.get(name, ())):
        if direction == "up":
            yield from _pass(op, (which,), ("max", "min"))
        elif direction == "down":
            yield _place(op, (which,), "max", "min")
            yield _place(op, (which,), "min", "max")
