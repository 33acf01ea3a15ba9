"""The errors for the steps that recording refuses, and their words."""

import functools
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwright
from shardwright.backends.torch.program.python_clocks import CLOCKS
from shardwright.core.errors import CaptureError, UnrecordableError

_FUNCTIONS = {
    "backward": "call model.backward(loss) on the model that sw.DistributedModel returned",
    "register_hook": "hooks on tensors inside a step cannot fire on replay; put them inside a module",
    "retain_grad": "gradients of tensors inside a step are not kept; read them inside a module",
}
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(shardwright.__file__).parent)


def refuse_function(function: Callable[..., Any], args: Any) -> None:
    """Raise CaptureError for a method of tensors that means nothing in a step that is replayed."""
    name = getattr(function, "__name__", "")
    if name == "__set__" and getattr(function, "__self__", None) is torch.Tensor.data:
        raise CaptureError(
            f"data is assigned to a tensor of shape {tuple(args[0].shape)} inside the step ({where()}), which is not "
            f"replayed: do it between steps, or inside a module that one stage holds whole"
        )
    if name in _FUNCTIONS and args and isinstance(args[0], torch.Tensor):
        raise CaptureError(f"Tensor.{name} inside a step ({where()}): {_FUNCTIONS[name]}")


def require_one_element(loss: torch.Tensor) -> None:
    """Raise CaptureError for a loss that is not one number."""
    if loss.numel() != 1:
        raise CaptureError(
            f"model.backward takes a loss of one element: given shape {tuple(loss.shape)}; reduce it by mean or sum"
        )


def reads_a_value(model: nn.Module, path: str | None, error: BaseException) -> CaptureError:
    """The error for a value that was asked of a stand-in: by the module at ``path``, or by the step body when None."""
    asked = f"by .item(), bool(), .tolist() or a result whose shape depends on values: {getattr(error, 'func', None)}"
    return _reads(model, path, f"reads the value of a tensor at {where(error)} ({asked})")


def reads_what_it_computed(model: nn.Module, path: str | None, function: Any) -> CaptureError:
    """The error for a value that was read between units, and that follows from more than the batch."""
    asked = getattr(function, "__name__", str(function))
    return _reads(
        model, path, f"reads the value of a tensor that it computed with parameters or random numbers, at {where()} "
        f"(by {asked})",
    )  # fmt: skip


def _reads(model: nn.Module, path: str | None, what: str) -> CaptureError:
    return _refused(
        model, path, what,
        ", and what it does next may depend on it: keep the code inside a module that one stage holds whole",
        "; its body runs once on stand-ins. Return the tensor from the step and read it there, or move the code inside "
        "a module that one stage holds whole",
    )  # fmt: skip


def _refused(model: nn.Module, path: str | None, what: str, in_model: str, in_step: str) -> CaptureError:
    """The error for something that the module at ``path`` does, which may run by messages, or (None) the step's own
    body; ``in_model`` and ``in_step`` say for either why that cannot be, and what to do instead."""
    if path is not None:
        return _unrecordable(model, f"{path or 'its forward'!r} {what}{in_model}, or")
    return CaptureError(f"the step {what}{in_step}")


def _unrecordable(model: nn.Module, why: str) -> UnrecordableError:
    return UnrecordableError(
        f"{type(model).__name__} cannot be recorded, because {why} let the model run by message passing"
    )


def draws_on_the_host(model: nn.Module, path: str | None) -> CaptureError:
    """The error for numbers drawn by Python or NumPy between units, which to a recording are constants."""
    what = f"draws random numbers from Python's or NumPy's generator before {where()}"
    why = ", and they would be the same in every step"
    return _refused(
        model, path, what, f"{why}: draw them by torch",
        f"{why}: draw them before the step and pass them in the batch, or draw them by torch",
    )  # fmt: skip


def draws_by_itself(model: nn.Module, path: str | None) -> CaptureError:
    """The error for a draw between units from a generator that code of the user's holds or makes."""
    what = f"draws random numbers from a torch.Generator of its own at {where()}"
    why = ", which a recording cannot seed again"
    return _refused(
        model, path, what, f"{why}: draw from torch's own generator",
        f"{why}: draw before the step and pass the numbers in the batch, or draw from torch's own generator",
    )  # fmt: skip


def writes_a_buffer(model: nn.Module, path: str | None, name: str) -> CaptureError:
    """The error for a write to a buffer between units that no later step is computed from: replay leaves it out."""
    what = f"writes to buffer {name!r} at {where()}, which a recorded step would leave out"
    return _refused(
        model, path, what, ": write to it inside a module that one stage holds whole",
        ": write to it between steps, or inside a module that one stage holds whole",
    )  # fmt: skip


def computes_with_a_clock(model: nn.Module, clocks: Iterable[tuple[Any, Any]], *, ranks: int = 1) -> UnrecordableError:
    """The error for a step that computes with the reading of a clock, where a recording cannot follow that.

    Args:
        clocks: (id, call) of the clocks that it read.
        ranks: the number of ranks that would each have a time of their own.
    """
    names = ", ".join(dict.fromkeys(f"time.{CLOCKS[number].__name__}()" for number, _ in clocks))
    why = f"says another time on each of the {ranks} ranks" if ranks > 1 else "would say the same time in every step"
    return UnrecordableError(
        f"the step of {type(model).__name__} cannot be recorded, because it computes with {names}, which {why}: pass "
        f"the time as an argument of the step, read it outside, or let the model run by message passing"
    )


def sets_an_attribute(model: nn.Module, path: str | None, module: str, name: str) -> CaptureError:
    """The error for an attribute of a module inside a unit that is set from outside of it."""
    what = f"sets {module}.{name} at {where()}, which is replayed whole and would not be set again"
    as_argument = "pass the value as an argument"
    return _refused(model, path, what, f": {as_argument}", f": set it before the step, or {as_argument}")


def keeps_a_tensor(model: nn.Module, place: str, *, by_model: bool) -> CaptureError:
    """The error for a tensor that a step leaves in a Python object, for a later step or for the user."""
    what = (
        f"leaves a tensor that it computed in {place}, and reads what is there: a recorded step computes it on one "
        f"rank and leaves nothing there"
    )
    if by_model:
        return _unrecordable(
            model, f"it {what}. Write into a buffer in place (self.name.copy_(value)) inside a module that one stage "
            f"holds whole, or",
        )  # fmt: skip
    return CaptureError(f"the step {what}. Return the tensor from the step, and pass it to the next in the batch")


def shares_a_value(model: nn.Module, place: str) -> UnrecordableError:
    """The error for a Python value that a unit writes and code between units reads."""
    return _unrecordable(
        model, f"a module that one stage holds whole writes {place}, which is read between such modules: only the rank "
        f"of that stage would see the new value. Return it from the module, or",
    )  # fmt: skip


def takes_a_gradient(model: nn.Module, function: Callable[..., Any]) -> CaptureError:
    """The error for a gradient taken in the body of a step whose values are on several pipeline ranks."""
    name = f"torch.autograd.{getattr(function, '__name__', 'grad')}"
    return CaptureError(
        f"{name} is called in the step at {where()}, and {type(model).__name__} is split over pipeline stages, each of "
        f"which has its own part of the graph: compute that gradient inside a module that one stage holds whole, or "
        f"use a pipeline_parallel_degree of 1; replicas and the tensor axis can do it"
    )


def wraps_units(model: nn.Module, path: str | None, function: Callable[..., Any]) -> UnrecordableError:
    """The error for a custom autograd function that runs modules of several stages in its own way."""
    name = function.args[0].__name__ if isinstance(function, functools.partial) else str(function)
    return _unrecordable(
        model, f"{path or 'its forward'!r} calls modules that the plan gives to stages inside the autograd function "
        f"{name}, which defines their backward pass:",
    )  # fmt: skip


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
