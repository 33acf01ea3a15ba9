"""What a step read of Python while it was recorded: values outside of tensors that its program may rest on.

While the step's body runs, every function of the user's and of the model's libraries that is called is noted, with the
names in its code. From what these can reach (globals, variables of surrounding functions, defaults, modules of the
model) the values under those names are followed through objects, dicts and lists. Units that replay whole read their
values anew each time, and are left out.
"""

import contextvars
import dataclasses
import functools
import gc
import inspect
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.backends.torch.capture.host_draws import GENERATORS, generator_state
from shardwright.backends.torch.program.names_in_code import is_library, is_library_module, names_in
from shardwright.backends.torch.program.python_clocks import Clocks
from shardwright.backends.torch.program.python_numbers import Number
from shardwright.backends.torch.program.python_places import (
    MISSING,
    PLAIN,
    Asked,
    Attributes,
    Cell,
    Entries,
    Guarded,
    Holder,
    Items,
    Members,
    attributes_of,
    remembered,
    same,
)

LARGE = 2000
"""Containers of more items are compared as objects and by their size, not item by item."""
_OF_MODULES = frozenset(vars(nn.Module()))
_DATA_TYPES = ("types", "argparse", "collections", "optparse")
"""Where the standard library has types that do nothing but hold values."""
_CODE = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    type(getattr(dataclasses, "_HAS_DEFAULT_FACTORY", object)),
)  # fmt: skip
SETTINGS: Mapping[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": torch.get_default_device,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled,
}


@dataclass(frozen=True, slots=True)
class Write:
    """A value that was another one after the recording than before."""

    holder: Holder
    key: Any
    old: Any
    new: Any
    by_unit: bool
    """Whether a unit wrote it, which does so whenever it runs."""

    @property
    def place(self) -> str:
        return self.holder.place(self.key)


@contextmanager
def left_as_it_is(model: nn.Module, roots: Iterable[tuple[Any, str]] = ()) -> Iterator[None]:
    """What code that runs inside writes to Python values is undone on leaving: it runs on stand-ins."""
    reads = Reads(model, lambda: False)
    try:
        with reads.watching(roots):
            yield
    finally:
        undo(reads.writes())


def undo(writes: Iterable["Write"]) -> None:
    """Put back what a run of the body wrote, which was no training."""
    for write in writes:
        write.holder.put(write.key, write.old)


class Reads:
    """Notes what a run of a step's body may read.

    Args:
        is_left_out: whether what runs now will run again at every replay.
    """

    def __init__(self, model: nn.Module, is_left_out: Callable[[], bool]) -> None:
        self.model, self._is_left_out = model, is_left_out
        self.names: set[str] = set()
        self.loaded: set[str] = set()
        """Those of them that are not only set."""
        self.beginnings: tuple[str, ...] = ()
        self.holders: list[Holder] = []
        self._codes: dict[int, types.CodeType] = {}
        self._skipped: dict[int, types.CodeType] = {}
        self._functions: dict[int, list[types.FunctionType]] = {}
        self._orphans: list[types.CodeType] = []
        self._met: dict[int, Any] = {}
        self._pending: dict[str, list[tuple[Any, str]]] = {}
        self._globals: dict[int, tuple[Entries, set[str]]] = {}
        self._named_only: set[int] = set()
        """Ids of the holders of which only what is named counts."""
        self._types: dict[int, type] = {}
        """id of a holder of an object's attributes → the type of the object."""
        self._in_model: dict[int, str] = {}
        self._of_modules: set[int] = set()
        self._by_units: set[tuple[int, Any]] = set()
        self._on_replay: set[tuple[int, str]] = set()
        """(id of a module's attributes, name) of those that a step of the program sets."""
        self._environment = False
        self.is_collecting = False
        """Whether Python collects garbage: what runs then (callbacks, finalizers) is no part of the body, which it
        interrupts at any call."""
        self.clocks: Clocks | None = None
        """Those that are followed in the globals that code names."""
        self.generators: list[tuple[Any, Any]] = []
        """Generators of random numbers of the user's own, and their states when they were met."""

    # The run -----------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, roots: Iterable[tuple[Any, str]]) -> Iterator[None]:
        """Note what is called inside.

        Args:
            roots: where to begin beside the model, with labels: the step function, its arguments.
        """
        name = type(self.model).__name__
        for path, module in self.model.named_modules():
            self._of_modules.add(id(vars(module)))
            self._in_model[id(module)] = f"{name}.{path}" if path else name
        for module in self.model.modules():
            self._module(module, self._in_model[id(module)])
        self._holder(Asked(SETTINGS, "torch"))
        for root, label in roots:
            self.meet(root, label)
        outer = sys.gettrace()
        called, skipped, codes = self._called, self._skipped, self._codes

        def trace(frame: types.FrameType, event: Any, argument: Any) -> Any:
            number = id(frame.f_code)
            if number not in skipped and number not in codes:
                called(frame)
            return None if outer is None else outer(frame, event, argument)

        with self._collections_told():
            sys.settrace(trace)
            try:
                yield
            finally:
                sys.settrace(outer)

    @contextmanager
    def _collections_told(self) -> Iterator[None]:
        thread = threading.get_ident()

        def first(phase: str, _: object) -> None:
            if phase == "start" and threading.get_ident() == thread:
                self.is_collecting = True

        def last(phase: str, _: object) -> None:
            if phase == "stop" and threading.get_ident() == thread:
                self.is_collecting = False

        gc.callbacks.insert(0, first)
        gc.callbacks.append(last)
        try:
            yield
        finally:
            gc.callbacks.remove(first)
            gc.callbacks.remove(last)

    def _called(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if is_library(code.co_filename):
            self._skipped[id(code)] = code
            return
        if self.is_collecting or self._is_left_out():
            return
        self._codes[id(code)] = code
        names = names_in(code)
        self._read_globals(frame.f_globals, names.read)
        known = self._functions.get(id(code), [])
        for function in known:
            self._expand(function)
        if code.co_freevars and not known and not code.co_name.startswith("<") and _takes_values(frame):
            self._orphans.append(code)
        self.loaded |= names.loaded
        self._environment = self._environment or names.environment
        self._name(names.attributes, names.beginnings)

    def _name(self, names: Iterable[str], beginnings: tuple[str, ...]) -> None:
        new = set(names) - self.names
        self.names |= new
        if not set(beginnings) <= set(self.beginnings):
            self.beginnings = tuple({*self.beginnings, *beginnings})
            new |= {name for name in self._pending if name.startswith(self.beginnings)}
        for name in new:
            for value, label in self._pending.pop(name, ()):
                self.meet(value, label)

    def is_named(self, name: Any) -> bool:
        """Whether code that ran names this attribute."""
        return name in self.names or (
            bool(self.beginnings) and isinstance(name, str) and name.startswith(self.beginnings)
        )

    def set_on_replay(self, module: nn.Module, name: str) -> None:
        """A step of the program sets this attribute."""
        self._on_replay.add((id(vars(module)), name))

    @contextmanager
    def unit(self) -> Iterator[None]:
        """A unit runs: what it writes, it writes again whenever it is replayed."""
        before = [(holder, holder.read()) for holder in self.holders if not isinstance(holder, Asked)]
        try:
            yield
        finally:
            for holder, values in before:
                for key in _differing(values, holder.read()):
                    self._by_units.add((id(holder), key))

    # What can be reached -----------------------------------------------------------------------------------------

    def _holder(self, holder: Holder) -> None:
        self.holders.append(holder)

    def _read_globals(self, variables: dict[str, Any], names: Iterable[str]) -> None:
        if id(variables) not in self._globals:
            holder = Entries(variables, "", attributes=True)
            self._globals[id(variables)] = holder, set()
            self._named_only.add(id(holder))
            self._holder(holder)
        holder, read = self._globals[id(variables)]
        for name in names:
            if name in variables and name not in read:
                read.add(name)
                if self.clocks is not None:
                    self.clocks.meet(variables, name, variables[name])
                holder.before[name] = _unpatched(holder.before.get(name))
                self.meet(holder.before[name], name)

    def meet(self, value: Any, label: str) -> None:
        """A value that the step may use: from now on what it holds is compared."""
        if isinstance(value, (*PLAIN, torch.Tensor)) or id(value) in self._met or id(value) in self._in_model:
            return
        self._met[id(value)] = value
        if isinstance(value, dict):
            self._holder(Entries(value, label, attributes=False))
            if len(value) <= LARGE:
                for key, item in list(dict.items(value)):
                    self.meet(item, f"{label}[{key!r}]")
            if type(value) is not dict and attributes_of(value) is not None:
                self._object(value, label)
        elif isinstance(value, (list, tuple, deque)):
            if not isinstance(value, tuple):
                self._holder(Items(value, label))
            if len(value) <= LARGE:
                for position, item in enumerate(value):
                    self.meet(item, f"{label}[{position}]")
            if attributes_of(value) is not None:
                self._object(value, label)
        elif isinstance(value, (set, frozenset)):
            if isinstance(value, set):
                self._holder(Members(value, label))
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.meet(value.__func__, label)
            self.meet(value.__self__, label)
        elif isinstance(value, functools.partial):
            for item in (value.func, value.args, value.keywords):
                self.meet(item, label)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            if not is_library_module(value):
                self._attributes(vars(value), value.__name__, None)
        elif isinstance(value, contextvars.ContextVar):
            variable: contextvars.ContextVar[Any] = value
            self._holder(Asked({label: lambda: variable.get(None)}, label))
            self.meet(variable.get(None), label)
        elif isinstance(value, (staticmethod, classmethod)):
            self.meet(value.__func__, label)
        elif isinstance(value, property):
            for item in (value.fget, value.fset):
                self.meet(item, label)
        elif isinstance(value, GENERATORS):
            self.generators.append((value, generator_state(value)))
        elif isinstance(value, nn.Module):
            self._module(value, label)
            for name, child in value._modules.items():
                self.meet(child, f"{label}.{name}")
        elif not isinstance(value, np.ndarray):
            self._object(value, label)

    def _module(self, module: nn.Module, label: str) -> None:
        self._attributes(vars(module), label, type(module))
        self._class(type(module))

    def _object(self, value: Any, label: str) -> None:
        home = type(value).__module__
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            self.meet(wrapped, label)
        attributes = attributes_of(value)
        if home == "builtins" and attributes is None:
            return
        if home not in _DATA_TYPES and home != "_thread":
            module = sys.modules.get(home)
            if module is None or is_library_module(module):
                return
        if attributes is not None:
            self._attributes(attributes, label, type(value))
        slots = [name for cls in type(value).__mro__ for name in _slots_of(cls)]
        if slots:
            holder = Attributes(value, label, slots)
            self._named_only.add(id(holder))
            self._holder(holder)
            for name, item in holder.before.items():
                self._attribute(name, item, f"{label}.{name}")
        self._class(type(value))

    def _attributes(self, attributes: Any, label: str, owner: type | None) -> None:
        holder = Entries(attributes, label, attributes=True)
        self._named_only.add(id(holder))
        self._holder(holder)
        if owner is not None:
            self._types[id(holder)] = owner
        is_module = owner is not None and issubclass(owner, nn.Module)
        for name, item in holder.before.items():
            if not (is_module and name in _OF_MODULES):
                self._attribute(name, item, f"{label}.{name}")

    def _attribute(self, name: str, item: Any, label: str) -> None:
        if isinstance(item, (*PLAIN, torch.Tensor)):
            return
        if self.is_named(name):
            self.meet(item, label)
        else:
            self._pending.setdefault(name, []).append((item, label))

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            if id(base) in self._met:
                continue
            self._met[id(base)] = base
            home = sys.modules.get(base.__module__)
            if base.__module__ == "builtins" or home is None or is_library_module(home):
                continue
            self._attributes(vars(base), base.__name__, None)
            for item in tuple(vars(base).values()):
                wrapped = isinstance(item, staticmethod | classmethod | types.MethodType)
                for one in (item.__func__ if wrapped else item, item.fget if isinstance(item, property) else None):
                    if isinstance(one, types.FunctionType):
                        self._function(one)

    def _function(self, function: types.FunctionType) -> None:
        known = self._functions.setdefault(id(function.__code__), [])
        if any(one is function for one in known):
            return
        known.append(function)
        self._met[id(function)] = function
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            self._function(wrapped)
        if id(function.__code__) in self._codes:
            self._expand(function)

    def _expand(self, function: types.FunctionType) -> None:
        """A function ran: its variables of surrounding functions and its defaults count."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) in self._met or name == "__class__":
                continue
            self._met[id(cell)] = cell
            holder = Cell(cell, f"the variable {name} that {function.__name__} takes from outside")
            self._holder(holder)
            self.meet(holder.before.get(None), name)
        if function.__defaults__ or function.__kwdefaults__:
            label = f"the defaults of {function.__name__}"
            self._holder(Attributes(function, label, ("__defaults__", "__kwdefaults__")))
            self.meet(function.__defaults__, label)
            self.meet(function.__kwdefaults__, label)

    def _plain_cells(self, function: types.FunctionType) -> None:
        """The numbers and texts alone that a function takes from outside: it may have been made in the run."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            holder = Cell(cell, f"the variable {name} that {function.__name__} takes from outside")
            if isinstance(holder.before.get(None, MISSING), PLAIN):
                self._holder(holder)

    # The end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """After the run: functions that no value above led to, and the process's environment."""
        if self._orphans:
            wanted = {id(code) for code in self._orphans}
            for item in gc.get_referrers(*self._orphans):
                if isinstance(item, types.FunctionType) and id(item.__code__) in wanted:
                    self._plain_cells(item)
        if self._environment:
            variables: Any = os.environ._data  # type: ignore[attr-defined]
            self._holder(Entries(variables, "os.environ", attributes=False))

    def writes(self) -> list[Write]:
        """What is another value now than before the run, as far as code that ran names it."""
        found: list[Write] = []
        for holder in self.holders:
            if isinstance(holder, Asked):
                continue
            now = holder.read()
            for key in _differing(holder.before, now):
                if self._counts(holder, key) and not self._is_set_on_replay(holder, key):
                    by_unit = (id(holder), key) in self._by_units
                    old, new = holder.before.get(key, MISSING), now.get(key, MISSING)
                    found.append(Write(holder, key, old, new, by_unit))
        return found

    def is_of_module(self, holder: Holder) -> bool:
        """Whether a holder has attributes of one of the model's modules."""
        return id(holder.target) in self._of_modules

    def may_be_read(self, write: Write) -> bool:
        """Whether code that ran may read what was written, and does not only set it."""
        return not isinstance(write.key, str) or write.key in self.loaded or not isinstance(write.holder, Entries)

    def guards(self, constants: set[int], is_given: Callable[[torch.Tensor], bool]) -> tuple[Guarded, ...]:
        """The values that the recording rests on.

        Args:
            constants: ids of the tensors that the program uses as they are.
            is_given: whether the program is given a tensor anew at every step.
        """
        found = []
        for holder in self.holders:
            values = {
                key: remembered(value)
                for key, value in holder.before.items()
                if self._counts(holder, key)
                and not isinstance(value, Number)
                and not (isinstance(value, torch.Tensor) and is_given(value))
                and (not isinstance(value, torch.Tensor) or id(value) in constants)
                and (id(holder), key) not in self._by_units
                and not self._is_set_on_replay(holder, key)
            }
            whole = id(holder) not in self._named_only and not isinstance(holder, (Asked, Cell, Members, Attributes))
            size = len(holder.before) if whole else None
            if len(values) > LARGE:
                values = {}
            absent = self._absent(holder)
            if values or absent or size is not None:
                found.append(Guarded(holder, tuple(values), tuple(values.values()), absent, size))
        return tuple(found)

    def _counts(self, holder: Holder, key: Any) -> bool:
        if id(holder) not in self._named_only:
            return True
        owner = self._types.get(id(holder))
        if owner is not None and issubclass(owner, nn.Module) and key in _OF_MODULES:
            return False
        known = self._globals.get(id(holder.target))
        if known is not None and known[0] is holder:
            return key in known[1]
        return self.is_named(key)

    def _is_set_on_replay(self, holder: Holder, key: Any) -> bool:
        return (id(holder.target), key) in self._on_replay

    def _absent(self, holder: Holder) -> frozenset[Any]:
        """Attributes of an object's class that the object would hide, if it had them."""
        owner = self._types.get(id(holder))
        if owner is None:
            return frozenset()
        held = {name for base in owner.__mro__ if id(base) in self._met for name in vars(base) if self.is_named(name)}
        return frozenset(name for name in held if name not in holder.before and not name.startswith("__"))


def _takes_values(frame: types.FrameType) -> bool:
    """Whether a function that is called takes anything else from outside than code: functions, classes, modules."""
    names, variables = frame.f_code.co_freevars, frame.f_locals
    return not all(isinstance(variables.get(name), _CODE) for name in names)


def _unpatched(value: Any) -> Any:
    """A function as it is when nothing is recorded."""
    is_patch = isinstance(value, types.FunctionType) and is_library(value.__code__.co_filename)
    return getattr(value, "__wrapped__", value) if is_patch else value


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _differing(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    return [key for key, value in now.items() if key not in before or not same(value, before[key])] + [
        key for key in before if key not in now
    ]
