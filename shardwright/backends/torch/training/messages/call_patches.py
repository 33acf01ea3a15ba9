"""The patches by which the calls of a fiber come to `Calls`: calls of modules, and of autograd functions that are given
modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.training.messages.calls import Calls
from shardwright.backends.torch.training.messages.microbatch_threads import current_fiber


@contextmanager
def patched_calls(calls: Calls) -> Iterator[None]:
    """A context in which module calls of fibers go through ``calls``; those of other threads are unchanged."""
    original = nn.Module.__call__
    apply: Any = torch.autograd.Function.__dict__.get("apply")
    inherited = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        fiber = current_fiber()
        if fiber is None:
            return original(module, *args, **kwargs)
        return calls.module(original, fiber, module, args, kwargs)

    def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if current_fiber() is not None:
            calls.require_here(cls.__name__, args)
        return inherited(cls, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(apply_function)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
        if apply is None:
            del torch.autograd.Function.apply
        else:
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]
