"""The hooks by which a recorder sees a step: module calls and attributes, functions above autograd, ops below it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwright.backends.torch.capture.product_flops import ProductFlops
from shardwright.backends.torch.capture.remembered_results import ASKS_DEVICE, Inferred, memory_of, unwatched
from shardwright.backends.torch.capture.replaced import replaced
from shardwright.backends.torch.compat import FakeTensor, TorchDispatchMode, pytree
from shardwright.backends.torch.program.value_ledger import Ledger


class ModuleHooks(Protocol):
    """The part of a recorder that handles modules."""

    def module_call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any: ...

    def assignment(self, module: nn.Module, name: str, value: Any) -> None: ...

    def autograd_function(self, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


class OpHooks(Protocol):
    """The part of a recorder that handles functions and ops."""

    real: bool
    ledger: Ledger
    flops: ProductFlops

    def function_call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    def observe(self, function: Any, args: Any, kwargs: Any) -> None: ...


class Functions(TorchFunctionMode):
    """A mode that gives the recorder every function of torch that is called, above autograd."""

    def __init__(self, recorder: OpHooks) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.function_call(func, args, kwargs or {})


class Ops(TorchDispatchMode):
    """A mode that gives the recorder every op that runs, below autograd."""

    def __init__(self, recorder: OpHooks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self._inferred = Inferred()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE and type(args[0]) is FakeTensor:  # of which there are more than of all others
            return args[0].fake_device
        return unwatched(self._run, func, args, kwargs or {}, modes=0 if self.recorder.real else 1)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.recorder.observe(func, args, kwargs)
        result = self._result(func, args, kwargs)
        self.recorder.flops.note(func, args, kwargs, result)
        return result

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.recorder.real:
            result = func(*args, **kwargs)
            given = {memory_of(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and memory_of(tensor) not in given:
                    self.recorder.ledger.note_made(tensor)
            return result
        return self._inferred.run(func, args, kwargs)


@contextmanager
def patched_modules(hooks: ModuleHooks) -> Iterator[None]:
    """A context in which calls of modules and of autograd functions, and assignments to attributes, go through these
    hooks."""
    original, assign = nn.Module.__call__, nn.Module.__setattr__
    inherited = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def apply_recorded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return hooks.autograd_function(functools.partial(inherited, cls), args, kwargs)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return hooks.module_call(original, module, args, kwargs)

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        hooks.assignment(module, name, value)
        assign(module, name, value)

    with (
        replaced(nn.Module, "__call__", call),
        replaced(nn.Module, "__setattr__", set_attribute),
        replaced(torch.autograd.Function, "apply", classmethod(apply_recorded)),
    ):
        yield
