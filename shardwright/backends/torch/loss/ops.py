"""Two traces of a step body as one loss program: what each op does to sums over samples (`core.model.loss.program`)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from shardwright.backends.torch.capture.ops import Ref
from shardwright.backends.torch.capture.recorder import Recorded
from shardwright.backends.torch.loss.trace import LossTrace, Made
from shardwright.core.model.graph import FLOATING
from shardwright.core.model.loss import LossOp, LossProgram, Source, follows
from shardwright.core.model.loss.program import How, Shape
from shardwright.core.rules.op_rules import meet

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


CUT_BY_NUMBERS = frozenset({"slice", "narrow", "split", "unsafe_split", "repeat_interleave"})
"""Ops whose numbers say where and how large their results are."""


class DifferentRunsError(Exception):
    """A step does something else at another batch size; says what."""


class Counted:
    """The number by which `nll_loss` divides: the summed weights of the targets that it does not ignore."""

    def __init__(self, target: int, weight: int | None, ignored: int) -> None:
        self.target, self.weight, self.ignored = target, weight, ignored


class Translation:
    """The loss program of two traces, a small one and a large one.

    Attributes:
        program: the values of the small trace by their numbers, and some that no op of torch makes.
        counted: those of them that are counts of `nll_loss`.
    """

    def __init__(self, small: LossTrace, large: LossTrace, sizes: tuple[int, int], norms_are_plain: bool) -> None:
        """``norms_are_plain``: what batch norm does to samples is not of interest.

        Raises DifferentRunsError.
        """
        self.traces, self.sizes, self.norms_are_plain = (small, large), sizes, norms_are_plain
        require_alike(small, large)
        self.shapes = {
            n: (a.shape, b.shape) for n, (a, b) in enumerate(zip(small.values, large.values, strict=True))
        }  # fmt: skip
        self.sources = {number: Source("samples") for number in small.inputs}
        self.sources |= {number: Source("trained") for number in small.trained}
        self.counted: dict[int, Counted] = {}
        self._note_constants()
        self.ops: list[LossOp] = []
        for index, (a, b) in enumerate(zip(small.ops, large.ops, strict=True)):
            self._translate(index, a, b)
        self.program = LossProgram(sizes, self.shapes, self.sources, tuple(self.ops))

    def _note_constants(self) -> None:
        small, large = self.traces
        for number, entries in small.constants.items():
            other = large.constants[number]
            if number in small.drawn_on_host and number in large.drawn_on_host:
                self.sources.setdefault(number, Source("samples"))
                continue
            if entries is not None and other is not None and len(entries) == len(other) == 1:
                self.sources.setdefault(number, Source("fixed", (entries[0], other[0])))
            elif (entries != other and len(entries or ()) == len(other or ())) or self._differs_outside(number):
                raise DifferentRunsError(
                    f"a tensor that the step makes of numbers is {entries} at batch {self.sizes[0]} and {other} at "
                    f"batch {self.sizes[1]}"
                )

    def _differs_outside(self, number: int) -> bool:
        """Whether a tensor from outside of the step, of many entries, has others at the other batch size."""
        one, other = (trace.outside.get(number) for trace in self.traces)
        if one is None or other is None or one is other or one.shape != other.shape:
            return False
        return one.dtype != other.dtype or not torch.equal(one, other)

    # One op --------------------------------------------------------------------------------------------------------

    def _translate(self, index: int, a: Recorded, b: Recorded) -> None:
        name, _, piece = a.name.removeprefix("aten.").partition("/")
        if name not in _HOWS and name.endswith("_"):
            name = name[:-1]
        made = (self.traces[0].calls_of.get(index), self.traces[1].calls_of.get(index))
        small = self.traces[0]
        differentiable = index not in small.without_gradient and any(
            small.values[n].dtype in FLOATING or small.values[n].dtype.startswith("complex") for n in a.outputs
        )
        where = small.calls[a.call].path
        labelled = meet(a.labelled, b.labelled) if len(a.labelled.labels) == len(b.labelled.labels) else a.labelled
        base = LossOp(
            "map", a.name, a.inputs, a.outputs, labelled.labels, labelled.special, where, differentiable=differentiable
        )
        call = _Call(self, base, a, b, made, name, piece)
        self.ops += call.translated()

    def new_value(self, shapes: tuple[Shape, Shape]) -> int:
        """A value that no op of torch makes."""
        number = len(self.shapes)
        self.shapes[number] = shapes
        return number


class _Call:
    """One recorded op, with its arguments at both batch sizes."""

    def __init__(
        self, translation: Translation, op: LossOp, a: Recorded, b: Recorded, made: tuple[Made | None, Made | None],
        name: str, piece: str,
    ) -> None:  # fmt: skip
        self.translation, self.op, self.a, self.b, self.name, self.piece = translation, op, a, b, name, piece
        self.made = made[0]
        none: dict[str, Any] = {}
        self.arguments = [none if one is None else one.arguments for one in made]

    def translated(self) -> list[LossOp]:
        """As `_known`, unless it is given other numbers at the other batch size, which nothing has taken."""
        found = self._known()
        is_taken = self.name in CUT_BY_NUMBERS or any(
            op.how == "position" or (op.number is not None and op.number[0] != op.number[1]) for op in found
        )
        return found if is_taken or self._same_numbers() else [self.how("unlike")]

    def _known(self) -> list[LossOp]:
        if self.piece == "write":
            return [self.how("reshape" if self.name in RESHAPES and self.a.kind == "view" else "map")]
        if self.name in ("nll_loss_forward", "nll_loss2d_forward"):
            return self._likelihood()
        if self.piece in ("mean", "sum"):
            return [self.how("mean" if self.piece == "mean" else "sum")]
        if self.piece in ("bias", "weight"):
            return [self.how("add" if self.piece == "bias" else "multiply")]
        rule = _HOWS.get(self.name) if not self.piece else None
        if rule is not None:
            return rule(self)
        return self._by_kind()

    def how(self, how: How, **changes: Any) -> LossOp:
        return replace(self.op, how=how, **changes)

    def _by_kind(self) -> list[LossOp]:
        kind = self.a.kind
        if kind == "opaque" or (kind == "create" and not self.a.inputs):
            return [self.how("opaque")]
        if kind in ("view", "copy") and len(self.a.inputs) == 1:
            return [self.how("same" if self.name in SAME else "map")]
        if kind == "contraction" and len(self.a.inputs) == 2:
            return [self.how("contract")]
        if kind == "normalization" and self.translation.norms_are_plain and "batch_norm" in self.name:
            return [self.how("map", special=())]
        return [self.how("map")]

    def _same_numbers(self) -> bool:
        """Whether the numbers among the arguments are those of the other batch size too."""
        a, b = (_numbers(arguments) for arguments in self.arguments)
        return a == b

    def number(self, name: str) -> tuple[float, float] | None:
        """A number argument at both sizes."""
        first, second = (arguments.get(name) for arguments in self.arguments)
        if not isinstance(first, (int, float)) or not isinstance(second, (int, float)):
            return None
        return float(first), float(second)

    def is_tensor(self, name: str) -> bool:
        return isinstance(self.arguments[0].get(name), Ref)

    def value_of(self, name: str) -> int | None:
        """The value that an argument is."""
        found = self.arguments[0].get(name)
        if not isinstance(found, Ref) or self.made is None:
            return None
        return self.made.inputs[found.slot]

    def constant(self, number: tuple[float, float]) -> tuple[LossOp, int]:
        """An op that makes a number, for ops that take it as a tensor."""
        value = self.translation.new_value(((), ()))
        return LossOp("fill", self.op.name, (), (value,), ((),), where=self.op.where, number=number), value

    def repeated(self, source: int, out: int, new: Mapping[int, int]) -> list[LossOp]:
        """Dims of ``source`` whose entries ``out`` has several times, as a broadcast and a reshape. ``new`` says for a
        dim whether what repeats it comes before it (0) or after it (1)."""
        widened: list[list[int]] = [[], []]
        labels: list[int] = []
        for dim, sizes in enumerate(zip(*self.translation.shapes[source], strict=True)):
            times = [
                made[dim] // size if size else 1 for size, made in zip(sizes, self.translation.shapes[out], strict=True)
            ]
            adds = dim in new and times != [1, 1]
            for position in (0, 1) if adds else (0,):
                is_new = adds and position == new[dim]
                labels.append(-1 if is_new else dim)
                for of_size, size, more in zip(widened, sizes, times, strict=True):
                    of_size.append(more if is_new else size)
        value = self.translation.new_value((tuple(widened[0]), tuple(widened[1])))
        kept = tuple(range(len(self.translation.shapes[source][0])))
        broadcast = self.how("same", inputs=(source,), outputs=(value,), labels=(kept, tuple(labels)), special=())
        return [broadcast, self.how("reshape", inputs=(value,), labels=(), special=())]

    # Ops that need their arguments ---------------------------------------------------------------------------------

    def _likelihood(self) -> list[LossOp]:
        """The pieces of `nll_loss`: what is looked up for each target, and its mean by the weights of the targets."""
        if self.piece == "total_weight":
            return self._count()[0]
        if self.piece in ("mean", "sum"):
            ops, count = self._count()
            total = self.translation.new_value(((), ()))
            picked = self.a.inputs[0]
            dims = self.op.labels[0]
            summed = LossOp("sum", self.op.name, (picked,), (total,), (dims, ()), where=self.op.where)
            if self.piece == "sum":
                return [replace(summed, outputs=self.a.outputs)]
            mean = self.how("divide", inputs=(total, count), labels=((), (), ()), special=())
            return [summed, *ops, mean]
        return [self.how("map")]

    def _count(self) -> tuple[list[LossOp], int]:
        target, weight = self.value_of("target"), self.value_of("weight")
        assert target is not None
        shapes = self.translation.shapes
        each = self.translation.new_value(shapes[target])
        count = self.a.outputs[0] if self.piece == "total_weight" else self.translation.new_value(((), ()))
        rank = tuple(range(len(shapes[target][0])))
        inputs = (target,) if weight is None else (target, weight)
        weighed = LossOp(
            "map", self.op.name, inputs, (each,), (rank, rank) if weight is None else (rank, (-1,), rank),
            where=self.op.where, differentiable=False,
        )  # fmt: skip
        total = LossOp("sum", self.op.name, (each,), (count,), (rank, ()), where=self.op.where, differentiable=False)
        self.translation.counted[count] = Counted(target, weight, int(self.arguments[0].get("ignore_index", -100)))
        return [weighed, total], count


def _reshape(call: _Call) -> list[LossOp]:
    t = call.translation.traces[0].values
    same = t[call.a.inputs[0]].dtype == t[call.a.outputs[0]].dtype
    return [call.how("reshape" if same else "map")]


def _cast(call: _Call) -> list[LossOp]:
    values = call.translation.traces[0].values
    before, after = values[call.a.inputs[0]].dtype, values[call.a.outputs[0]].dtype
    whole = before not in FLOATING
    keeps = before == after or after in FLOATING or (whole and after != "bool")
    return [call.how("same" if keeps else "map")]


def _add(call: _Call) -> list[LossOp]:
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


def _multiply(call: _Call) -> list[LossOp]:
    number = call.number("other")
    if number is not None:
        return [call.how("scale", number=number)]
    return [call.how("multiply" if len(call.a.inputs) == 2 else "map")]


def _divide(call: _Call) -> list[LossOp]:
    if call.arguments[0].get("rounding_mode") is not None:
        return [call.how("map")]
    number = call.number("other")
    if number is not None:
        if 0.0 in number:
            return [call.how("map")]
        return [call.how("scale", number=(1.0 / number[0], 1.0 / number[1]))]
    return [call.how("divide" if len(call.a.inputs) == 2 else "map")]


def _reciprocal(call: _Call) -> list[LossOp]:
    """1 / x, as the first half of number / x."""
    op, one = call.constant((1.0, 1.0))
    return [op, call.how("divide", inputs=(one, *call.a.inputs), labels=((), *call.op.labels))]


def _negative(call: _Call) -> list[LossOp]:
    return [call.how("scale", number=(-1.0, -1.0))]


def _where(call: _Call) -> list[LossOp]:
    """Numbers among the two that are chosen from become tensors."""
    ops: list[LossOp] = []
    operands: list[int] = []
    dims: list[tuple[int, ...]] = []
    given = dict(zip(call.a.inputs, call.op.labels, strict=False))
    for name in ("condition", "self", "other"):
        value, number = call.value_of(name), call.number(name)
        if value is None:
            if number is None:
                return [call.how("map")]
            op, value = call.constant(number)
            ops.append(op)
        operands.append(value)
        dims.append(given.get(value, ()))
    return [*ops, call.how("select", inputs=tuple(operands), labels=(*dims, call.op.labels[-1]))]


def _masked_fill(call: _Call) -> list[LossOp]:
    mask, kept, value, number = (
        call.value_of("mask"),
        call.value_of("self"),
        call.value_of("value"),
        call.number("value"),
    )
    given = dict(zip(call.a.inputs, call.op.labels, strict=False))
    ops: list[LossOp] = []
    if value is None and number is not None:
        op, value = call.constant(number)
        ops.append(op)
    if mask is None or kept is None or value is None:
        return [call.how("map")]
    inputs = (mask, value, kept)
    dims = tuple(given.get(one, ()) for one in inputs)
    return [*ops, call.how("select", inputs=inputs, labels=(*dims, call.op.labels[-1]))]


def _clamp(call: _Call) -> list[LossOp]:
    least, most = call.number("min"), call.number("max")
    if least is not None and most is None and call.arguments[0].get("max") is None and len(call.a.inputs) == 1:
        return [call.how("at_least", number=least)]
    return [call.how("map")]


def _larger(call: _Call) -> list[LossOp]:
    if len(call.a.inputs) == 2 and len(call.a.outputs) == 1:
        return [call.how("at_least")]
    return [call.how("map")]


def _sum(call: _Call) -> list[LossOp]:
    return [call.how("mean" if call.name == "mean" else "sum")]


def _count_nonzero(call: _Call) -> list[LossOp]:
    (source,) = call.a.inputs
    each = call.translation.new_value(call.translation.shapes[source])
    dims = call.op.labels[0]
    first = LossOp("map", call.op.name, (source,), (each,), (dims, dims), where=call.op.where, differentiable=False)
    return [first, call.how("sum", inputs=(each,), special=())]


def _fill(call: _Call) -> list[LossOp]:
    name = FILLED_BY.get(call.name)
    number = call.number(name) if name is not None else (FILLS[call.name], FILLS[call.name])
    if name is not None and (value := call.value_of(name)) is not None:
        return [call.how("same", inputs=(value,), labels=((), call.op.labels[-1]))]
    if number is None or call.a.inputs:
        return [call.how("map" if call.a.inputs else "opaque")]
    return [call.how("fill", number=number)]


def _empty(call: _Call) -> list[LossOp]:
    return [call.how("fill")]


def _draw(call: _Call) -> list[LossOp]:
    return [call.how("map" if call.a.inputs else "draw")]


def _places(call: _Call) -> list[LossOp]:
    start, step = call.number("start") or (0.0, 0.0), call.number("step") or (1.0, 1.0)
    plain = call.name == "arange" and start == (0.0, 0.0) and step == (1.0, 1.0)
    return [call.how("position" if plain else "opaque")]


def _cut(call: _Call) -> list[LossOp]:
    source = call.translation.shapes[call.a.inputs[0]][0]
    if not call.a.labelled.offsets:  # every second entry, say
        return [call.how("same")]
    dim = call.arguments[0].get("dim", 0) % len(source)
    return [call.how("cut", dims=(dim,), offsets=(call.a.labelled.offsets, call.b.labelled.offsets),
                     labels=call.a.labelled.labels, special=call.a.labelled.special)]  # fmt: skip


def _unfold(call: _Call) -> list[LossOp]:
    """Windows over one dim, whose entries become a last dim of their own."""
    rank = len(call.op.labels[0])
    dim = call.arguments[0]["dimension"] % rank if rank else 0
    kept = tuple(-1 if d == dim else d for d in range(rank))
    return [call.how("same", labels=(kept, (*kept, -1)), special=())]


def _repeat_interleave(call: _Call) -> list[LossOp]:
    """Every entry of a dim several times in place: a new dim after it, and both as one."""
    (source,), (out,) = call.a.inputs[:1], call.a.outputs
    shapes, made = call.translation.shapes[source], call.translation.shapes[out]
    dim = call.arguments[0].get("dim")
    dim = 0 if dim is None and len(shapes[0]) == 1 else dim
    if dim is None or len(call.a.inputs) != 1 or len(shapes[0]) != len(made[0]):
        return [call.how("opaque")]
    return call.repeated(source, out, {dim % len(shapes[0]): 1})


def _repeat(call: _Call) -> list[LossOp]:
    """Whole copies one after the other: for every repeated dim a new one before it, and both as one."""
    (source,), (out,) = call.a.inputs, call.a.outputs
    rank = len(call.translation.shapes[source][0])
    if rank != len(call.translation.shapes[out][0]):
        return [call.how("same")]
    return call.repeated(source, out, dict.fromkeys(range(rank), 0))


def _concat(call: _Call) -> list[LossOp]:
    rank = len(call.translation.shapes[call.a.outputs[0]][0])
    if len(call.a.inputs) == 1 and call.name != "stack":
        return [call.how("same")]
    return [call.how("concat", dims=(call.arguments[0].get("dim", 0) % rank,),
                     labels=call.a.labelled.labels, special=call.a.labelled.special)]  # fmt: skip


def _lookup(call: _Call) -> list[LossOp]:
    given = call.arguments[0].get("indices")
    if call.name == "index_select":
        rank = len(call.translation.shapes[call.a.inputs[0]][0])
        return [call.how("lookup", dims=(call.arguments[0]["dim"] % rank,))]
    if not isinstance(given, list):
        return [call.how("map")]
    dims = tuple(dim for dim, ref in enumerate(given) if isinstance(ref, Ref))
    if len(dims) != len(call.a.inputs) - 1 or all(label < 0 for one in call.op.labels for label in one):
        return [call.how("opaque")]
    return [call.how("lookup", dims=dims)]


def _put(call: _Call) -> list[LossOp]:
    """One value where a mask of the leading dims says so is a choice of every entry; anything else is not known."""
    given = call.arguments[0].get("indices")
    refs = [ref for ref in given or () if ref is not None]
    values = call.value_of("values")
    target = call.value_of("self")
    shapes, traced = call.translation.shapes, call.translation.traces[0].values
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


def _ctc(call: _Call) -> list[LossOp]:
    """[positions, samples, classes], targets and lengths of every sample → a loss of every sample."""
    shapes = [call.translation.shapes[n][0] for n in (*call.a.inputs, *call.a.outputs)]
    if len(shapes[0]) != 3 or len(shapes[1]) != 2:
        return [call.how("opaque")]
    dims = [(-1, 0, -1), (0, -1), *[(0,)] * (len(call.a.inputs) - 2)]
    outs = [(0,) if len(s) == 1 else (0, *(-1,) * (len(s) - 1)) for s in shapes[len(call.a.inputs) :]]
    return [call.how("map", labels=(*dims, *outs), special=())]


_HOWS: dict[str, Callable[[_Call], list[LossOp]]] = {
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
    "where": _where,
    "masked_fill": _masked_fill,
    "count_nonzero": _count_nonzero,
    "_ctc_loss": _ctc,
    "detach": lambda call: [call.how("detach", differentiable=False)],
}  # fmt: skip


def require_alike(small: LossTrace, large: LossTrace) -> None:
    """Raises DifferentRunsError unless both traces did the same ops on the same values."""
    for a, b in zip_longest(small.ops, large.ops):
        if a is None or b is None or (a.name, a.inputs, a.outputs) != (b.name, b.inputs, b.outputs):
            op, trace = (a, small) if a is not None else (b, large)
            assert op is not None
            where = trace.calls[op.call].path
            raise DifferentRunsError(f"{op.name}{f' in {where!r}' if where else ''} is done at one batch size alone")
    if len(small.values) != len(large.values) or small.inputs != large.inputs:
        raise DifferentRunsError("other tensors are used at another batch size")


def require_alike_alone(alone: LossTrace, small: LossTrace, large: LossTrace, sizes: tuple[int, int]) -> None:
    """Raises DifferentRunsError unless one sample alone, of which the two traces know nothing, is computed with as they
    say; how it lies in memory may differ."""
    for op, a, b in zip_longest(*(_computed(trace) for trace in (alone, small, large))):
        if op is None or a is None or b is None or op[0] != a[0] or len(op[1]) != len(a[1]) or len(a[1]) != len(b[1]):
            raise DifferentRunsError(f"{(op or a or b)[0]} is not done alike with one sample")
        for one, *pair in zip(op[1], a[1], b[1], strict=True):
            if not follows(one, (pair[0], pair[1]), sizes):
                raise DifferentRunsError(f"{op[0]} computes with {one} with one sample, and with {pair[0]} with two")


def _computed(trace: LossTrace) -> list[tuple[str, list[Any]]]:
    """The ops of a trace that compute something, and the numbers that they are given."""
    return [
        (op.name, _numbers(trace.calls_of[index].arguments) if index in trace.calls_of else [])
        for index, op in enumerate(trace.ops)
        if op.kind not in ("view", "copy") or op.name.removeprefix("aten.") in CUT_BY_NUMBERS
    ]


def _numbers(arguments: Mapping[str, Any]) -> list[Any]:
    """Those of an op's arguments; of lists, most of which are sizes, those that are fractions."""
    alone = [v for v in arguments.values() if isinstance(v, (int, float, bool, str))]
    lists = [v for v in arguments.values() if isinstance(v, (list, tuple))]
    return [*alone, *(v for listed in lists for v in listed if isinstance(v, float))]
