"""Equations run in turn: from product to product, each stretch reads its operands when the product before is done.

XLA's CPU compiler puts first whatever needs no other result. In a stage's backward these are copies of saved
activations and weights in another order of dims, and arithmetic on them, of all units of the stage: they would wait in
memory until the gradient comes to them. So the operands of a stretch pass through one optimization barrier together
with the result of the product before. Everything is computed as it would be; only the order is given.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.backends.jax.program.equations import Equation, evaluate

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "scan", "while"})
"""The primitives that read their operands from memory."""
SHAPES = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "convert_element_type"})
"""The primitives that compilers make part of the product whose result they read."""


def evaluate_in_turn(equations: Sequence[Equation], known: dict[int, Any], cheap: Collection[str]) -> None:
    """Run equations as `evaluate` does, in their turn. ``cheap``: the primitives that, read from operands alone, run
    when another equation first reads their result."""
    operands = dict(known)
    before: int | None = None
    for stretch, last in _stretches(_when_read(equations, known, cheap)):
        reads = [v for v in dict.fromkeys(v for e in stretch for v in e.values) if _is_array(operands.get(v))]
        if before is not None and reads:
            known[before], *tied = jax.lax.optimization_barrier((known[before], *(operands[v] for v in reads)))
            known.update(zip(reads, tied, strict=True))
        evaluate(stretch, known)
        before = last


def _is_array(value: Any) -> bool:
    """Whether an operand is an array of numbers: no random key, no token."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.number)


def _when_read(equations: Sequence[Equation], known: Collection[int], cheap: Collection[str]) -> list[Equation]:
    """The equations, cheap ones of operands directly before the first that reads them."""
    waiting: dict[int, Equation] = {}
    ordered: list[Equation] = []

    def run_makers(equation: Equation) -> None:
        for value in equation.values:
            if (maker := waiting.get(value)) is not None:
                for made in maker.outputs:
                    del waiting[made]
                run_makers(maker)
                ordered.append(maker)

    for equation in equations:
        is_cheap = equation.primitive.name in cheap and not equation.effects
        if is_cheap and all(value in known or value in waiting for value in equation.values):
            waiting.update(dict.fromkeys(equation.outputs, equation))
            continue
        run_makers(equation)
        ordered.append(equation)
    return [*ordered, *dict.fromkeys(waiting.values())]


def _stretches(equations: Sequence[Equation]) -> Iterator[tuple[list[Equation], int]]:
    """The equations from one product to the next, with the last value that the product, and changes of its shape,
    make."""
    readers: dict[int, list[Equation]] = {}
    for equation in equations:
        for value in equation.values:
            readers.setdefault(value, []).append(equation)
    stretch: list[Equation] = []
    ran: set[int] = set()
    last = -1
    for equation in equations:
        if id(equation) in ran:
            continue
        stretch.append(equation)
        if equation.primitive.name not in PRODUCTS:
            continue
        last = equation.outputs[0]
        while len(after := readers.get(last, [])) == 1 and after[0].primitive.name in SHAPES:
            stretch.append(after[0])
            ran.add(id(after[0]))
            last = after[0].outputs[0]
        yield stretch, last
        stretch = []
    if stretch:
        yield stretch, last
