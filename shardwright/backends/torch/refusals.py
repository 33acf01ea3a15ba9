"""What the recording of a step refuses, and in which words."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import CaptureError, UnrecordableError

_FUNCTIONS = {
    "backward": "call model.backward(loss) on the model that sw.DistributedModel returned",
    "register_hook": "hooks on tensors inside a step cannot fire on replay; put them inside a module",
    "retain_grad": "gradients of tensors inside a step are not kept; read them inside a module",
}
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parents[2])


def refuse_function(function: Callable[..., Any], args: Any) -> None:
    """Raise CaptureError for a method of tensors that means nothing in a step that is replayed."""
    name = getattr(function, "__name__", "")
    if name in _FUNCTIONS and args and isinstance(args[0], torch.Tensor):
        raise CaptureError(f"Tensor.{name} inside a step ({where()}): {_FUNCTIONS[name]}")


def reads_a_value(model: nn.Module, path: str | None, error: Exception) -> CaptureError:
    """The error for a value that was asked of a stand-in: by the module at ``path``, or by the step body when None."""
    asked = f"by .item(), bool(), .tolist() or a result whose shape depends on values: {getattr(error, 'func', None)}"
    if path is not None:
        return UnrecordableError(
            f"{type(model).__name__} cannot be recorded, because {path or 'its forward'!r} reads the value of a tensor "
            f"at {where(error)} ({asked}), and what it does next may depend on it: keep the code inside a module that "
            f"one stage holds whole, or let the model run by message passing"
        )
    return CaptureError(
        f"the step reads the value of a tensor at {where(error)} ({asked}); its body runs once on stand-ins without "
        f"values. Return the tensor from the step and read it there, or move the code inside a module that one stage "
        f"holds whole"
    )


def said(item: Any) -> str:
    """An argument in a few words."""
    return f"a tensor of shape {tuple(item.shape)}" if isinstance(item, torch.Tensor) else f"a {type(item).__name__}"


def where(error: BaseException | None = None) -> str:
    """The innermost line of code that is neither torch's nor this package's."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else traceback.extract_stack()
    for frame in reversed(frames):
        if not frame.filename.startswith((_TORCH, _HERE, "<")):
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown line"
