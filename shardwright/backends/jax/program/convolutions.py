"""Convolutions inside a loop on a CPU, written in the one order of dims that XLA runs fast there.

XLA's CPU compiler has a fast kernel for convolutions whose batch is the first and whose features are the last dim, and
brings all others into that order, but only outside of loops (https://github.com/jax-ml/jax/issues/12868). The gradients
of a convolution are in another order: inside the loop over microbatches they would run entry by entry, about ten times
slower.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from shardwright.backends.jax.capture.inner_programs import bound, equations_in, interpreted

CALLS = frozenset({"jit", "pjit", "checkpoint", "remat2"})
"""The primitives that run a program of their own where they stand."""


def for_cpu_loops(body: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    """The function ``body`` with its convolutions in that order, to be called with values of the shapes of ``given``;
    it is traced once."""
    closed, shape = jax.make_jaxpr(body, return_shape=True)(*given)
    run = _ordered(closed) if _convolves(closed.jaxpr) else jex_core.jaxpr_as_fun(closed)
    structure = jax.tree.structure(shape)

    def same(*arguments: Any) -> Any:
        return jax.tree.unflatten(structure, run(*jax.tree.leaves(arguments)))

    return same


def _convolves(jaxpr: jex_core.Jaxpr) -> bool:
    return any(equation.primitive.name == "conv_general_dilated" for equation in equations_in(jaxpr))


def _ordered(closed: jex_core.ClosedJaxpr) -> Callable[..., list[Any]]:
    """The program as a function of its arguments."""

    def apply(_: int, equation: jex_core.JaxprEqn, given: list[Any]) -> Sequence[Any]:
        with equation.ctx.manager:
            return _run(equation, given)

    return lambda *given: interpreted(closed.jaxpr, closed.consts, given, apply, lambda literal: literal.val)


def _run(equation: jex_core.JaxprEqn, given: Sequence[Any]) -> Sequence[Any]:
    """The results of one equation."""
    name, params = equation.primitive.name, equation.params
    if name == "conv_general_dilated":
        return [_convolution(*given, **params)]
    if name in CALLS and _convolves(getattr(params["jaxpr"], "jaxpr", params["jaxpr"])):
        inner = params["jaxpr"]
        closed = isinstance(inner, jex_core.ClosedJaxpr)
        rewritten = jax.make_jaxpr(_ordered(inner if closed else jex_core.ClosedJaxpr(inner, ())))(*given)
        params = params | {"jaxpr": rewritten if closed else rewritten.jaxpr}
    return bound(equation.primitive, params, given)


def _convolution(left: Any, right: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    """The same convolution between transpositions."""
    dims = range(1, left.ndim - 1)
    batch, feature, *space = dimension_numbers.lhs_spec
    out, in_, *kernel = dimension_numbers.rhs_spec
    ordered = jax.lax.ConvDimensionNumbers(
        (0, left.ndim - 1, *dims), (left.ndim - 1, left.ndim - 2, *(d - 1 for d in dims)), (0, left.ndim - 1, *dims)
    )
    made = jax.lax.conv_general_dilated_p.bind(
        jnp.transpose(left, (batch, *space, feature)),
        jnp.transpose(right, (*kernel, in_, out)),
        dimension_numbers=ordered,
        **params,
    )
    batch, feature, *space = dimension_numbers.out_spec
    back = (batch, *space, feature)
    return jnp.transpose(made, [back.index(dim) for dim in range(left.ndim)])
