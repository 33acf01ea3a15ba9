"""The programs inside the equations of a program, and the primitives that run one once."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

Aval = ShapedArray | jax.ShapeDtypeStruct
"""The shape and dtype of an array."""
JITS = frozenset({"jit", "pjit", "closed_call", "core_call"})
CHECKPOINTS = frozenset({"remat", "remat2", "checkpoint"})
OWN_DERIVATIVES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
INLINED = JITS | CHECKPOINTS | OWN_DERIVATIVES
"""The primitives that run one inner program once, on their last operands."""


def aval(atom: Var | Literal) -> ShapedArray:
    """The shape and dtype of a value, which is an array or a random key."""
    found: Any = atom.aval
    return cast(ShapedArray, found)


def inner_program(params: Mapping[str, Any]) -> ClosedJaxpr | None:
    """The program that an equation with these parameters runs once, as it is."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = params.get(key)
        if inner is not None:
            return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
    return None


def equations_in(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a program, each followed by those of the programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations_in(inner)
