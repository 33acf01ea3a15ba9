"""A model on stand-ins for its parameters and buffers, which have shapes and no memory, or values that mean nothing."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.capture.loss_scaler import real_scales
from shardwright.backends.torch.capture.replaced import replaced
from shardwright.backends.torch.capture.stand_in import swapped_in
from shardwright.backends.torch.compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    current_fake_mode,
    in_kernel_invocation_manager,
    pytree,
)
from shardwright.core.errors import CaptureError

VALUE_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""The errors that torch raises when the value of a fake tensor is asked for."""


State = AbstractContextManager[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]


def fake_state(model: nn.Module, device: torch.device) -> State:
    """A context in which the model has fake parameters and buffers, under a fake tensor mode; see `_swapped`."""

    def fake_of(tensor: torch.Tensor) -> torch.Tensor:
        mode = current_fake_mode()
        form = tensor.shape, tensor.stride()
        if not isinstance(mode, FakeTensorMode):
            return torch.empty_strided(*form, dtype=tensor.dtype, device=device)
        with in_kernel_invocation_manager(mode):  # what the mode does in the end, and what takes it longest to come to
            made = torch.empty_strided(*form, dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, made, device)

    return _swapped(model, lambda name, tensor: fake_of(tensor))


def real_state(model: nn.Module, device: torch.device) -> State:
    """The model with small random parameters and with buffers of zeros: the same values on every rank."""

    def real_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter) and made.is_floating_point():
            made.normal_(0.0, 0.02, generator=torch.Generator(device).manual_seed(zlib.crc32(name.encode())))
        return made

    return _swapped(model, real_of)


@contextmanager
def _swapped(
    model: nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor]
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """The model with other parameters and buffers; afterwards it is as it was before."""
    made: dict[int, torch.Tensor] = {}

    def stand_in(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            new = make(name, tensor)
            if isinstance(tensor, nn.Parameter):
                new = _parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    parameters = {name: stand_in(name, p) for name, p in model.named_parameters()}
    buffers = {name: stand_in(name, b) for name, b in model.named_buffers()}
    with swapped_in(model, made):
        yield parameters, buffers


def _parameter(tensor: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """A tensor that nothing else refers to, made a parameter."""
    if not isinstance(tensor, FakeTensor):
        return nn.Parameter(tensor, requires_grad=requires_grad)
    fake: Any = tensor.requires_grad_(requires_grad)
    fake._is_param = True  # as `nn.Parameter` marks tensors of other types
    return tensor


class _Found(BaseException):
    """An exception that ends a run of the body once the model is called. It is no Exception, so that user code does not
    catch it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = (args, kwargs)


def find_model_call(
    model: nn.Module, body: Callable[[list[torch.Tensor]], Any], inputs: list[torch.Tensor], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which the body first calls the model: inputs as they are, other tensors as zeros.

    Raises CaptureError when the body does not call the model.
    """
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is model:
            raise _Found(args, kwargs)
        return original(module, *args, **kwargs)

    real: dict[int, torch.Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), fake_state(model, device), real_scales():
        fakes = []
        for tensor in inputs:
            fakes.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
            real[id(fakes[-1])] = tensor
        try:
            with replaced(nn.Module, "__call__", call):
                body(fakes)
        except _Found as found:
            args, kwargs = found.call
        except VALUE_DEPENDENT as error:
            raise CaptureError(f"the step reads the value of a tensor before it calls the model: {error}") from error
        else:
            raise CaptureError("the step does not call the model, so there is nothing to plan by")

    def solid(item: Any) -> Any:
        if not isinstance(item, FakeTensor):
            return item
        return real.get(id(item), torch.zeros(item.shape, dtype=item.dtype))

    found_args, found_kwargs = pytree.tree_map(solid, (args, kwargs))
    return tuple(found_args), dict(found_kwargs)
