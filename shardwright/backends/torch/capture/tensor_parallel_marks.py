"""SageMaker's marks on modules: modules to be split on the tensor axis, and modules to stay whole.

Capture turns them into pins by the modules' paths.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardwright.backends.torch.capture.module_marks import ModuleMarks
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.model.graph import Parameter
from shardwright.core.rules.pins import TensorParallelism

_marks: ModuleMarks[bool] = ModuleMarks("set_tensor_parallelism")


def set_tensor_parallelism(module: nn.Module, enabled: bool = True) -> None:
    """Mark a module, with all below it, to be split on the tensor axis or (False) to stay whole.

    The innermost mark wins. True leaves the manner to the planner; the plan gives the reason for every matrix that
    stays whole. Call it before the model is captured or planned. Raises ShardwrightError for an argument that is no
    module.
    """
    _marks.set(module, bool(enabled))


@contextmanager
def tensor_parallelism(enabled: bool = True) -> Iterator[None]:
    """A context in which new modules are marked as by `set_tensor_parallelism`; the innermost context wins."""
    with _marks.of_new_modules(bool(enabled)):
        yield


def is_marked(model: nn.Module) -> bool:
    """Whether any module of a model is marked to be split."""
    return any(_marks.by_path(model).values())


def pins(model: nn.Module, parameters: tuple[Parameter, ...]) -> tuple[Pin, ...]:
    """The pins of a model's marks."""
    names = [p.name for p in parameters]
    held = {
        path: on
        for path, on in _marks.by_path(model).items()
        if not path or any(name == path or name.startswith(f"{path}.") for name in names)
    }
    return TensorParallelism(held).pins(names)
