"""The values that a stage keeps from forward to backward. The core decides (`core.cost.remade_values`)."""

from collections.abc import Collection
from dataclasses import dataclass

from shardwright.backends.jax.program.equations import Equation, FlatProgram
from shardwright.backends.jax.program.in_turn import PRODUCTS
from shardwright.core.cost.remade_values import ForwardOp, kept_values

CHEAP = frozenset(
    {"abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "div", "eq"}
    | {"expand_dims", "ge", "gt", "integer_pow", "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or"}
    | {"reshape", "select_n", "sign", "slice", "square", "squeeze", "stop_gradient", "sub", "transpose", "xor"}
)
"""The arithmetic that fuses with what reads it. Transcendental functions, products and reductions are kept."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """The values that are handed from forward to backward (``kept``), and the equations that make all others of them
    and of the program's inputs, in order (``remade``)."""

    kept: tuple[int, ...]
    remade: tuple[Equation, ...]


def residuals(program: FlatProgram, wanted: Collection[int], passing: Collection[int] = ()) -> Residuals:
    """The values that a stage keeps of the ``wanted`` ones, which its derivative reads. Arguments and constants are at
    hand in the backward pass, but for the ``passing`` arguments, which will have changed by then (the model's state).
    """
    ops = [
        ForwardOp(tuple(e.values), e.outputs, e.primitive.name in CHEAP and not e.effects, e.primitive.name in PRODUCTS)
        for e in program.equations
    ]
    found = kept_values(ops, {*program.arguments, *program.constants}, wanted, program.size_bytes, passing)
    return Residuals(found.kept, tuple(program.equations[index] for index in found.remade))
