"""The effect of each op of torch on sums over samples (`core.model.loss.program`), by the op's name."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shardwright.backends.torch.capture.ops import Ref
from shardwright.backends.torch.loss.trace_pairs import CUT_BY_NUMBERS
from shardwright.backends.torch.loss.traced_op import Counted, TracedOp
from shardwright.core.model.graph import FLOATING
from shardwright.core.model.loss import LossOp

RESHAPES = frozenset({
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "_reshape_alias",
    "_reshape_copy",
})  # fmt: skip
SAME = frozenset({
    "transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT", "adjoint", "permute", "expand", "broadcast_to", "real",
    "imag", "view_as_real", "view_as_complex", "clone", "contiguous", "alias", "flip", "roll", "rot90", "dropout",
    "select", "unbind", "movedim", "moveaxis",
})  # fmt: skip
CASTS = frozenset({"to", "_to_copy", "_autocast_to_reduced_precision", "_autocast_to_full_precision", "copy_"})
FILLS = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero_"), 0.0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1.0),
}
FILLED_BY = {"full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "fill_": "value"}
DRAWS = frozenset({
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "uniform_",
    "normal", "normal_", "exponential_", "random_", "cauchy_", "geometric_", "log_normal_",
})  # fmt: skip
PLACES = frozenset({"arange", "linspace", "logspace", "range", "randperm", "eye", "tril_indices", "triu_indices"})


def translated(call: TracedOp, *, norms_are_plain: bool) -> list[LossOp]:
    """The loss ops of a call, as `_known` gives them; "unlike" where the call is given other numbers at the other batch
    size and none of the ops takes these up."""
    found = _known(call, norms_are_plain)
    is_taken = call.name in CUT_BY_NUMBERS or any(
        op.how == "position" or (op.number is not None and op.number[0] != op.number[1]) for op in found
    )
    return found if is_taken or call.has_same_numbers() else [call.how("unlike")]


def _known(call: TracedOp, norms_are_plain: bool) -> list[LossOp]:
    if call.piece == "write":
        return [call.how("reshape" if call.name in RESHAPES and call.a.kind == "view" else "map")]
    if call.name in ("nll_loss_forward", "nll_loss2d_forward"):
        return _likelihood(call)
    if call.piece in ("mean", "sum"):
        return [call.how("mean" if call.piece == "mean" else "sum")]
    if call.piece in ("bias", "weight"):
        return [call.how("add" if call.piece == "bias" else "multiply")]
    rule = RULES.get(call.name) if not call.piece else None
    if rule is not None:
        return rule(call)
    return _by_kind(call, norms_are_plain)


def _by_kind(call: TracedOp, norms_are_plain: bool) -> list[LossOp]:
    kind = call.a.kind
    if kind == "opaque" or (kind == "create" and not call.a.inputs):
        return [call.how("opaque")]
    if kind in ("view", "copy") and len(call.a.inputs) == 1:
        return [call.how("same" if call.name in SAME else "map")]
    if kind == "contraction" and len(call.a.inputs) == 2:
        return [call.how("contract")]
    if kind == "normalization" and norms_are_plain and "batch_norm" in call.name:
        return [call.how("map", special=())]
    return [call.how("map")]


def _likelihood(call: TracedOp) -> list[LossOp]:
    """The ops of one piece of `nll_loss`: the look-up for each target, or its mean by the weights of the targets."""
    if call.piece == "total_weight":
        return _count(call)[0]
    if call.piece in ("mean", "sum"):
        ops, count = _count(call)
        total = call.values.new_value(((), ()))
        picked = call.a.inputs[0]
        dims = call.op.labels[0]
        summed = LossOp("sum", call.op.name, (picked,), (total,), (dims, ()), where=call.op.where)
        if call.piece == "sum":
            return [replace(summed, outputs=call.a.outputs)]
        mean = call.how("divide", inputs=(total, count), labels=((), (), ()), special=())
        return [summed, *ops, mean]
    return [call.how("map")]


def _count(call: TracedOp) -> tuple[list[LossOp], int]:
    target, weight = call.value_of("target"), call.value_of("weight")
    assert target is not None
    shapes = call.values.shapes
    each = call.values.new_value(shapes[target])
    count = call.a.outputs[0] if call.piece == "total_weight" else call.values.new_value(((), ()))
    rank = tuple(range(len(shapes[target][0])))
    inputs = (target,) if weight is None else (target, weight)
    weighed = LossOp(
        "map", call.op.name, inputs, (each,), (rank, rank) if weight is None else (rank, (-1,), rank),
        where=call.op.where, differentiable=False,
    )  # fmt: skip
    total = LossOp("sum", call.op.name, (each,), (count,), (rank, ()), where=call.op.where, differentiable=False)
    call.values.counted[count] = Counted(target, weight, int(call.arguments[0].get("ignore_index", -100)))
    return [weighed, total], count


def _reshape(call: TracedOp) -> list[LossOp]:
    t = call.values.traces[0].values
    same = t[call.a.inputs[0]].dtype == t[call.a.outputs[0]].dtype
    return [call.how("reshape" if same else "map")]


def _cast(call: TracedOp) -> list[LossOp]:
    values = call.values.traces[0].values
    before, after = values[call.a.inputs[0]].dtype, values[call.a.outputs[0]].dtype
    whole = before not in FLOATING
    keeps = before == after or after in FLOATING or (whole and after != "bool")
    return [call.how("same" if keeps else "map")]


def _add(call: TracedOp) -> list[LossOp]:
    alpha = call.number("alpha")
    number = call.number("other") or call.number("self")
    if alpha is not None and alpha[0] != alpha[1]:
        return [call.how("unlike")]
    if number is None:
        return [call.how("add" if len(call.a.inputs) == 2 else "map")]
    sign = -1.0 if call.name in ("sub", "subtract") else 1.0
    times = 1.0 if alpha is None else alpha[0]
    if call.name == "rsub":
        # other - alpha · self: a guard of what is negated is none
        return [call.how("add", number=number)] if times == 1.0 else [call.how("map")]
    return [call.how("add", number=(sign * times * number[0], sign * times * number[1]))]


def _multiply(call: TracedOp) -> list[LossOp]:
    number = call.number("other")
    if number is not None:
        return [call.how("scale", number=number)]
    return [call.how("multiply" if len(call.a.inputs) == 2 else "map")]


def _divide(call: TracedOp) -> list[LossOp]:
    if call.arguments[0].get("rounding_mode") is not None:
        return [call.how("map")]
    number = call.number("other")
    if number is not None:
        if 0.0 in number:
            return [call.how("map")]
        return [call.how("scale", number=(1.0 / number[0], 1.0 / number[1]))]
    return [call.how("divide" if len(call.a.inputs) == 2 else "map")]


def _reciprocal(call: TracedOp) -> list[LossOp]:
    """A reciprocal, 1 / x, as the first half of number / x."""
    op, one = call.constant((1.0, 1.0))
    return [op, call.how("divide", inputs=(one, *call.a.inputs), labels=((), *call.op.labels))]


def _negative(call: TracedOp) -> list[LossOp]:
    return [call.how("scale", number=(-1.0, -1.0))]


def _choice(call: TracedOp, names: tuple[str, str, str]) -> list[LossOp]:
    """A choice between two operands by a mask; ``names`` are those of the mask and of what is taken where it is true
    and where it is false. A number among the operands becomes a tensor."""
    ops: list[LossOp] = []
    operands: list[int] = []
    dims: list[tuple[int, ...]] = []
    given = dict(zip(call.a.inputs, call.op.labels, strict=False))
    for name in names:
        value, number = call.value_of(name), call.number(name)
        if value is None:
            if number is None:
                return [call.how("map")]
            op, value = call.constant(number)
            ops.append(op)
        operands.append(value)
        dims.append(given.get(value, ()))
    return [*ops, call.how("select", inputs=tuple(operands), labels=(*dims, call.op.labels[-1]))]


def _clamp(call: TracedOp) -> list[LossOp]:
    least, most = call.number("min"), call.number("max")
    if least is not None and most is None and call.arguments[0].get("max") is None and len(call.a.inputs) == 1:
        return [call.how("at_least", number=least)]
    return [call.how("map")]


def _larger(call: TracedOp) -> list[LossOp]:
    if len(call.a.inputs) == 2 and len(call.a.outputs) == 1:
        return [call.how("at_least")]
    return [call.how("map")]


def _sum(call: TracedOp) -> list[LossOp]:
    return [call.how("mean" if call.name == "mean" else "sum")]


def _count_nonzero(call: TracedOp) -> list[LossOp]:
    (source,) = call.a.inputs
    each = call.values.new_value(call.values.shapes[source])
    dims = call.op.labels[0]
    first = LossOp("map", call.op.name, (source,), (each,), (dims, dims), where=call.op.where, differentiable=False)
    return [first, call.how("sum", inputs=(each,), special=())]


def _fill(call: TracedOp) -> list[LossOp]:
    name = FILLED_BY.get(call.name)
    number = call.number(name) if name is not None else (FILLS[call.name], FILLS[call.name])
    if name is not None and (value := call.value_of(name)) is not None:
        return [call.how("same", inputs=(value,), labels=((), call.op.labels[-1]))]
    if number is None or call.a.inputs:
        return [call.how("map" if call.a.inputs else "opaque")]
    return [call.how("fill", number=number)]


def _empty(call: TracedOp) -> list[LossOp]:
    return [call.how("fill")]


def _draw(call: TracedOp) -> list[LossOp]:
    return [call.how("map" if call.a.inputs else "draw")]


def _places(call: TracedOp) -> list[LossOp]:
    start, step = call.number("start") or (0.0, 0.0), call.number("step") or (1.0, 1.0)
    plain = call.name == "arange" and start == (0.0, 0.0) and step == (1.0, 1.0)
    return [call.how("position" if plain else "opaque")]


def _cut(call: TracedOp) -> list[LossOp]:
    source = call.values.shapes[call.a.inputs[0]][0]
    if not call.a.labelled.offsets:  # every second entry, say
        return [call.how("same")]
    dim = call.arguments[0].get("dim", 0) % len(source)
    return [call.how("cut", dims=(dim,), offsets=(call.a.labelled.offsets, call.b.labelled.offsets),
                     labels=call.a.labelled.labels, special=call.a.labelled.special)]  # fmt: skip


def _unfold(call: TracedOp) -> list[LossOp]:
    """An unfolding: windows over one dim, whose entries become a last dim of their own."""
    rank = len(call.op.labels[0])
    dim = call.arguments[0]["dimension"] % rank if rank else 0
    kept = tuple(-1 if d == dim else d for d in range(rank))
    return [call.how("same", labels=(kept, (*kept, -1)), special=())]


def _repeat_interleave(call: TracedOp) -> list[LossOp]:
    """A repetition of every entry of a dim in place: a new dim after it, and both as one."""
    (source,), (out,) = call.a.inputs[:1], call.a.outputs
    shapes, made = call.values.shapes[source], call.values.shapes[out]
    dim = call.arguments[0].get("dim")
    dim = 0 if dim is None and len(shapes[0]) == 1 else dim
    if dim is None or len(call.a.inputs) != 1 or len(shapes[0]) != len(made[0]):
        return [call.how("opaque")]
    return call.repeated(source, out, {dim % len(shapes[0]): 1})


def _repeat(call: TracedOp) -> list[LossOp]:
    """A repetition of whole copies one after the other: for every repeated dim a new one before it, and both as one."""
    (source,), (out,) = call.a.inputs, call.a.outputs
    rank = len(call.values.shapes[source][0])
    if rank != len(call.values.shapes[out][0]):
        return [call.how("same")]
    return call.repeated(source, out, dict.fromkeys(range(rank), 0))


def _concat(call: TracedOp) -> list[LossOp]:
    rank = len(call.values.shapes[call.a.outputs[0]][0])
    if len(call.a.inputs) == 1 and call.name != "stack":
        return [call.how("same")]
    return [call.how("concat", dims=(call.arguments[0].get("dim", 0) % rank,),
                     labels=call.a.labelled.labels, special=call.a.labelled.special)]  # fmt: skip


def _lookup(call: TracedOp) -> list[LossOp]:
    given = call.arguments[0].get("indices")
    if call.name == "index_select":
        rank = len(call.values.shapes[call.a.inputs[0]][0])
        return [call.how("lookup", dims=(call.arguments[0]["dim"] % rank,))]
    if not isinstance(given, list):
        return [call.how("map")]
    dims = tuple(dim for dim, ref in enumerate(given) if isinstance(ref, Ref))
    if len(dims) != len(call.a.inputs) - 1 or all(label < 0 for one in call.op.labels for label in one):
        return [call.how("opaque")]
    return [call.how("lookup", dims=dims)]


def _put(call: TracedOp) -> list[LossOp]:
    """A write by index. One value, written where a mask of the leading dims is true, is a choice for every entry; any
    other write is opaque."""
    given = call.arguments[0].get("indices")
    refs = [ref for ref in given or () if ref is not None]
    values = call.value_of("values")
    target = call.value_of("self")
    shapes, traced = call.values.shapes, call.values.traces[0].values
    if len(refs) == 1 and isinstance(refs[0], Ref) and refs[0].dtype == "bool" and call.made is not None:
        mask = call.made.inputs[refs[0].slot]
        if target is not None and values is not None and given is not None and given[0] is refs[0]:
            full, short = shapes[target][0], shapes[mask][0]
            if (
                traced[values].shape in ((), (1,))
                and full[: len(short)] == short
                and not call.arguments[0]["accumulate"]
            ):
                rank = tuple(range(len(full)))
                dims = (rank[: len(short)], (-1,) * len(shapes[values][0]), rank, rank)
                return [call.how("select", inputs=(mask, values, target), labels=dims, special=())]
    return [call.how("opaque")]


def _ctc(call: TracedOp) -> list[LossOp]:
    """CTC loss: [positions, samples, classes], targets and lengths of every sample → a loss of every sample."""
    shapes = [call.values.shapes[n][0] for n in (*call.a.inputs, *call.a.outputs)]
    if len(shapes[0]) != 3 or len(shapes[1]) != 2:
        return [call.how("opaque")]
    dims = [(-1, 0, -1), (0, -1), *[(0,)] * (len(call.a.inputs) - 2)]
    outs = [(0,) if len(s) == 1 else (0, *(-1,) * (len(s) - 1)) for s in shapes[len(call.a.inputs) :]]
    return [call.how("map", labels=(*dims, *outs), special=())]


RULES: dict[str, Callable[[TracedOp], list[LossOp]]] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys(("add", "sub", "subtract", "rsub"), _add),
    **dict.fromkeys(("mul", "multiply"), _multiply),
    **dict.fromkeys(("div", "divide", "true_divide"), _divide),
    **dict.fromkeys(("neg", "negative"), _negative),
    **dict.fromkeys(("clamp", "clamp_min", "clip"), _clamp),
    **dict.fromkeys(("maximum", "max"), _larger),
    **dict.fromkeys(("sum", "mean", "nansum"), _sum),
    **dict.fromkeys((*FILLS, *FILLED_BY), _fill),
    **dict.fromkeys(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"), _empty),
    **dict.fromkeys(DRAWS, _draw),
    **dict.fromkeys(PLACES, _places),
    **dict.fromkeys(("slice", "narrow", "split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk",
                     "unsafe_split_with_sizes", "tensor_split"), _cut),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _concat),
    **dict.fromkeys(("index", "_unsafe_index", "index_select"), _lookup),
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), _put),
    "unfold": _unfold,
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("repeat", "tile"), _repeat),
    "reciprocal": _reciprocal,
    "where": partial(_choice, names=("condition", "self", "other")),
    "masked_fill": partial(_choice, names=("mask", "value", "self")),
    "count_nonzero": _count_nonzero,
    "_ctc_loss": _ctc,
    "detach": lambda call: [call.how("detach", differentiable=False)],
}  # fmt: skip
