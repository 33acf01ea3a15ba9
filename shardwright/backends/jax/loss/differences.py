"""The differences of an equation between two traces at two batch sizes, beside the shapes that follow from them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

_SIZES = """
    shape sizes new_sizes start_indices limit_indices slice_sizes length axis_size operand_shape
    sharding out_sharding sharding_spec in_shardings out_shardings in_layouts out_layouts ctx_mesh mesh
"""
SIZES = frozenset(_SIZES.split())
"""The parameters of equations that say how large or where something is."""


def same_params(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the parameters of an equation are the same in both traces, but for sizes."""
    return one.keys() == other.keys() and all(key in SIZES or _same(one[key], other[key]) for key in one)


def same_array(one: Any, other: Any) -> bool:
    """Whether two constants have the same entries. True for constants of different shapes, which are not compared."""
    if getattr(one, "shape", None) != getattr(other, "shape", None) or jnp.issubdtype(
        getattr(one, "dtype", np.float32), jax.dtypes.extended
    ):
        return True
    try:
        return bool(np.array_equal(np.asarray(one), np.asarray(other), equal_nan=np.asarray(one).dtype.kind in "fc"))
    except (TypeError, ValueError, jax.errors.JAXTypeError):
        return True  # no values: not a constant


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if hasattr(one, "jaxpr") and hasattr(other, "jaxpr"):  # closed
        pairs = zip(one.consts, other.consts, strict=False)
        return _same(one.jaxpr, other.jaxpr) and all(same_array(a, b) for a, b in pairs)
    if hasattr(one, "eqns") and hasattr(other, "eqns"):
        return (
            len(one.eqns) == len(other.eqns)
            and all(map(_same_equation, one.eqns, other.eqns))
            and all(map(_same_atom, one.outvars, other.outvars))
        )
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return same_params(one, other)
    if isinstance(one, (int, float, complex, str, bool, np.generic, np.ndarray, jax.Array)):
        return type(one) is type(other) and same_array(np.asarray(one), np.asarray(other))
    return True  # functions and the like, made anew for every trace


def _same_equation(one: Any, other: Any) -> bool:
    if one.primitive.name != other.primitive.name or not same_params(one.params, other.params):
        return False
    return all(map(_same_atom, one.invars, other.invars))


def _same_atom(one: Any, other: Any) -> bool:
    if not isinstance(one, jex_core.Literal) or not isinstance(other, jex_core.Literal):
        return isinstance(one, jex_core.Literal) == isinstance(other, jex_core.Literal)
    return same_array(one.val, other.val)
