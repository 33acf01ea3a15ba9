"""Values with a layout of their own on a mesh, and their gradients with another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Literal, Primitive
from jax.sharding import NamedSharding

from shardwright.backends.jax.capture.inner_programs import bound, inner_program


def lay_out(x: Any, at: NamedSharding | None, gradient_at: NamedSharding | None) -> Any:
    """``x`` with its own layout ``at`` and its gradient's ``gradient_at``; None says nothing."""
    if at == gradient_at:
        return x if at is None else jax.lax.with_sharding_constraint(x, at)

    @jax.custom_vjp
    def lay(x: Any) -> Any:
        return x if at is None else jax.lax.with_sharding_constraint(x, at)

    def forward(x: Any) -> tuple[Any, None]:
        return lay(x), None

    def backward(_: None, gradient: Any) -> tuple[Any]:
        if gradient_at is None or gradient.dtype == jax.dtypes.float0:
            return (gradient,)
        return (jax.lax.with_sharding_constraint(gradient, gradient_at),)

    lay.defvjp(forward, backward)
    return lay(x)


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layout of a value and that of its gradient, which differ."""

    value: NamedSharding | None
    gradient: NamedSharding | None

    def equation(self, given: ShapedArray) -> tuple[Primitive, Mapping[str, Any]]:
        """The primitive and parameters of the equation that lays out a value of this shape."""
        shape = jax.ShapeDtypeStruct(given.shape, given.dtype)
        closed = jax.make_jaxpr(lambda x: lay_out(x, self.value, self.gradient))(shape)
        (equation,) = closed.jaxpr.eqns
        return equation.primitive, equation.params


def layouts_of(primitive: Primitive, params: Mapping[str, Any], given: Sequence[ShapedArray]) -> Layouts | None:
    """The layouts that an equation gives to a value and its gradient, as by `lay_out`; None for one that computes
    something."""
    body = inner_program(params) if primitive.name == "custom_vjp_call" else None
    if body is None or len(given) != 1 or len(body.jaxpr.outvars) != 1:
        return None
    value = _chain(body.jaxpr, body.jaxpr.invars[0])
    shape = jax.ShapeDtypeStruct(given[0].shape, given[0].dtype)

    def pulled_back(x: Any, gradient: Any) -> Any:
        return jax.vjp(lambda x: bound(primitive, params, [x])[0], x)[1](gradient)

    back = jax.make_jaxpr(pulled_back)(shape, shape).jaxpr
    gradient = _chain(back, back.invars[1])
    return None if value is None or gradient is None else Layouts(value[0], gradient[0])


def _chain(jaxpr: Any, source: Any) -> tuple[NamedSharding | None] | None:
    """The last layout on the way from an argument to the result, where nothing but layouts lies on it."""
    made = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    found, variable = None, jaxpr.outvars[0]
    while not isinstance(variable, Literal) and variable in made:
        equation = made[variable]
        if equation.primitive.name != "sharding_constraint":
            return None
        found, variable = found or equation.params["sharding"], equation.invars[0]
    return (found,) if variable is source else None
