"""Random draws run in turn: each waits for the product before it, and what is kept of it is made at once.

The bits of a draw follow from its key alone, so XLA's CPU compiler draws for all layers of a model first, and for each
it holds two arrays of bits in 32 bits an entry. It also makes a mask that the backward pass reads when the forward pass
ends, and until then holds the bits. So the key of a draw, and a mask that is kept, pass through optimization barriers
together with the last product of the program before them. The same holds where the backward pass draws again
(`in_turn`). Every value is what it would be; only the order is given.
"""

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from shardwright.backends.jax.capture.inner_programs import CHECKPOINTS, OWN_DERIVATIVES, aval, equations_in
from shardwright.backends.jax.program.equations import Equation, FlatProgram, evaluate
from shardwright.backends.jax.program.in_turn import PRODUCTS, tie
from shardwright.backends.jax.program.saved_activations import CHEAP

DRAW = "random_bits"
THREEFRY = "key<fry>"
"""The dtype of the keys of JAX's default random numbers."""


def evaluate_draws_in_turn(program: FlatProgram, known: dict[int, Any], kept: Collection[int]) -> None:
    """Run a program's equations as `evaluate` does, its random draws in their turn. ``kept``: the values that the
    backward pass reads."""
    drawn = _made_of_bits(program)
    read = {value for equation in program.equations for value in equation.values}
    product: int | None = None
    waiting: list[Equation] = []
    for equation in program.equations:
        name = equation.primitive.name
        if product is not None and (name == DRAW or name in CHECKPOINTS):
            keys = [value for value in equation.values if _is_key(program, value)]
            _run(waiting, known)
            tie(product, keys, known)
        waiting.append(equation)
        if name in PRODUCTS or name in CHECKPOINTS:
            product = equation.outputs[0]
        # XLA would make a sum of a residual stream anew of the terms of all sums before it, and keep those.
        is_kept = name in CHEAP | OWN_DERIVATIVES and read.intersection(equation.outputs)
        tied = [value for value in equation.outputs if value in kept and (value in drawn or is_kept)]
        if product is not None and tied:
            _run(waiting, known)
            tie(product, tied, known)
    _run(waiting, known)


def counters_bytes(jaxpr: Jaxpr) -> int:
    """The bytes of the counters of which Threefry makes bits: two of 32 bits for each entry of a draw. XLA makes them
    once for all draws of one shape, before the first microbatch, and keeps them."""
    draws = (equation for equation in equations_in(jaxpr) if equation.primitive.name == DRAW)
    shapes = {tuple(draw.params["shape"]) for draw in draws if str(aval(draw.invars[0]).dtype) == THREEFRY}
    return sum(2 * 4 * math.prod(shape) for shape in shapes)


def masks_of(program: FlatProgram) -> set[int]:
    """The values that are made of bits of draws alone, and are read together with others."""
    drawn = _made_of_bits(program)
    return {
        value
        for equation in program.equations
        for value in equation.values
        if value in drawn and drawn.isdisjoint(equation.outputs)
    }


def _run(waiting: list[Equation], known: dict[int, Any]) -> None:
    evaluate(waiting, known)
    waiting.clear()


def _made_of_bits(program: FlatProgram) -> set[int]:
    """The values that are made of the bits of draws and of single numbers alone."""
    made: set[int] = set()
    alone = {value for value in (*program.arguments, *program.constants) if program.avals[value].size <= 1}
    for equation in program.equations:
        is_of_bits = equation.primitive.name == DRAW or not made.isdisjoint(equation.values)
        if all(value in alone for value in equation.values):
            alone.update(equation.outputs)
            made.update(equation.outputs if is_of_bits else ())
        elif all(program.avals[value].size <= 1 for value in equation.outputs):
            alone.update(equation.outputs)
    return made


def _is_key(program: FlatProgram, value: int) -> bool:
    return bool(jnp.issubdtype(program.avals[value].dtype, jax.dtypes.prng_key))
