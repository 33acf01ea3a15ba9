"""Arguments and results of any structure as bytes, with their tensors apart.

Modules and parameters of the model travel by name, tensors of the batch by their position, since every rank has them.
Objects that the called module may write to (lists, dicts, caches) are numbered in the order in which a walk over the
arguments meets them. Both sides walk in the same order, and changes come back by those numbers.
"""

import enum
import io
import pickle
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import ShardwrightError

Reference = tuple[str, Any]
"""The reference that stands for an object: a kind, and a number or a name."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A structure as bytes, and the tensors that it holds in order."""

    data: bytes
    tensors: list[torch.Tensor]


def pack(item: Any, refer: Callable[[Any], Reference | None], what: str) -> Packed:
    """Pack a structure.

    Args:
        refer: a reference for an object that both sides have, or None.
        what: for errors: ``the arguments of 'layers.3'``.

    Raises:
        ShardwrightError: something in it cannot be pickled, or is a tensor that is not strided.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, refer, what)
    try:
        pickler.dump(item)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError) as error:
        raise ShardwrightError(
            f"{what} cannot travel to another rank: {error}. Pass tensors, containers of them, and objects whose "
            f"classes are defined at the top of a module"
        ) from error
    return Packed(file.getvalue(), pickler.tensors)


def unpack(data: bytes, tensors: Sequence[torch.Tensor], resolve: Callable[[Reference], Any]) -> Any:
    """The structure that was packed; ``resolve`` gives the objects that `pack` referred to."""

    def load(reference: Reference) -> Any:
        return tensors[reference[1]] if reference[0] == "tensor" else resolve(reference)

    return _Unpickler(io.BytesIO(data), load).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, refer: Callable[[Any], Reference | None], what: str) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._refer, self._what = refer, what
        self._positions: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Reference | None:
        if isinstance(obj, _ATOMS):
            return None
        found = self._refer(obj)
        if found is not None:
            return found
        if not isinstance(obj, torch.Tensor):
            return None
        if obj.layout is not torch.strided or obj.is_meta:
            raise ShardwrightError(
                f"{self._what} hold a tensor of layout {obj.layout} on device {obj.device}: expected a strided one "
                f"with data"
            )
        if id(obj) not in self._positions:
            self._positions[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return ("tensor", self._positions[id(obj)])


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, load: Callable[[Reference], Any]) -> None:
        super().__init__(file)
        self._load = load

    def persistent_load(self, pid: Any) -> Any:
        return self._load(pid)


_ATOMS = (int, float, complex, str, bytes, bool, type(None), tuple)
_PLAIN = (
    *_ATOMS[:-1], type(Ellipsis), type, range, slice, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Generator, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, enum.Enum,
    torch.Tensor, nn.Module,
)  # fmt: skip

State = tuple[Any, ...]


def mutable_objects(roots: Iterable[Any]) -> list[Any]:
    """The lists, dicts, sets and other objects with attributes in a structure, each once, in the order of a walk."""
    found: list[Any] = []
    seen: set[int] = set()
    stack = list(reversed(list(roots)))
    while stack:
        item = stack.pop()
        if isinstance(item, _PLAIN):
            continue
        if isinstance(item, (tuple, frozenset)):
            stack.extend(reversed(list(item)))
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        found.append(item)
        if isinstance(item, list):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            stack.extend(reversed(list(item.values())))
        stack.extend(reversed(list(_attributes(item).values())))
    return found


def state_of(item: Any) -> State:
    """The contents of an object, one level deep."""
    own: Any = None
    if isinstance(item, list):
        own = list(item)
    elif isinstance(item, dict):
        own = list(item.items())
    elif isinstance(item, set):
        own = sorted(item, key=id)
    return own, _attributes(item)


def same_state(before: State, after: State) -> bool:
    """Whether the contents of an object are the same."""
    return _same(before[0], after[0]) and _same(before[1], after[1])


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return isinstance(a, (int, float, complex, str, bytes, bool)) and bool(a == b)


def put_state(item: Any, state: State) -> None:
    """Give an object the contents of another one."""
    own, attributes = state
    if isinstance(item, list):
        item[:] = own
    elif isinstance(item, (dict, set)):
        item.clear()
        item.update(own)
    for name in _attributes(item).keys() - attributes.keys():
        object.__delattr__(item, name)
    for name, value in attributes.items():
        object.__setattr__(item, name, value)


def _attributes(item: Any) -> Mapping[str, Any]:
    found = dict(getattr(item, "__dict__", {}))
    for cls in type(item).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(item, name):
                found[name] = getattr(item, name)
    return found
