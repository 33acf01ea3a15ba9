"""Functions that draw arrays from Python's or NumPy's generator, such as the masks of SpecAugment (arXiv 1904.08779).

A recording sees the ops of torch, and to it the results of NumPy are constants. A whole function of the model's own
code that draws and gives arrays is therefore recorded as one step, which is run again with the same numbers wherever
its arrays are needed. What it gave may be handed to torch, and is nothing else to the model: a value that was computed
from it in NumPy would be the same in every step.
"""

import functools
import random
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from shardwright.backends.torch.capture.stand_in import homes_of
from shardwright.backends.torch.compat import DisableTorchFunction, pytree
from shardwright.core.errors import UnrecordableError

FROM_NUMPY = torch.from_numpy
CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray, FROM_NUMPY)
"""Functions that make tensors of arrays."""


@dataclass(frozen=True, slots=True)
class HostFunction:
    """A function whose arrays are returned as tensors."""

    function: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(np.ndarray, _as_tensor, self.function(*args, **kwargs))


class DrawnArray(np.ndarray[Any, Any]):
    """An array that a recorded function returned. It can only be handed to torch."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnrecordableError(
            "the model computes in NumPy with an array of random numbers, which to a recording is a constant: compute "
            "by torch, or inside the function that draws, or let the model run by message passing"
        )

    __array_ufunc__ = __array_function__ = __getitem__ = __iter__ = __bool__ = __int__ = __float__ = _refuse
    __index__ = __contains__ = item = tolist = astype = copy = _refuse


def host_state() -> tuple[Any, ...]:
    """A state that changes whenever Python's or NumPy's generator draws."""
    numpy = np.random.get_state(legacy=False)["state"]
    python = random.getstate()[1]
    return int(numpy["pos"]), int(numpy["key"][0]), python[-1], python[0]


GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
"""Generators that a user may make beside those of the modules ``random`` and ``numpy.random``."""


def generator_state(generator: Any) -> Any:
    """A state that changes whenever this generator draws."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return str(generator.get_state(legacy=False))
    return str(generator.bit_generator.state)


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return FROM_NUMPY(np.ascontiguousarray(array))


def of_array(
    data: torch.Tensor,
    dtype: torch.dtype | None = None,
    device: Any = None,
    *,
    requires_grad: bool = False,
    **others: Any,
) -> torch.Tensor:
    """The tensor that one of the constructors makes of an array, where the array is given as a tensor."""
    return data.clone().to(device=device or data.device, dtype=dtype or data.dtype).requires_grad_(requires_grad)


Call = Callable[[Callable[..., Any], Any, Any], Any]


@contextmanager
def patched_functions(model: nn.Module, call: Call, call_torch: Call) -> Iterator[None]:
    """A context in which two kinds of functions are replaced. The functions beside the model's classes whose code names
    a generator of Python's or NumPy's go through ``call(function, args, kwargs)``. `torch.from_numpy`, whose calls
    torch tells nobody of, goes through ``call_torch``."""
    replaced: list[tuple[types.ModuleType, str, Any]] = []
    for home in homes_of(model):
        for name, item in list(vars(home).items()):
            if isinstance(item, types.FunctionType) and item.__module__ == home.__name__ and _names_generator(item):
                replaced.append((home, name, item))
    for home, name, item in replaced:
        setattr(home, name, _through(call, item))
    replaced.append((torch, "from_numpy", FROM_NUMPY))
    torch.from_numpy = _through(_above_torch(call_torch), FROM_NUMPY)
    try:
        yield
    finally:
        for home, name, item in replaced:
            setattr(home, name, item)


def _through(call: Call, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return call(function, args, kwargs)

    return called


def _above_torch(call: Call) -> Call:
    def called(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with DisableTorchFunction():
            return call(function, args, kwargs)

    return called


def _names_generator(function: types.FunctionType) -> bool:
    names = set(_names_in(function.__code__))
    known: Mapping[str, Any] = function.__globals__
    modules = [known[name] for name in names if isinstance(known.get(name), types.ModuleType)]
    return any(m in (random, np.random) or (m is np and "random" in names) for m in modules)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)
