"""The values that a stage keeps from forward to backward. The core decides (`core.cost.remade_values`)."""

from collections.abc import Collection
from dataclasses import dataclass

from shardwright.backends.jax.capture.inner_programs import JITS, OWN_DERIVATIVES, equations_in, inner_program
from shardwright.backends.jax.program.equations import Equation, FlatProgram
from shardwright.backends.jax.program.fp8_products import FORWARD, GRADIENT
from shardwright.backends.jax.program.in_turn import PRODUCTS
from shardwright.core.cost.least_kept import least_kept
from shardwright.core.cost.remade_values import ForwardOp, kept_values

CHEAP = frozenset(
    {"abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "div", "eq"}
    | {"expand_dims", "ge", "gt", "integer_pow", "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or"}
    | {"reshape", "select_n", "sign", "slice", "square", "squeeze", "stop_gradient", "sub", "transpose", "xor"}
)
"""The arithmetic that fuses with what reads it. Transcendental functions, products and reductions are kept."""
EIGHT_BITS = (FORWARD, GRADIENT)


@dataclass(frozen=True, slots=True)
class Residuals:
    """The values that are handed from forward to backward (``kept``), and the equations that make all others of them
    and of the program's inputs, in order (``remade``)."""

    kept: tuple[int, ...]
    remade: tuple[Equation, ...]


def residuals(
    program: FlatProgram, wanted: Collection[int], passing: Collection[int] = (), *, least: bool = False
) -> Residuals:
    """The values that a stage keeps of the ``wanted`` ones, which its derivative reads. Arguments and constants are at
    hand in the backward pass, but for the ``passing`` arguments, which will have changed by then (the model's state).
    ``least``: whether operands of products are made again too, and the fewest bytes are kept from which cheap
    arithmetic makes the rest. A compiler of forward and backward together does so by itself.
    """
    ops = [
        ForwardOp(
            tuple(e.values), e.outputs, _is_cheap(program, e) or (least and _is_rule_of_cheap(e)),
            _is_product(program, e),
        )
        for e in program.equations
    ]  # fmt: skip
    if least:
        found = least_kept(ops, {*program.arguments, *program.constants}, wanted, program.size_bytes)
        return Residuals(found.kept, tuple(program.equations[index] for index in found.remade))
    found = kept_values(ops, {*program.arguments, *program.constants}, wanted, program.size_bytes, passing)
    return Residuals(found.kept, tuple(program.equations[index] for index in found.remade))


def _is_cheap(program: FlatProgram, equation: Equation) -> bool:
    """Whether an equation is made again: not so a cast to 8 bits, whose result is the smaller one to keep."""
    is_narrow = any(program.avals[value].dtype in EIGHT_BITS for value in equation.outputs)
    return equation.primitive.name in CHEAP and not equation.effects and not is_narrow


def _is_rule_of_cheap(equation: Equation) -> bool:
    """Whether an equation is cheap arithmetic with a derivative rule of its own, as that of `jax.nn.relu`."""
    inner = inner_program(equation.params) if equation.primitive.name in OWN_DERIVATIVES else None
    return inner is not None and all(e.primitive.name in CHEAP | JITS for e in equations_in(inner.jaxpr))


def _is_product(program: FlatProgram, equation: Equation) -> bool:
    """Whether an equation reads wide operands from memory. Not so a product in fp8, whose casts are kept by themselves
    (`program.fp8_products`)."""
    return equation.primitive.name in PRODUCTS and not any(
        program.avals[value].dtype in EIGHT_BITS for value in equation.values if value is not None
    )
