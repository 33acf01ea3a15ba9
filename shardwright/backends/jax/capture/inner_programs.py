"""The programs inside the equations of a program, the primitives that run one once, and runs equation by equation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxprs_in_params

T = TypeVar("T")
Aval = ShapedArray | jax.ShapeDtypeStruct
"""The shape and dtype of an array."""
LOOPS = frozenset({"scan", "while"})
"""The primitives that run one inner program again and again."""
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


def computes_again(jaxpr: Jaxpr) -> bool:
    """Whether a program has parts that run again in the backward pass."""
    return any(equation.primitive.name in CHECKPOINTS for equation in equations_in(jaxpr))


def computes_loops_again(jaxpr: Jaxpr) -> bool:
    """Whether loops are in those parts."""
    parts = (equation for equation in equations_in(jaxpr) if equation.primitive.name in CHECKPOINTS)
    inside = (inner for part in parts for program in jaxprs_in_params(part.params) for inner in equations_in(program))
    return any(equation.primitive.name in LOOPS for equation in inside)


def rows_between(shape: Sequence[int], start: int, end: int) -> dict[str, Any]:
    """The parameters of the slice that takes rows from ``start`` to ``end`` of an array."""
    return {"start_indices": (start, *([0] * (len(shape) - 1))), "limit_indices": (end, *shape[1:]), "strides": None}


def bound(primitive: Primitive, params: Mapping[str, Any], given: Sequence[Any]) -> list[Any]:
    """The results of one application of a primitive."""
    made = primitive.bind(*given, **primitive.get_bind_params(params))
    return list(made) if primitive.multiple_results else [made]


def interpreted(
    jaxpr: Jaxpr,
    constants: Sequence[T],
    arguments: Sequence[T],
    apply: Callable[[int, JaxprEqn, list[T]], Sequence[T]],
    literal: Callable[[Literal], T],
) -> list[T]:
    """The results of a program on values of any kind.

    ``apply`` gives the results of an equation from its position and operands, and ``literal`` the value of a literal.
    """
    known: dict[Var, T] = dict(zip(jaxpr.invars, arguments, strict=True))
    known.update(zip(jaxpr.constvars, constants, strict=True))

    def read(atom: Var | Literal) -> T:
        return literal(atom) if isinstance(atom, Literal) else known[atom]

    for index, equation in enumerate(jaxpr.eqns):
        made = apply(index, equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def scanned(params: Mapping[str, Any], given: Sequence[Any], body: Callable[..., Sequence[Any]]) -> list[Any]:
    """The results of a scan with these parameters and operands, and another body. What the body gives beyond the
    results of the scan's own is stacked too."""
    fixed, carried = params["num_consts"], params["num_carry"]

    def step(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        made = list(body(*given[:fixed], *carry, *rows))
        return made[:carried], made[carried:]

    carry, stacked = jax.lax.scan(
        step,
        list(given[fixed : fixed + carried]),
        list(given[fixed + carried :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]
