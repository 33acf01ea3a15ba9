"""The arrays of constants that XLA's CPU compiler makes once for all microbatches and layers of a step, and keeps."""

import math
from collections.abc import Iterator

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from shardwright.backends.jax.capture.inner_programs import LOOPS
from shardwright.backends.jax.program.equations import Equation, FlatProgram
from shardwright.backends.jax.program.flattening import flatten
from shardwright.backends.jax.program.random_draws import counters_bytes

SCALES = frozenset({"mul", "div"})
TURNS = frozenset({"reshape", "squeeze", "transpose"})
IN_ONE_KERNEL = TURNS | {"add", "add_any", "broadcast_in_dim", "div", "mul", "neg", "sub"}
"""The primitives that XLA's CPU compiler joins with a sum before and behind it."""


def constants_bytes(closed: ClosedJaxpr) -> int:
    """The bytes of the constants that stay while a step of one program runs: the counters of random draws, and numbers
    by which products are scaled."""
    scales = set(_scales(flatten(closed, opens_checkpoints=True)))
    sizes = [math.prod(shape) * width for _, _, shape, width in scales]
    return counters_bytes(closed.jaxpr) + sum(sizes)


def scaled_sums_bytes(program: FlatProgram) -> int:
    """The bytes of the numbers by which a backward scales what a product reads and what the same kernel made of a sum,
    as the gradients of scores of attention behind their softmax: the kernel reads the number as an array. A choice
    between values ends the kernel, as where scores are masked."""
    read_by: dict[int, list[Equation]] = {}
    for equation in program.equations:
        for value in equation.values:
            read_by.setdefault(value, []).append(equation)

    def is_factor(value: int) -> bool:
        """Whether a product reads a value, perhaps in another order or shape."""
        readers = read_by.get(value, ())
        turned = (made for e in readers if e.primitive.name in TURNS for made in e.outputs)
        return any(e.primitive.name == "dot_general" for e in readers) or any(map(is_factor, turned))

    of_sums: set[int] = set()
    found: set[tuple[str, float, tuple[int, ...], int]] = set()
    for equation in program.equations:
        name = equation.primitive.name
        if name != "reduce_sum" and (name not in IN_ONE_KERNEL or of_sums.isdisjoint(equation.values)):
            continue
        of_sums.update(equation.outputs)
        numbers = [atom.val for atom in equation.inputs if isinstance(atom, Literal) and not np.ndim(atom.val)]
        if name in SCALES and numbers and is_factor(equation.outputs[0]):
            aval = program.avals[equation.outputs[0]]
            found.add((name, float(numbers[0]), tuple(aval.shape), aval.dtype.itemsize))
    return sum(math.prod(shape) * width for _, _, shape, width in found)


def _scales(program: FlatProgram) -> Iterator[tuple[str, float, tuple[int, ...], int]]:
    """The numbers, each with its primitive, shape and bytes per entry, that products are multiplied with before they
    are reduced, as scores of attention are before a softmax: the compiler joins all of that into one kernel, which
    reads the number as an array of the product's shape."""
    products: set[int] = set()
    reduced = {v for e in program.equations if e.primitive.name.startswith("reduce_") for v in e.values}
    for equation in program.equations:
        name = equation.primitive.name
        for inner in equation.params.values() if name in LOOPS else ():
            if isinstance(inner, ClosedJaxpr):
                yield from _scales(flatten(inner, opens_checkpoints=True))
        if name == "dot_general" or (name == "transpose" and not products.isdisjoint(equation.values)):
            products.update(equation.outputs)
        numbers = [atom.val for atom in equation.inputs if isinstance(atom, Literal) and not np.ndim(atom.val)]
        if name in SCALES and numbers and not products.isdisjoint(equation.values):
            (value,) = equation.outputs
            if value in reduced:
                aval = program.avals[value]
                yield name, float(numbers[0]), tuple(aval.shape), aval.dtype.itemsize
