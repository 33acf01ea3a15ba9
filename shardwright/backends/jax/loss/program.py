"""A traced loss function as a program of `core.model.loss`: the effect of each of its ops on sums over samples."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from shardwright.backends.jax.capture.ops import RANDOM, translate
from shardwright.backends.jax.capture.steps import Program, Step
from shardwright.backends.jax.loss.differences import same_array, same_params
from shardwright.backends.jax.loss.op_rules import RESHAPES, RULES, SAME, Builder, Number, Reading
from shardwright.core.errors import CaptureError
from shardwright.core.model.loss import LossOp, LossProgram, Source, follows

_WITHOUT_SLOPE = """
    sign floor ceil round is_finite eq ne lt le gt ge eq_to lt_to le_to and or xor not shift_left shift_right_logical
    shift_right_arithmetic population_count clz nextafter bitcast_convert_type
"""
WITHOUT_SLOPE = frozenset(_WITHOUT_SLOPE.split())
"""The ops that gradients do not pass."""


def loss_program(
    first: Program, second: Program, sizes: tuple[int, int], trained: Sequence[bool], inputs: int
) -> LossProgram:
    """The program of a loss function from its traces at two batch sizes, which have the same steps.

    trained: one flag for each of the first arguments, the model's arrays; inputs: the number of arguments after them
    that are the batch.
    """
    build = Builder(first, second, sizes)
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
"""The ops whose rules make something of every number that they are given."""


def _require_explained(build: Builder, step: Step, other: Step, before: int) -> None:
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


def _add(build: Builder, step: Step, other: Step) -> None:
    """Add the ops of one step."""
    name = step.name
    _, inputs, labelled = translate(other, build.second)
    said = name.removeprefix("call:").removeprefix("random.")
    where = build.first.calls[step.call].path
    op = LossOp("map", said, inputs, step.outputs, labelled.labels, labelled.special, where)
    at = Reading(build, step, _numbers(step, other), op)
    if not build.given.isdisjoint(inputs):
        build.given.update(step.outputs)
    if name.startswith(("random.", "random_", "rng_")) or name in RANDOM:
        same = build.given.isdisjoint(inputs)  # the same numbers in every microbatch
        build.ops.append(replace(at.of("opaque", inputs) if same else at.of("draw", ()), differentiable=False))
    elif name == "iota":
        _iota(at)
    elif not inputs and step.made is not None and other.made is not None:
        build.known[step.outputs[0]] = step.made, other.made
        build.ops.append(at.of("fill", (), number=(step.made, other.made)))
    elif name in RULES:
        build.ops.append(RULES[name](at))
    elif not inputs:
        build.ops.append(at.of("fill", (), number=at.number if name in SAME | RESHAPES else None))
    elif name in RESHAPES or name in SAME:
        build.ops.append(replace(op, how="reshape" if name in RESHAPES else "same"))
    else:
        build.ops.append(replace(op, differentiable=name not in WITHOUT_SLOPE))


def _numbers(step: Step, other: Step) -> list[Number | None]:
    """The value of each operand at both batch sizes; None for an operand that is no literal."""
    if len(step.numbers) != len(step.inputs) or len(other.numbers) != len(other.inputs):
        return [None] * len(step.inputs)
    pairs = zip(step.numbers, other.numbers, strict=True)
    return [None if a is None or b is None else (a, b) for a, b in pairs]


def _iota(at: Reading) -> None:
    """Add the ops of an iota: numbers along one dim, copied along the others."""
    (number,), dim, build = at.step.outputs, at.step.params["dimension"], at.build
    one, other = build.shapes[number]
    line = number if len(one) == 1 else build.new((one[dim],), (other[dim],))
    build.ops.append(replace(at.of("position", ()), outputs=(line,)))
    if line != number:
        labels = ((dim,), tuple(range(len(one))))
        build.ops.append(replace(at.of("same", (line,), labels), differentiable=False))
