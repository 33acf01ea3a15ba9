"""The calls of autograd that a model makes while it is captured below autograd, where no graph of gradients is kept.

A tensor says whether gradients flow through it as it would in a training step. A gradient that the model computes by
itself has the right shape and no values. A hook on a tensor is left out: it matters to a recording that is run again,
which refuses it (`Recorder.refuse`).
"""

from collections import OrderedDict
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from shardwright.backends.torch.capture.recorder import Recorder
from shardwright.backends.torch.capture.value_reads import READING

_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_HOOKS = frozenset({torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook})
_PASSING = frozenset({torch.Tensor.retain_grad, torch.Tensor.requires_grad_})


class AutogradQuestions(TorchFunctionMode):
    """A mode that answers these calls from a recorder's knowledge. On tensors ``with_values`` it tells the recorder of
    values that are read, by no op perhaps."""

    def __init__(self, recorder: Recorder, *, with_values: bool) -> None:
        super().__init__()
        self.recorder, self.with_values = recorder, with_values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.with_values and getattr(func, "__name__", "") in READING:
            self.recorder.note_reading()
        if func == _REQUIRES_GRAD:
            return self.recorder.flows(args[0])
        if func in _HOOKS:
            self.recorder.refuse("it puts a hook on a tensor, which would not fire")
            return RemovableHandle(OrderedDict())
        if func in _PASSING:
            return None if func is torch.Tensor.retain_grad else args[0]
        if func is torch.autograd.grad:
            self.recorder.refuse("it computes gradients by torch.autograd.grad")
            return _shapes_of_gradients(*args, **(kwargs or {}))
        if func is torch.Tensor.backward:
            self.recorder.refuse("it runs a backward pass of its own")
            return None
        return func(*args, **(kwargs or {}))


def _shapes_of_gradients(outputs: Any, inputs: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """Tensors like the gradients of the inputs."""
    given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    return tuple(torch.zeros_like(tensor) for tensor in given)
