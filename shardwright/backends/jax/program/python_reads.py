"""The places where a function's code finds values of Python: globals, cells of closures, attributes, constant keys."""

import dis
import functools
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from flax import nnx

SIMPLE = (bool, int, float, complex, str, bytes, type(None), Enum)
LIBRARIES = tuple(
    path for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_paths().get(name))
)
OWN = "shardwright"
MOST_ENTRIES = 256
"""The most entries of a container, or attributes of an object, that are looked at."""
SMALL_BYTES = 4096
"""The size up to which arrays of numpy are compared entry by entry. Larger ones are compared by identity."""
MISSING = object()
SKIPPED = frozenset({"CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG", "RESUME", "COPY"})
Access = tuple[str, Any]
"""A step of access: ("attr", name) or ("item", key)."""


@dataclass(frozen=True, slots=True)
class _Same:
    """A value that is equal to itself alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _print(value: Any, left: list[int]) -> Any:
    """A key that is equal while a value is what it was, and that can be hashed."""
    left[0] -= 1
    if left[0] < 0:
        return "more"
    if isinstance(value, SIMPLE):
        return type(value), (value if value == value else "nan")
    if isinstance(value, np.ndarray | np.generic):
        if value.nbytes <= SMALL_BYTES and value.dtype != object:
            return value.shape, value.dtype.str, value.tobytes()
        return _Same(value)
    if isinstance(value, list | tuple):
        return type(value), tuple(_print(item, left) for item in value)
    if isinstance(value, dict):
        return dict, tuple(
            (key if isinstance(key, SIMPLE) else _Same(key), _print(v, left)) for key, v in value.items()
        )
    return _Same(value)


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One place where a function finds a value: a dictionary and a key, or a cell, and the way from there."""

    name: str
    base: Any
    key: Any
    way: tuple[Access, ...] = ()

    def _holder(self) -> tuple[Any, str, Any]:
        """The holder of the value, the way in which it holds it, and the key."""
        holder, how, key = self.base, "cell" if isinstance(self.base, types.CellType) else "item", self.key
        for step, name in self.way:
            holder, how, key = _get(holder, how, key), step, name
        return holder, how, key

    def read(self) -> Any:
        try:
            return _get(*self._holder())
        except Exception:  # a module whose names are imported when they are asked for may fail in any way
            return MISSING

    def write(self, value: Any) -> None:
        holder, how, key = self._holder()
        if how == "cell":
            holder.cell_contents = value
        elif how == "item":
            holder[key] = value
        elif isinstance(holder, types.ModuleType) or key in getattr(holder, "__dict__", {}):
            vars(holder)[key] = value
        else:
            object.__setattr__(holder, key, value)

    def print(self) -> Any:
        return _print(self.read(), [MOST_ENTRIES])


def _get(holder: Any, how: str, key: Any) -> Any:
    if how == "cell":
        return holder.cell_contents
    if how == "item":
        return holder[key]
    own = getattr(holder, "__dict__", None)
    if own is not None and key in own:
        return own[key]
    return getattr(holder, key)


def slots_of(function: Callable[..., Any]) -> list[Slot]:
    """Every place that a function's code names, and the code of what it calls, but for libraries' own."""
    found = Finder()
    found.function(function, None)
    return list(found.slots.values())


class Finder:
    def __init__(self) -> None:
        self.slots: dict[Any, Slot] = {}
        self.seen: set[Any] = set()

    def function(self, function: Any, owner: Any) -> None:
        """Add the places that a function names, or a method, a partial, or an object that is called."""
        if isinstance(function, functools.partial):
            for key in function.keywords:
                self._add(Slot(f"argument {key} of functools.partial", function.keywords, key))
            self.function(function.func, None)
            return
        if isinstance(function, types.MethodType):
            self.function(function.__func__, function.__self__)
            return
        wrapped = inspect.getattr_static(function, "__wrapped__", None)
        if wrapped is not None and wrapped is not function:
            self.function(wrapped, owner)
        if not isinstance(function, types.FunctionType):
            call = inspect.getattr_static(type(function), "__call__", None)
            if isinstance(call, types.FunctionType) and not _is_library(call):
                self.function(call, function)
            return
        once = (id(function.__code__), id(owner), tuple(map(id, function.__closure__ or ())))
        if once in self.seen or _is_library(function):
            return
        self.seen.add(once)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if callable(default):
                self.function(default, None)
        self._code(function.__code__, function.__globals__, cells, owner)

    def _code(self, code: types.CodeType, names: dict[str, Any], cells: dict[str, Any], owner: Any) -> None:
        instructions = [i for i in dis.get_instructions(code) if i.opname not in SKIPPED]
        first = code.co_varnames[0] if code.co_argcount else None
        for index, instruction in enumerate(instructions):
            kind, name = instruction.opname, instruction.argval
            if kind in ("LOAD_GLOBAL", "LOAD_NAME") and name in names:
                self._chain(Slot(f"global {name}", names, name), instructions, index + 1)
            elif kind in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in cells:
                self._chain(Slot(f"variable {name} around it", cells[name], None), instructions, index + 1)
            elif owner is not None and kind == "LOAD_FAST" and name == first:
                self._chain(Slot("self", {"self": owner}, "self"), instructions, index + 1)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, names, cells, None)

    def _chain(self, slot: Slot, instructions: Sequence[dis.Instruction], index: int) -> None:
        """Add the value that code reads from a place, by attributes and constant keys."""
        while True:
            value = slot.read()
            if value is MISSING:
                return
            if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
                self._add(slot)
                self.function(value, None)
                return
            step = _next(instructions, index)
            if isinstance(value, type):
                self.methods(value)
                if step is None or step[0][0] != "attr":
                    return
            if step is None:
                self._whole(slot, value)
                return
            (how, key), index = step
            name = f"{slot.name}.{key}" if how == "attr" else f"{slot.name}[{key!r}]"
            further = Slot(name.removeprefix("global "), slot.base, slot.key, (*slot.way, (how, key)))
            if how == "attr" and not isinstance(value, types.ModuleType) and key not in getattr(value, "__dict__", {}):
                made = inspect.getattr_static(value, key, MISSING)
                if isinstance(made, property):
                    self.function(made.fget, value)
                    return
                if isinstance(made, types.FunctionType):
                    self.function(made, value)
                    return
                if not isinstance(made, SIMPLE):
                    self._whole(slot, value)
                    return
            slot = further

    def _whole(self, slot: Slot, value: Any) -> None:
        """Add a value that is used as it is; for an object of the user's, its simple attributes."""
        if isinstance(value, types.ModuleType):
            return
        self._add(slot)
        if isinstance(value, nnx.Module):
            self._module(slot, value)
        if isinstance(value, SIMPLE) or (
            _is_library_class(type(value)) and not isinstance(value, types.SimpleNamespace)
        ):
            return
        if hasattr(value, "__dict__") and len(vars(value)) <= MOST_ENTRIES:
            for name, held in vars(value).items():
                if isinstance(held, SIMPLE):
                    self._add(Slot(f"{slot.name}.{name}", slot.base, slot.key, (*slot.way, ("attr", name))))
        self.methods(type(value), value)

    def _module(self, slot: Slot, module: nnx.Module) -> None:
        """Add the arrays of a module that the function closes over, which are constants of the step."""
        for path, node in nnx.iter_graph(module):
            if isinstance(node, nnx.Variable):
                name = ".".join(map(str, (slot.name, *path)))
                self._add(Slot(name, {"variable": node}, "variable", (("attr", "raw_value"),)))
            elif isinstance(node, nnx.Module):
                self.methods(type(node))

    def methods(self, cls: type, owner: Any = None) -> None:
        """Add the places that the methods of a class of the user's name."""
        for base in cls.__mro__:
            if _is_library_class(base):
                continue
            for method in vars(base).values():
                if isinstance(method, property):
                    method = method.fget
                if isinstance(method, staticmethod | classmethod):
                    method = method.__func__
                if isinstance(method, types.FunctionType):
                    self.function(method, owner)

    def _add(self, slot: Slot) -> None:
        self.slots.setdefault((id(slot.base), slot.key if isinstance(slot.key, str) else "", slot.way), slot)


def _next(instructions: Sequence[dis.Instruction], index: int) -> tuple[Access, int] | None:
    if index < len(instructions):
        instruction = instructions[index]
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            return ("attr", instruction.argval), index + 1
        if (
            instruction.opname == "LOAD_CONST"
            and index + 1 < len(instructions)
            and instructions[index + 1].opname == "BINARY_SUBSCR"
        ):
            return ("item", instruction.argval), index + 2
    return None


def _is_library(function: types.FunctionType) -> bool:
    name = function.__module__ or ""
    return name.split(".")[0] == OWN or function.__code__.co_filename.startswith(LIBRARIES)


def _is_library_class(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return cls.__module__ != "__main__"
    return cls.__module__.split(".")[0] == OWN or file.startswith(LIBRARIES)
