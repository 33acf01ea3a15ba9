"""The inputs of a model in 16 bits: floating arguments of the calls of modules that no other module makes."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
from flax import linen, nnx

from shardwright.backends.jax.capture.trace import has_state, patched

Cast = Callable[[Any], Any]


class OuterCalls:
    """The calls of modules that a function makes itself.

    Args:
        cast: makes of every argument what the module is given.

    Attributes:
        count: the number of these calls so far.
    """

    def __init__(self, cast: Cast) -> None:
        self.cast, self.count, self._depth = cast, 0, 0

    @contextmanager
    def around(self, model: nnx.Module | None) -> Iterator[None]:
        """A context in which the calls of an NNX model's modules, or of Linen modules, are given their inputs so."""
        if model is None:
            with linen.intercept_methods(self._intercept):
                yield
            return
        with ExitStack() as undo:
            for cls in {type(module) for _, module in nnx.iter_modules(model)}:
                if any("__call__" in base.__dict__ for base in cls.__mro__):
                    undo.enter_context(patched(cls, "__call__", self._calling(cls.__call__)))
            yield

    def _intercept(self, next_call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        return self._call(next_call, (), args, kwargs)

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(original, (module,), args, kwargs)

        return call

    def _call(self, original: Callable[..., Any], before: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        if self._depth == 0:
            self.count += 1
            args, kwargs = jax.tree.map(self.cast, (args, kwargs), is_leaf=has_state)
        self._depth += 1
        try:
            return original(*before, *args, **kwargs)
        finally:
            self._depth -= 1
