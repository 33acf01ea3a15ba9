"""What the function of a step does with the models that it is given: seen by a run in which these return no values."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.program.output_shapes import output_shapes, without_memory
from shardwright.torch.model import DistributedModel


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that the function of a step does with a model.

    Attributes:
        is_call: whether the model is called; else it is given a loss, by ``backward``.
        is_fed: whether it is called with something that another model has returned.
        with_gradients: whether gradients are enabled then.
    """

    model: DistributedModel
    is_call: bool
    is_fed: bool
    with_gradients: bool


class Probe:
    """In the place of a model: notes what is done with it, and returns the shapes of its outputs where they can be
    had."""

    def __init__(self, model: DistributedModel, seen: list[Event]) -> None:
        self._model, self._seen = model, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        is_fed = any(isinstance(leaf, Nothing) for leaf in given)
        self._seen.append(Event(self._model, True, is_fed, torch.is_grad_enabled()))
        if any(isinstance(leaf, Nothing) and leaf.shapes is None for leaf in given):
            return Nothing(None, self._device)
        args, kwargs = pytree.tree_map(_shapes_of, (args, kwargs))
        parts = self._model.runtime.split_model.parts
        try:
            with parts.as_whole():
                found = output_shapes(self._model.module, args, kwargs, self._device)
        except Exception:  # what fails here fails in the step, or depends on values
            found = None
        return Nothing(found, self._device)

    @property
    def _device(self) -> torch.device:
        return self._model.session.bound.device

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self._seen.append(Event(self._model, False, False, True))


class Silent:
    """In the place of a model: nothing is known of what it returns."""

    def __init__(self, model: DistributedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Nothing(None, self._model.session.bound.device)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: another step is given the loss."""


class Nothing:
    """What a model returns, and whatever is made of it, without values.

    Args:
        shapes: it, with tensors on the meta device; None: that is not known, and whatever is made of it is not either.
        device: where its tensors would be.
    """

    def __init__(self, shapes: Any, device: torch.device) -> None:
        self.shapes, self._device = shapes, device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.shapes is None:
            return self
        if name == "device":
            return self._device
        found = getattr(self.shapes, name)
        if isinstance(found, MethodType) or (callable(found) and isinstance(self.shapes, torch.Tensor)):
            return lambda *args, **kwargs: self._made(found, args, kwargs)
        return self._of(found)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self._made(operator.getitem, (self, key), {})

    def __iter__(self) -> Iterator[Any]:
        if self.shapes is None:
            raise TypeError("what it returns is not known, so that it cannot be taken apart")
        return map(self._of, iter(self.shapes))

    def __len__(self) -> int:
        if self.shapes is None:
            raise TypeError("what it returns is not known, so that it has no length")
        return len(self.shapes)

    def __bool__(self) -> bool:
        if self.shapes is None or isinstance(self.shapes, torch.Tensor):
            raise TypeError("a value that a model computes is not known before the step")
        return bool(self.shapes)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        first = next(leaf for leaf in leaves if isinstance(leaf, Nothing))
        return first._made(function, args, kwargs or {})

    def _made(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a function makes of this, by its shapes."""
        leaves = pytree.tree_leaves((args, kwargs))
        if self.shapes is None or any(isinstance(leaf, Nothing) and leaf.shapes is None for leaf in leaves):
            return Nothing(None, self._device)
        args, kwargs = pytree.tree_map(lambda leaf: without_memory(_shapes_of(leaf)), (args, kwargs))
        try:
            found = function(*args, **kwargs)
        except Exception:  # what needs values, or other than meta tensors
            return Nothing(None, self._device)
        return self._of(found)

    def _of(self, found: Any) -> Any:
        """A result: plain values as they are, all else without values."""
        leaves = pytree.tree_leaves(found)
        if all(leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype) for leaf in leaves):
            return found
        return Nothing(pytree.tree_map(without_memory, found), self._device)


def _shapes_of(leaf: Any) -> Any:
    return leaf.shapes if isinstance(leaf, Nothing) else leaf


def _operated(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def operate(self: Nothing, *others: Any) -> Any:
        return self._made(function, (*others, self) if swapped else (self, *others), {})

    return operate


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    setattr(Nothing, f"__{_name}__", _operated(getattr(operator, _name)))
    setattr(Nothing, f"__r{_name}__", _operated(getattr(operator, _name), swapped=True))
for _name in ("neg", "abs", "pos", "lt", "le", "gt", "ge"):
    setattr(Nothing, f"__{_name}__", _operated(getattr(operator, _name)))
