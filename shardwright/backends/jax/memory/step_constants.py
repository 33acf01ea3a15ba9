"""The arrays of constants that XLA's CPU compiler makes once for all microbatches and layers of a step, and keeps."""

import math
from collections.abc import Iterator

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from shardwright.backends.jax.capture.inner_programs import LOOPS
from shardwright.backends.jax.program.equations import FlatProgram
from shardwright.backends.jax.program.flattening import flatten
from shardwright.backends.jax.program.random_draws import counters_bytes

SCALES = frozenset({"mul", "div"})


def constants_bytes(closed: ClosedJaxpr) -> int:
    """The bytes of the constants that stay while a step of one program runs: the counters of random draws, and numbers
    by which products are scaled."""
    scales = set(_scales(flatten(closed, opens_checkpoints=True)))
    sizes = [math.prod(shape) * width for _, _, shape, width in scales]
    return counters_bytes(closed.jaxpr) + sum(sizes)


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
