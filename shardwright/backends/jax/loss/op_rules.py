"""The rules by primitive: the op of a loss program, `core.model.loss`, that a step of a traced function is."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from shardwright.backends.jax.capture.inner_programs import equations_in
from shardwright.backends.jax.capture.steps import Program, Step
from shardwright.core.model.loss import LossOp, Source
from shardwright.core.model.loss.program import How

Number = tuple[float, float]

_SAME = """
    neg real imag transpose broadcast_in_dim copy copy_p device_put sharding_constraint optimization_barrier
    reduce_precision
"""
SAME = frozenset(_SAME.split())
RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})


@dataclass(slots=True)
class Builder:
    """A loss program that is being built from two traces of its function."""

    first: Program
    second: Program
    sizes: tuple[int, int]
    shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    sources: dict[int, Source] = field(default_factory=dict)
    ops: list[LossOp] = field(default_factory=list)
    maker: dict[int, Step] = field(default_factory=dict)
    known: dict[int, Number] = field(default_factory=dict)
    """The values of one entry that are a number."""
    given: set[int] = field(default_factory=set)
    """The values that depend on arguments: a draw by a key that is not among them draws the same in every
    microbatch."""

    def new(self, one: tuple[int, ...], other: tuple[int, ...]) -> int:
        """A value that the program does not have."""
        number = len(self.first.shapes) + len(self.shapes)
        while number in self.shapes:
            number += 1
        self.shapes[number] = (one, other)
        return number

    def literal(self, numbers: Number | None) -> int:
        value = self.new((), ())
        self.sources[value] = Source("fixed", numbers)
        return value


Labels = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """One step of the traced function, for which a rule gives the op that it is."""

    build: Builder
    step: Step
    numbers: list[Number | None]
    """The value of every operand that is a literal, at both batch sizes."""
    op: LossOp
    """The step as a map of its operands that are values, with their labels."""

    @property
    def number(self) -> Number | None:
        """The first of the numbers."""
        return next((n for n in self.numbers if n is not None), None)

    def of(self, how: How, inputs: tuple[int, ...], labels: Labels = (), number: Number | None = None) -> LossOp:
        """An op of other operands."""
        return replace(self.op, how=how, inputs=inputs, labels=labels, special=(), number=number)

    def whole(self) -> tuple[tuple[int, ...], Labels]:
        """All operands as values, literals too, and labels of an op that works on entries one by one."""
        operands = zip(self.step.inputs, self.numbers, strict=True)
        values = tuple(self.build.literal(number) if value is None else value for value, number in operands)
        shapes = [self.build.shapes[value] for value in (*values, *self.step.outputs)]
        whole, rank = shapes[-1], len(self.build.shapes[self.step.outputs[0]][0])
        labels = tuple(
            () if not one else tuple(d if (one[d], two[d]) == (whole[0][d], whole[1][d]) else -1 for d in range(rank))
            for one, two in shapes
        )
        return values, labels


Rule = Callable[[Reading], LossOp]


def _add_rule(at: Reading) -> LossOp:
    literal = next((i for i, value in enumerate(at.step.inputs) if value is None), None)
    number = None if literal is None else at.numbers[literal]
    if number is not None:
        sign = -1.0 if at.step.name == "sub" and literal == 1 else 1.0
        return replace(at.op, how="add", number=(sign * number[0], sign * number[1]))
    values, labels = at.whole()
    nothing = next((i for i, value in enumerate(values) if at.build.known.get(value) == (0.0, 0.0)), None)
    if nothing is not None and len(values) == 2 and at.step.name != "sub":  # what a loop adds to at first
        kept = 1 - nothing
        return at.of("same", (values[kept],), (labels[kept], labels[2]))
    return at.of("add", values, labels)


def _mul_rule(at: Reading) -> LossOp:
    return at.of("multiply", *at.whole()) if at.number is None else replace(at.op, how="scale", number=at.number)


def _div_rule(at: Reading) -> LossOp:
    number = at.numbers[1]
    if number is not None and all(number):
        return replace(at.op, how="scale", number=(1.0 / number[0], 1.0 / number[1]))
    return at.of("divide", *at.whole())


def _max_rule(at: Reading) -> LossOp:
    number, inputs, labels = at.number, at.op.inputs, at.op.labels
    for position, value in enumerate(inputs):
        if number is None and len(inputs) == 2 and value in at.build.known:
            number, inputs, labels = at.build.known[value], (inputs[1 - position],), (labels[1 - position], labels[2])
            break
    return replace(at.op, how="map" if number is None else "at_least", inputs=inputs, labels=labels, number=number)


def _power_rule(at: Reading) -> LossOp:
    """The op of a power: x ** 1 is x, and x ** -1 is 1 / x."""
    exponent = at.step.params["y"]
    if exponent == -1:
        return at.of("divide", (at.build.literal((1.0, 1.0)), *at.op.inputs), ((), *at.op.labels))
    return replace(at.op, how="same" if exponent == 1 else "map")


def _cast_rule(at: Reading) -> LossOp:
    """The op of a cast: linear, unless it rounds."""
    if not at.op.inputs:
        if at.number is not None and not at.build.shapes[at.step.outputs[0]][0]:
            at.build.known[at.step.outputs[0]] = at.number
        return at.of("fill", (), number=at.number)
    before, after = (at.build.first.dtypes[value] for value in (at.op.inputs[0], at.step.outputs[0]))
    rounds = after == "bool" or (_inexact(before) and not _inexact(after))
    return replace(at.op, how="map" if rounds else "same", differentiable=_inexact(after))


def _inexact(dtype: str) -> bool:
    return "float" in dtype or "complex" in dtype


def _select_rule(at: Reading) -> LossOp:
    if len(at.step.inputs) != 3:
        return at.op
    values, labels = at.whole()
    if _is_never_negative(at.build, values[0], values[1]):  # how jax.numpy reads negative indices
        return at.of("same", (values[1],), (labels[1], labels[3]))
    return at.of("select", values, labels)


def _is_never_negative(build: Builder, condition: int, counted: int) -> bool:
    """Whether a condition asks if numbers 0, 1, 2 … are below 0."""
    asks = build.maker.get(condition)
    if asks is None or asks.name != "lt" or asks.inputs[0] != counted or asks.numbers[1:] != (0.0,):
        return False
    made = build.maker.get(counted)
    while made is not None and made.name in ("convert_element_type", "broadcast_in_dim", "reshape"):
        made = None if made.inputs[0] is None else build.maker.get(made.inputs[0])
    return made is not None and made.name == "iota"


def _as(how: How) -> Rule:
    return lambda at: replace(at.op, how=how if at.op.inputs else "fill")


def _contract_rule(at: Reading) -> LossOp:
    return replace(at.op, how="contract" if len(at.op.inputs) == 2 else "map")


def _lookup_rule(at: Reading) -> LossOp:
    """A table by one index. An index whose last dim holds several coordinates, made by joining them, is those."""
    if len(at.op.inputs) != 2:
        return at.op
    dims = _indexed_dims(at.step)
    table, index = at.op.inputs
    joined = at.build.maker.get(index)
    last = len(at.build.shapes[index][0]) - 1
    if (
        len(dims) > 1
        and joined is not None
        and joined.name == "concatenate"
        and joined.params["dimension"] == last
        and len(joined.inputs) == len(dims)
        and None not in joined.inputs
    ):
        parts = tuple(value for value in joined.inputs if value is not None)
        of_table, of_index, of_result = at.op.labels
        labels = (of_table, *([of_index] * len(parts)), of_result)
        return replace(at.op, how="lookup", dims=dims, inputs=(table, *parts), labels=labels)
    return replace(at.op, how="lookup" if len(dims) == 1 else "map", dims=dims)


def _indexed_dims(step: Step) -> tuple[int, ...]:
    """The dims of a table that an index of this step looks up."""
    numbers = step.params.get("dimension_numbers")
    if numbers is None:  # a whole jnp.take or jnp.take_along_axis: a gather inside
        inner = step.params["jaxpr"].jaxpr
        gathers = [e for e in equations_in(inner) if e.primitive.name == "gather"]
        numbers = gathers[0].params["dimension_numbers"] if len(gathers) == 1 else None
    return () if numbers is None else tuple(numbers.start_index_map)


def _concat_rule(at: Reading) -> LossOp:
    return replace(at.op, how="concat", dims=(at.step.params["dimension"],))


def _slice_rule(at: Reading) -> LossOp:
    (value,), (made,) = at.op.inputs, at.step.outputs
    before, after = at.build.shapes[value], at.build.shapes[made]
    cut = [d for d in range(len(before[0])) if before[0][d] != after[0][d] or before[1][d] != after[1][d]]
    strides = at.step.params["strides"] or (1,) * len(before[0])
    if len(cut) != 1 or strides[cut[0]] != 1:
        return at.op
    start = int(at.step.params["start_indices"][cut[0]])
    return replace(at.op, how="cut", dims=(cut[0],), offsets=((start,), (start,)))


def _split_rule(at: Reading) -> LossOp:
    axis, shapes = at.step.params["axis"], [at.build.shapes[value] for value in at.step.outputs[:-1]]
    offsets, others = (tuple(accumulate((s[which][axis] for s in shapes), initial=0)) for which in (0, 1))
    return replace(at.op, how="cut", dims=(axis,), offsets=(offsets, others))


def _batch_norm_rule(at: Reading) -> LossOp:
    """The op of a batch norm: statistics over the samples that a call sees. The plan's ``loss_scope`` decides which
    those are, and not the loss."""
    whole = at.build.shapes[at.step.outputs[0]]
    shapes = [at.build.shapes[value] for value in (*at.op.inputs, *at.step.outputs)]
    labels = tuple(tuple(range(len(s[0]))) if s == whole else (-1,) * len(s[0]) for s in shapes)
    return replace(at.op, labels=labels, special=())


def _last_dims(count: int | None = None) -> Rule:
    """The rule of ops that work on the last dims as a whole, and on the dims before them one by one."""

    def rule(at: Reading) -> LossOp:
        last = len(at.step.params["fft_lengths"]) if count is None else count
        shapes = [at.build.shapes[value][0] for value in (*at.op.inputs, *at.step.outputs)]
        labels = tuple(tuple(d if d < len(shape) - last else -1 for d in range(len(shape))) for shape in shapes)
        return replace(at.op, labels=labels, special=())

    return rule


RULES: dict[str, Rule] = {
    "fft": _last_dims(),
    **dict.fromkeys(("cholesky", "triangular_solve", "eigh", "svd", "qr"), _last_dims(2)),
    "add": _add_rule,
    "add_any": _add_rule,
    "sub": _add_rule,
    "mul": _mul_rule,
    "div": _div_rule,
    "max": _max_rule,
    "integer_pow": _power_rule,
    "convert_element_type": _cast_rule,
    "select_n": _select_rule,
    "reduce_sum": _as("sum"),
    "stop_gradient": _as("detach"),
    "dot_general": _contract_rule,
    "conv_general_dilated": _contract_rule,
    "gather": _lookup_rule,
    "_take": _lookup_rule,
    "take_along_axis": _lookup_rule,
    "concatenate": _concat_rule,
    "slice": _slice_rule,
    "split": _split_rule,
    "call:batch_norm": _batch_norm_rule,
}
