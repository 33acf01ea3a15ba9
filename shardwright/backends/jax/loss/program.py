"""A traced loss function in the words of `core.model.loss`: what each of its ops does to sums over samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from shardwright.backends.jax.capture.ops import RANDOM, translate
from shardwright.backends.jax.capture.steps import Program, Step
from shardwright.backends.jax.loss.differences import same_array, same_params
from shardwright.core.errors import CaptureError
from shardwright.core.model.loss import LossOp, LossProgram, Source, follows
from shardwright.core.model.loss.program import How

Number = tuple[float, float]

_SAME = """
    neg real imag transpose broadcast_in_dim copy copy_p device_put sharding_constraint optimization_barrier
    reduce_precision
"""
SAME = frozenset(_SAME.split())
RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
_WITHOUT_SLOPE = """
    sign floor ceil round is_finite eq ne lt le gt ge eq_to lt_to le_to and or xor not shift_left shift_right_logical
    shift_right_arithmetic population_count clz nextafter bitcast_convert_type
"""
WITHOUT_SLOPE = frozenset(_WITHOUT_SLOPE.split())
"""Ops that gradients do not pass."""


@dataclass(slots=True)
class _Builder:
    first: Program
    second: Program
    sizes: tuple[int, int]
    shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    sources: dict[int, Source] = field(default_factory=dict)
    ops: list[LossOp] = field(default_factory=list)
    maker: dict[int, Step] = field(default_factory=dict)
    known: dict[int, Number] = field(default_factory=dict)
    """Values of one entry that are a number."""
    given: set[int] = field(default_factory=set)
    """Values that arguments are in: a draw by a key that none is in draws the same in every microbatch."""

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


def loss_program(
    first: Program, second: Program, sizes: tuple[int, int], trained: Sequence[bool], inputs: int
) -> LossProgram:
    """The program of a loss function from its traces at two batch sizes, which have the same steps.

    trained: one flag for each of the first arguments, the model's arrays; inputs: how many arguments after them are the
    batch.
    """
    build = _Builder(first, second, sizes)
    build.shapes.update(enumerate(zip(first.shapes, second.shapes, strict=True)))
    weights, batch = first.arguments[: len(trained)], first.arguments[len(trained) :]
    assert len(batch) == inputs
    build.sources.update((v, Source("trained" if flag else "fixed")) for v, flag in zip(weights, trained, strict=True))
    build.sources.update((value, Source("samples")) for value in batch)
    build.given.update(first.arguments)
    for value in first.constants:
        small, large = first.numbers.get(value), second.numbers.get(value)
        known = None if small is None or large is None else (small, large)
        if known is not None:
            build.known[value] = known
        elif not same_array(first.arrays[value], second.arrays[value]):
            build.ops.append(LossOp("unlike", "an array that is made of numbers", (), (value,)))
            continue
        build.sources[value] = Source("fixed", known)
    for one, other in zip(first.steps, second.steps, strict=True):
        before = len(build.ops)
        _add(build, one, other)
        _require_explained(build, one, other, before)
        build.maker.update((value, one) for value in one.outputs)
    return LossProgram(sizes, build.shapes, build.sources, tuple(build.ops))


def require_alike_alone(alone: Program, first: Program, second: Program, sizes: tuple[int, int]) -> None:
    """Raise CaptureError unless one sample alone, of which the two traces know nothing, is computed with as they say;
    dims of one entry may be added and taken away."""
    for step, a, b in zip_longest(*(_computed(program) for program in (alone, first, second))):
        if step is None or a is None or b is None or (step.name, len(step.numbers)) != (a.name, len(a.numbers)):
            raise CaptureError(f"{(step or a or b).name} is not done alike with one sample")
        numbers = zip((*step.numbers, step.made), (*a.numbers, a.made), (*b.numbers, b.made), strict=True)
        if not all(follows(one, (small, large), sizes) for one, small, large in numbers):
            raise CaptureError(f"{step.name} computes with another number with one sample")


def _computed(program: Program) -> list[Step]:
    return [step for step in program.steps if step.name not in SAME | RESHAPES]


COMBINED = frozenset({"add", "add_any", "sub", "mul", "div"})
"""Whose rules make something of every number that they are given."""


def _require_explained(build: _Builder, step: Step, other: Step, before: int) -> None:
    """Nothing is known of an op that is given other numbers at the other batch size, unless its rule has taken them."""
    added = build.ops[before:]
    is_taken = step.name in COMBINED or any(op.number is not None and op.number[0] != op.number[1] for op in added)
    differs = len(step.numbers) == len(other.numbers) and any(
        value is None and (a is None or a != b) and not (a != a and b != b)
        for value, a, b in zip(step.inputs, step.numbers, other.numbers, strict=False)
    )
    if (differs and not is_taken) or not same_params(step.params, other.params):
        kept = tuple(value for value in step.inputs if value is not None)
        where = build.first.calls[step.call].path
        build.ops[before:] = [LossOp("unlike", step.name, kept, step.outputs, where=where)]


def _add(build: _Builder, step: Step, other: Step) -> None:
    """The ops of one step."""
    name = step.name
    kind, inputs, labelled = translate(other, build.second)
    del kind
    common: dict[str, Any] = {
        "name": name.removeprefix("call:").removeprefix("random."),
        "outputs": step.outputs,
        "where": build.first.calls[step.call].path,
    }
    plain: dict[str, Any] = {"inputs": inputs, "labels": labelled.labels, "special": labelled.special}
    numbers = _numbers(step, other)
    if not build.given.isdisjoint(inputs):
        build.given.update(step.outputs)
    if name.startswith(("random.", "random_", "rng_")) or name in RANDOM:
        if build.given.isdisjoint(inputs):  # the same numbers in every microbatch
            build.ops.append(LossOp("opaque", inputs=inputs, differentiable=False, **common))
        else:
            build.ops.append(LossOp("draw", inputs=(), differentiable=False, **common))
    elif name == "iota":
        _iota(build, step, common)
    elif not inputs and step.made is not None and other.made is not None:
        build.known[step.outputs[0]] = step.made, other.made
        build.ops.append(LossOp("fill", inputs=(), number=(step.made, other.made), **common))
    elif name in _RULES:
        _RULES[name](build, step, numbers, plain, common)
    elif not inputs:
        number = next((n for n in numbers if n is not None), None)
        build.ops.append(LossOp("fill", inputs=(), number=number if name in SAME | RESHAPES else None, **common))
    elif name in RESHAPES:
        build.ops.append(LossOp("reshape", **plain, **common))
    elif name in SAME:
        build.ops.append(LossOp("same", **plain, **common))
    else:
        build.ops.append(LossOp("map", differentiable=name not in WITHOUT_SLOPE, **plain, **common))


def _numbers(step: Step, other: Step) -> list[Number | None]:
    """For every operand that is a literal, its value at both batch sizes."""
    if len(step.numbers) != len(step.inputs) or len(other.numbers) != len(other.inputs):
        return [None] * len(step.inputs)
    pairs = zip(step.numbers, other.numbers, strict=True)
    return [None if a is None or b is None else (a, b) for a, b in pairs]


Rule = Callable[[_Builder, Step, list[Number | None], dict[str, Any], dict[str, Any]], None]


def _iota(build: _Builder, step: Step, common: dict[str, Any]) -> None:
    """Numbers along one dim, copied along the others."""
    (number,), dim = step.outputs, step.params["dimension"]
    one, other = build.shapes[number]
    line = number if len(one) == 1 else build.new((one[dim],), (other[dim],))
    build.ops.append(LossOp("position", inputs=(), **(common | {"outputs": (line,)})))
    if line != number:
        labels = ((dim,), tuple(range(len(one))))
        build.ops.append(LossOp("same", inputs=(line,), labels=labels, differentiable=False, **common))


def _whole(build: _Builder, step: Step, numbers: list[Number | None]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """All operands as values, literals too, and labels of an op that works on entries one by one."""
    values = tuple(
        build.literal(number) if value is None else value for value, number in zip(step.inputs, numbers, strict=True)
    )
    rank = len(build.shapes[step.outputs[0]][0])
    shapes = [build.shapes[value] for value in (*values, *step.outputs)]
    whole = shapes[-1]
    labels = tuple(
        () if not one else tuple(d if (one[d], two[d]) == (whole[0][d], whole[1][d]) else -1 for d in range(rank))
        for one, two in shapes
    )
    return values, labels


def _arithmetic(how: How) -> Rule:
    def rule(
        build: _Builder,
        step: Step,
        numbers: list[Number | None],
        plain: dict[str, Any],
        common: dict[str, Any],
    ) -> None:
        values, labels = _whole(build, step, numbers)
        build.ops.append(LossOp(how, inputs=values, labels=labels, **common))

    return rule


def _add_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    literal = next((i for i, value in enumerate(step.inputs) if value is None), None)
    number = None if literal is None else numbers[literal]
    if number is None:
        values, labels = _whole(build, step, numbers)
        nothing = next((i for i, value in enumerate(values) if build.known.get(value) == (0.0, 0.0)), None)
        if nothing is not None and len(values) == 2 and step.name != "sub":  # what a loop adds to at first
            kept = 1 - nothing
            build.ops.append(LossOp("same", inputs=(values[kept],), labels=(labels[kept], labels[2]), **common))
            return
        build.ops.append(LossOp("add", inputs=values, labels=labels, **common))
        return
    sign = -1.0 if step.name == "sub" and literal == 1 else 1.0
    build.ops.append(LossOp("add", number=(sign * number[0], sign * number[1]), **plain, **common))


def _mul_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    number = next((n for n in numbers if n is not None), None)
    if number is not None:
        build.ops.append(LossOp("scale", number=number, **plain, **common))
    else:
        values, labels = _whole(build, step, numbers)
        build.ops.append(LossOp("multiply", inputs=values, labels=labels, **common))


def _div_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    number = numbers[1]
    if number is not None and all(number):
        build.ops.append(LossOp("scale", number=(1.0 / number[0], 1.0 / number[1]), **plain, **common))
    else:
        values, labels = _whole(build, step, numbers)
        build.ops.append(LossOp("divide", inputs=values, labels=labels, **common))


def _max_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    number = next((n for n in numbers if n is not None), None)
    inputs, labels = plain["inputs"], plain["labels"]
    for position, value in enumerate(inputs):
        if number is None and len(inputs) == 2 and value in build.known:
            number, inputs, labels = build.known[value], (inputs[1 - position],), (labels[1 - position], labels[2])
            break
    how: How = "map" if number is None else "at_least"
    build.ops.append(LossOp(how, number=number, **(plain | {"inputs": inputs, "labels": labels}), **common))


def _power_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    """x ** 1 is x, and x ** -1 is 1 / x."""
    exponent = step.params["y"]
    if exponent == -1:
        (value,) = plain["inputs"]
        whole = plain["labels"]
        inputs = (build.literal((1.0, 1.0)), value)
        build.ops.append(LossOp("divide", inputs=inputs, labels=((), *whole), **common))
    else:
        build.ops.append(LossOp("same" if exponent == 1 else "map", **plain, **common))


def _cast_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    """Linear, unless it rounds."""
    if not plain["inputs"]:
        number = next((n for n in numbers if n is not None), None)
        if number is not None and not build.shapes[step.outputs[0]][0]:
            build.known[step.outputs[0]] = number
        build.ops.append(LossOp("fill", inputs=(), number=number, **common))
        return
    before, after = (build.first.dtypes[value] for value in (plain["inputs"][0], step.outputs[0]))
    rounds = after == "bool" or (_inexact(before) and not _inexact(after))
    build.ops.append(LossOp("map" if rounds else "same", differentiable=_inexact(after), **plain, **common))


def _inexact(dtype: str) -> bool:
    return "float" in dtype or "complex" in dtype


def _select_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    if len(step.inputs) != 3:
        build.ops.append(LossOp("map", **plain, **common))
        return
    values, labels = _whole(build, step, numbers)
    if _is_never_negative(build, values[0], values[1]):  # how jax.numpy reads negative indices
        build.ops.append(LossOp("same", inputs=(values[1],), labels=(labels[1], labels[3]), **common))
        return
    build.ops.append(LossOp("select", inputs=values, labels=labels, **common))


def _is_never_negative(build: _Builder, condition: int, counted: int) -> bool:
    """Whether a condition asks if numbers 0, 1, 2 … are below 0."""
    asks = build.maker.get(condition)
    if asks is None or asks.name != "lt" or asks.inputs[0] != counted or asks.numbers[1:] != (0.0,):
        return False
    made = build.maker.get(counted)
    while made is not None and made.name in ("convert_element_type", "broadcast_in_dim", "reshape"):
        made = None if made.inputs[0] is None else build.maker.get(made.inputs[0])
    return made is not None and made.name == "iota"


def _of(how: How) -> Rule:
    def rule(
        build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
    ) -> None:
        build.ops.append(LossOp(how if plain["inputs"] else "fill", **plain, **common))

    return rule


def _contract_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    build.ops.append(LossOp("contract" if len(plain["inputs"]) == 2 else "map", **plain, **common))


def _lookup_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    """A table by one index. An index whose last dim holds several coordinates, made by joining them, is those."""
    if len(plain["inputs"]) != 2:
        build.ops.append(LossOp("map", **plain, **common))
        return
    dims = _indexed_dims(step)
    table, index = plain["inputs"]
    joined = build.maker.get(index)
    last = len(build.shapes[index][0]) - 1
    if (
        len(dims) > 1
        and joined is not None
        and joined.name == "concatenate"
        and joined.params["dimension"] == last
        and len(joined.inputs) == len(dims)
        and None not in joined.inputs
    ):
        parts = tuple(value for value in joined.inputs if value is not None)
        _, of_index, of_result = plain["labels"]
        labels = (plain["labels"][0], *([of_index] * len(parts)), of_result)
        build.ops.append(
            LossOp("lookup", dims=dims, **(plain | {"inputs": (table, *parts), "labels": labels}), **common)
        )
    else:
        build.ops.append(LossOp("lookup" if len(dims) == 1 else "map", dims=dims, **plain, **common))


def _indexed_dims(step: Step) -> tuple[int, ...]:
    """The dims of a table that an index of this step looks up."""
    numbers = step.params.get("dimension_numbers")
    if numbers is None:  # a whole jnp.take or jnp.take_along_axis: a gather inside
        inner = step.params["jaxpr"].jaxpr.eqns
        gathers = [e for e in _equations(inner) if e.primitive.name == "gather"]
        numbers = gathers[0].params["dimension_numbers"] if len(gathers) == 1 else None
    return () if numbers is None else tuple(numbers.start_index_map)


def _equations(equations: Sequence[Any]) -> list[Any]:
    found = []
    for equation in equations:
        found.append(equation)
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                found += _equations(value.jaxpr.eqns)
    return found


def _concat_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    build.ops.append(LossOp("concat", dims=(step.params["dimension"],), **plain, **common))


def _slice_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    (value,), (made,) = plain["inputs"], step.outputs
    before, after = build.shapes[value], build.shapes[made]
    cut = [d for d in range(len(before[0])) if before[0][d] != after[0][d] or before[1][d] != after[1][d]]
    strides = step.params["strides"] or (1,) * len(before[0])
    if len(cut) != 1 or strides[cut[0]] != 1:
        build.ops.append(LossOp("map", **plain, **common))
        return
    start = int(step.params["start_indices"][cut[0]])
    build.ops.append(LossOp("cut", dims=(cut[0],), offsets=((start,), (start,)), **plain, **common))


def _split_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    axis = step.params["axis"]
    offsets: list[list[int]] = [[], []]
    for which in (0, 1):
        start = 0
        for value in step.outputs:
            offsets[which].append(start)
            start += build.shapes[value][which][axis]
    build.ops.append(LossOp("cut", dims=(axis,), offsets=(tuple(offsets[0]), tuple(offsets[1])), **plain, **common))


def _batch_norm_rule(
    build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
) -> None:
    """Statistics over the samples that a call sees: which those are is the plan's ``loss_scope``, and no question of
    the loss."""
    whole = build.shapes[step.outputs[0]]
    labels = []
    for value in (*plain["inputs"], *step.outputs):
        shape = build.shapes[value]
        labels.append(tuple(range(len(shape[0]))) if shape == whole else (-1,) * len(shape[0]))
    build.ops.append(LossOp("map", **(plain | {"labels": tuple(labels), "special": ()}), **common))


def _last_dims(count: int | None = None) -> Rule:
    """Ops that work on the last dims as a whole, and on what comes before them one by one."""

    def rule(
        build: _Builder, step: Step, numbers: list[Number | None], plain: dict[str, Any], common: dict[str, Any]
    ) -> None:
        last = len(step.params["fft_lengths"]) if count is None else count
        shapes = [build.shapes[value][0] for value in (*plain["inputs"], *step.outputs)]
        labels = tuple(tuple(d if d < len(shape) - last else -1 for d in range(len(shape))) for shape in shapes)
        build.ops.append(LossOp("map", **(plain | {"labels": labels, "special": ()}), **common))

    return rule


_RULES: dict[str, Rule] = {
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
    "reduce_sum": _of("sum"),
    "stop_gradient": _of("detach"),
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
