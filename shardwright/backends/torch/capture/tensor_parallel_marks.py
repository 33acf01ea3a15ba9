"""SageMaker's marks on modules: modules to be split on the tensor axis, and modules to stay whole.

Marks belong to module objects; capture turns them into pins by the modules' paths.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from shardwright.backends.torch.capture.replaced import replaced
from shardwright.core.errors import ShardwrightError
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.model.graph import Parameter
from shardwright.core.rules.pins import TensorParallelism

_marks: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def set_tensor_parallelism(module: nn.Module, enabled: bool = True) -> None:
    """Mark a module, with all below it, to be split on the tensor axis or (False) to stay whole.

    The innermost mark wins. True leaves the manner to the planner; the plan gives the reason for every matrix that
    stays whole. Call it before the model is captured or planned. Raises ShardwrightError for an argument that is no
    module.
    """
    if not isinstance(module, nn.Module):
        raise ShardwrightError(f"set_tensor_parallelism marks a torch.nn.Module, not a {type(module).__name__}")
    _marks[module] = bool(enabled)


@contextmanager
def tensor_parallelism(enabled: bool = True) -> Iterator[None]:
    """A context in which new modules are marked as by `set_tensor_parallelism`; the innermost context wins."""
    original = nn.Module.__init__

    @wraps(original)
    def marking(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _marks.setdefault(self, bool(enabled))

    with replaced(nn.Module, "__init__", marking):
        yield


def pins(model: nn.Module, parameters: tuple[Parameter, ...]) -> tuple[Pin, ...]:
    """The pins of a model's marks."""
    marks = {path: _marks[module] for path, module in model.named_modules() if module in _marks}
    names = [p.name for p in parameters]
    held = {
        path: on
        for path, on in marks.items()
        if not path or any(name == path or name.startswith(f"{path}.") for name in names)
    }
    return TensorParallelism(held).pins(names)
