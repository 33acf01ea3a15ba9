"""Parameters and buffers that another rank holds, used outside the modules that have them.

A tensor that this rank does not hold is on the meta device. Inside a step an operation on it gets the values from their
home, as the result of a call: their gradient goes there as that of any other crossing does.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.compat import DisableTorchFunctionSubclass, pytree
from shardwright.backends.torch.training.messages.microbatch_threads import current_fiber

_ABOUT = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "layout", "ndim", "requires_grad", "is_meta", "is_leaf", "grad", "grad_fn",
                 "is_sparse", "is_quantized", "is_cuda", "is_nested", "_version", "itemsize")
} | {
    getattr(torch.Tensor, name)
    for name in ("size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "is_contiguous",
                 "element_size", "storage_offset", "__len__", "__hash__", "__repr__", "requires_grad_", "ndimension")
}  # fmt: skip
"""Properties and methods of a tensor that need no values."""

_DEVICE = torch.Tensor.device.__get__


def _use(function: Any, args: Any, kwargs: Any) -> Any:
    fiber = current_fiber()
    with DisableTorchFunctionSubclass():
        if fiber is None or function in _ABOUT:
            return function(*args, **kwargs)
        if function is _DEVICE:
            return args[0]._shardwright_device
    given, kwgiven = pytree.tree_map(
        lambda item: item._shardwright_fetch(fiber) if isinstance(item, (ProxyParameter, ProxyBuffer)) else item,
        (args, kwargs),
    )
    return function(*given, **kwgiven)


class ProxyParameter(nn.Parameter):
    """A parameter that another rank holds."""

    _shardwright_fetch: Callable[[Any], torch.Tensor]
    _shardwright_device: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _use(func, args, kwargs or {})


class ProxyBuffer(torch.Tensor):
    """A buffer that another rank holds."""

    _shardwright_fetch: Callable[[Any], torch.Tensor]
    _shardwright_device: torch.device
    _shardwright_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _use(func, args, kwargs or {})


def make_proxies(tensors: Iterable[tuple[str, torch.Tensor]], fetch: Any, device: torch.device) -> None:
    """Let tensors on the meta device be fetched when they are used; they keep their identity.

    Args:
        fetch: called with the fiber and the name.
        device: the device that they report inside a step.
    """
    for name, tensor in tensors:
        tensor.__class__ = ProxyParameter if isinstance(tensor, nn.Parameter) else ProxyBuffer
        tensor._shardwright_fetch = lambda fiber, name=name: fetch(fiber, name)  # type: ignore[attr-defined]
        tensor._shardwright_device = device  # type: ignore[attr-defined]
        tensor._shardwright_name = name  # type: ignore[attr-defined]
