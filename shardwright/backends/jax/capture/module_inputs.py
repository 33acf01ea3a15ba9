"""The inputs of modules in the dtype that a step computes in, and what is computed in a wider one all the same.

One float32 array that meets one of 16 bits makes a float32 one in JAX, and so on to the end of the model. So the
floating arguments of every call of a module are cast.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.source_info_util import summarize

from shardwright.backends.jax.capture.precision import computed_in
from shardwright.backends.jax.capture.trace import has_state, patched

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})


class ModuleCalls:
    """The calls of the modules of a model.

    Args:
        compute: the dtype that their floating arguments are given in.

    Attributes:
        count: the number of calls so far.
    """

    def __init__(self, compute: Any) -> None:
        self.compute, self.count = compute, 0

    @contextmanager
    def around(self, model: nnx.Module | None) -> Iterator[None]:
        """A context in which the calls of an NNX model's modules, or of Linen modules (None), are given their inputs
        so. ``model`` must be a private copy: it is written to."""
        if model is None:
            with linen.intercept_methods(self._intercept):
                yield
            return
        classes = set()
        for _, module in nnx.iter_modules(model):
            classes.add(type(module))
            if isinstance(module, nnx.Embed):  # which takes the dtype that its table has between steps for its results'
                module.dtype = self.compute
        with ExitStack() as undo:
            for cls in classes:
                if any("__call__" in base.__dict__ for base in cls.__mro__):
                    undo.enter_context(patched(cls, "__call__", self._calling(cls.__call__)))
            yield

    def _intercept(self, next_call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        args, kwargs = self._given(args, kwargs)
        return next_call(*args, **kwargs)

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._given(args, kwargs)
            return original(module, *args, **kwargs)

        return call

    def _given(self, args: Any, kwargs: Any) -> Any:
        self.count += 1
        return jax.tree.map(partial(computed_in, self.compute), (args, kwargs), is_leaf=has_state)


def wide_products(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The products of a program, those of its inner programs too, one of whose operands is float32."""
    wide = jnp.dtype(jnp.float32)
    found = []
    for equation in jaxpr.eqns:
        operands = [getattr(operand.aval, "dtype", None) for operand in equation.invars[:2]]
        if equation.primitive.name in PRODUCTS and wide in operands:
            found.append(equation)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                body: Any = getattr(inner, "jaxpr", inner)
                if hasattr(body, "eqns"):
                    found += wide_products(body)
    return found


def user_line(equation: JaxprEqn) -> str:
    """The line of the user's code that an equation comes from: ``model.py:12 (Block.__call__)``."""
    file, _, rest = str(summarize(equation.source_info)).rpartition("/")
    return rest if file else str(summarize(equation.source_info))
