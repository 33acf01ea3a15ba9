"""Marks on modules, each with a value, that users set while they build a model or walk it afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from shardwright.backends.torch.capture.replaced import replaced
from shardwright.core.errors import ShardwrightError

T = TypeVar("T")


class ModuleMarks(Generic[T]):
    """The marks of one kind. They belong to module objects, not to names.

    Args:
        function: the name of the function that sets a mark, for errors.
    """

    def __init__(self, function: str) -> None:
        self._function = function
        self._marks: WeakKeyDictionary[nn.Module, T] = WeakKeyDictionary()

    def set(self, module: nn.Module, value: T) -> None:
        """Mark a module. Raises ShardwrightError for an argument that is no module."""
        if not isinstance(module, nn.Module):
            raise ShardwrightError(f"{self._function} marks a torch.nn.Module, not a {type(module).__name__}")
        self._marks[module] = value

    @contextmanager
    def of_new_modules(self, value: T) -> Iterator[None]:
        """A context in which new modules are marked; the innermost one wins."""
        original = nn.Module.__init__

        @wraps(original)
        def marking(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self._marks.setdefault(module, value)  # first, as `original` may mark for a context around this one
            original(module, *args, **kwargs)

        with replaced(nn.Module, "__init__", marking):
            yield

    def by_path(self, model: nn.Module) -> dict[str, T]:
        """The marks of a model's modules, by path."""
        return {path: self._marks[module] for path, module in model.named_modules() if module in self._marks}
