"""SageMaker's marks on modules that say on which rank of the pipeline they are."""

from contextlib import AbstractContextManager

from torch import nn

from shardwright.backends.torch.capture.module_marks import ModuleMarks

_marks: ModuleMarks[int] = ModuleMarks("set_partition")


def place(module: nn.Module, index: int) -> None:
    """Mark a module, with all below it that has no mark of its own. Raises ShardwrightError for no module."""
    _marks.set(module, index)


def placing(index: int) -> AbstractContextManager[None]:
    """A context in which new modules are marked; the innermost one wins."""
    return _marks.of_new_modules(index)


def placed(model: nn.Module) -> dict[str, int]:
    """The marks of a model's modules, by path."""
    return _marks.by_path(model)
