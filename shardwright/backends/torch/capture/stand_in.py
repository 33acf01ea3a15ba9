"""Stand-ins for a model's tensors: swapped in while a forward pass is recorded, and out again whatever happens."""

import functools
import random
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.backends.torch.capture.precision import step_dtype

Tensors = Mapping[int, torch.Tensor]
"""The stand-in of each of the model's tensors, by the tensor's id."""


def tensors_of(model: nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Every tensor that the model holds, once, under its first name: parameters, buffers, then plain attributes."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(id(parameter), (name, parameter))
    for name, buffer in model.named_buffers():
        found.setdefault(id(buffer), (name, buffer))
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found.setdefault(id(value), (f"{path}.{attribute}" if path else attribute, value))
    return found


def fake_like(tensor: torch.Tensor, compute: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the same geometry on the CPU, to be made under a fake tensor mode; a parameter as a step that
    computes in ``compute`` takes it. The device of the model does not matter to its graph, and a model on the meta
    device meets inputs that are not."""
    dtype = step_dtype(tensor.dtype, compute) if isinstance(tensor, nn.Parameter) else tensor.dtype
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    return _dressed(made, tensor)


def real_like(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same values, on the CPU."""
    return _dressed(tensor.detach().to("cpu", copy=True), tensor)


def _dressed(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        made.requires_grad_()
    for name, value in vars(tensor).items():  # what frameworks hang on parameters (but not a fake tensor's own state)
        if name not in ("fake_device", "fake_mode", "constant", "real_tensor") and not hasattr(made, name):
            setattr(made, name, value)
    return made


@contextmanager
def no_remembered_results(model: nn.Module) -> Iterator[None]:
    """A context in which functions that remember their results (``functools.lru_cache``) begin and end with none, in
    the modules that define the model's classes: a stand-in that one of them kept would turn up in a later run."""
    caches = [cache for home in homes_of(model) for cache in _remembering(home)]
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


def homes_of(model: nn.Module) -> list[types.ModuleType]:
    """The Python modules that define the classes of a model's modules."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__ if cls is not nn.Module}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _remembering(home: types.ModuleType) -> list[Any]:
    """The functions and methods of a module that remember their results, behind decorators too."""
    found = []
    pending = list(vars(home).values())
    for item in vars(home).values():
        if isinstance(item, type) and item.__module__ == home.__name__:
            pending += vars(item).values()
    for member in pending:
        is_wrapped = isinstance(member, staticmethod | classmethod | types.MethodType)
        item = member.__func__ if is_wrapped else member
        cells = (item.__closure__ or ()) if isinstance(item, types.FunctionType) else ()
        for one in (item, *(cell.cell_contents for cell in cells if _is_filled(cell))):
            if isinstance(one, functools._lru_cache_wrapper) and one.__module__ == home.__name__:
                found.append(one)
    return found


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@contextmanager
def swapped_in(model: nn.Module, stand_ins: Tensors) -> Iterator[None]:
    """A context in which the model has stand-ins for its tensors. On leaving, every module's attributes, parameters,
    buffers and hooks are as they were, and so are the random number generators."""
    states = [(module, dict(vars(module))) for module in model.modules()]
    tables = [(v, dict(v)) for _, state in states for v in state.values() if isinstance(v, dict)]
    lists = [(v, list(v)) for _, state in states for v in state.values() if isinstance(v, list)]
    generators = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    try:
        for module, state in states:
            held_tensors: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in held_tensors:
                for name, value in table.items():
                    if value is not None:
                        table[name] = stand_ins.get(id(value), value)
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and id(value) in stand_ins:
                    vars(module)[name] = stand_ins[id(value)]
        yield
    finally:
        for module, state in states:
            vars(module).clear()
            vars(module).update(state)
        for table, held in tables:
            if list(map(id, table.values())) != list(map(id, held.values())) or list(table) != list(held):
                base: Any = OrderedDict if isinstance(table, OrderedDict) else dict
                base.clear(table)  # not its own methods, which those of a frozen subclass refuse to be
                base.update(table, held)
        for items, kept in lists:
            if list(map(id, items)) != list(map(id, kept)):
                list.__setitem__(items, slice(None), kept)
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])
