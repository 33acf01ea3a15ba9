"""The tensors and modules inside containers and objects."""

import enum
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.compat import OpOverload, pytree

_PLAIN = (
    int, float, complex, str, bytes, bool, type(None), type(Ellipsis), type, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    enum.Enum, nn.Module,
)  # fmt: skip


def is_plain(item: Any) -> bool:
    """Whether an argument can be kept by reference: it holds no tensor of the step and nobody writes to it."""
    if isinstance(item, slice):
        return not tensors_in(item)
    return isinstance(item, (*_PLAIN, OpOverload))


def tensors_in(root: Any) -> list[torch.Tensor]:
    """Every tensor inside containers and objects, each once, in an order that equal structures share."""
    if isinstance(root, torch.Tensor):
        return [root]
    return [item for item in _held_in(root) if isinstance(item, torch.Tensor)]


def apart_from_each_other(result: Any, given: Iterable[Any]) -> Any:
    """A result with a view of its own in place of each of the floating-point tensors ``given`` that it hands on."""
    passed = {id(item) for item in given if isinstance(item, torch.Tensor) and item.is_floating_point()}
    return pytree.tree_map_only(torch.Tensor, lambda one: one.view_as(one) if id(one) in passed else one, result)


def keep_modules(root: Any, memo: dict[int, Any]) -> None:
    """Put the modules inside an object into a deepcopy memo, so that copies refer to the same ones."""
    memo.update((id(item), item) for item in _held_in(root) if isinstance(item, nn.Module))


def _held_in(root: Any) -> list[torch.Tensor | nn.Module]:
    """Every tensor and module inside containers and objects, each once, in an order that equal structures share;
    modules are not looked into."""
    found: list[torch.Tensor | nn.Module] = []
    seen: set[int] = set()
    keep: list[Any] = []
    stack = [root]
    while stack:
        item = stack.pop()
        is_end = isinstance(item, (torch.Tensor, nn.Module))
        if id(item) in seen or (not is_end and isinstance(item, _PLAIN)):
            continue
        seen.add(id(item))
        if is_end:
            found.append(item)
            continue
        keep.append(item)  # a list made on the way must not be freed, or another would get its id
        stack.extend(reversed(list(_parts(item))))
    return found


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, slice):
        return (item.start, item.stop, item.step)
    parts: list[Any] = []
    if isinstance(item, dict):
        parts.extend(item.values())
        if type(item) is not dict:
            parts.extend(getattr(item, "__dict__", {}).values())
        return parts
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    parts.extend(getattr(item, "__dict__", {}).values())
    parts.extend(getattr(item, name) for name in slots_of(item) if hasattr(item, name))
    return parts


def slots_of(value: Any) -> list[str]:
    """The names of an object's attributes that are in no dict."""
    found: list[str] = []
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]
