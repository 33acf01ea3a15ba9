"""The Python values that code which ran can reach, so that they may be compared with their earlier values.

From functions, modules of the model and given roots, values are followed through globals, variables of surrounding
functions, defaults, objects, dicts and lists, under the names that stand in the code that ran.
"""

import contextvars
import functools
import inspect
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.backends.torch.capture.held_tensors import slots_of
from shardwright.backends.torch.capture.host_draws import GENERATORS, generator_state
from shardwright.backends.torch.program.names_in_code import Names, is_library, is_library_module
from shardwright.backends.torch.program.python_clocks import Clocks
from shardwright.backends.torch.program.python_places import (
    PLAIN,
    Asked,
    Attributes,
    Cell,
    Entries,
    Holder,
    Items,
    Members,
    attributes_of,
)

LARGE = 2000
"""The number of items above which containers are compared as objects and by their size, not item by item."""
_OF_MODULES = frozenset(vars(nn.Module()))
_DATA_TYPES = ("types", "argparse", "collections", "optparse")
"""Modules of the standard library with types that do nothing but hold values."""
SETTINGS: Mapping[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": torch.get_default_device,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled,
}


class ReachableValues:
    """The values that the code of one run reaches, as they were when they were met.

    Args:
        model: the model whose modules are met at once, with their classes.

    Attributes:
        names: attributes that code which ran names.
        holders: where the values are.
        clocks: those that are followed in the globals that code names.
        generators: generators of random numbers of the user's own, and their states when they were met.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: set[str] = set()
        self.beginnings: tuple[str, ...] = ()
        self.holders: list[Holder] = []
        self.clocks: Clocks | None = None
        self.generators: list[tuple[Any, Any]] = []
        self.codes: dict[int, types.CodeType] = {}
        """The code that ran, by id."""
        self._functions: dict[int, list[types.FunctionType]] = {}
        self._met: dict[int, Any] = {}
        self._pending: dict[str, list[tuple[Any, str]]] = {}
        self._globals: dict[int, tuple[Entries, set[str]]] = {}
        self._named_only: set[int] = set()
        """Ids of the holders of which only named keys count."""
        self._types: dict[int, type] = {}
        """The type of an object, by the id of the holder of its attributes."""
        self._in_model: dict[int, str] = {}
        self._of_modules: set[int] = set()

    def begin(self, roots: Iterable[tuple[Any, str]]) -> None:
        """Meet the model, torch's settings, and these values, with labels."""
        name = type(self.model).__name__
        for path, module in self.model.named_modules():
            self._of_modules.add(id(vars(module)))
            self._in_model[id(module)] = f"{name}.{path}" if path else name
        for module in self.model.modules():
            self._module(module, self._in_model[id(module)])
        self._add(Asked(SETTINGS, "torch"))
        for root, label in roots:
            self.meet(root, label)

    def run(self, code: types.CodeType, names: Names, variables: dict[str, Any]) -> bool:
        """Note that this code runs, with these globals. Returns whether a function that has it was met."""
        self.codes[id(code)] = code
        self._read_globals(variables, names.read)
        known = self._functions.get(id(code), [])
        for function in known:
            self._expand(function)
        return bool(known)

    def name(self, names: Iterable[str], beginnings: tuple[str, ...]) -> None:
        """Note that code that runs names these attributes, and attributes with these beginnings."""
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

    def counts(self, holder: Holder, key: Any) -> bool:
        """Whether code that ran may use the value of a holder under this key."""
        if id(holder) not in self._named_only:
            return True
        owner = self._types.get(id(holder))
        if owner is not None and issubclass(owner, nn.Module) and key in _OF_MODULES:
            return False
        known = self._globals.get(id(holder.target))
        if known is not None and known[0] is holder:
            return key in known[1]
        return self.is_named(key)

    def is_whole(self, holder: Holder) -> bool:
        """Whether all values of a holder count, under whatever key."""
        return id(holder) not in self._named_only

    def is_of_module(self, holder: Holder) -> bool:
        """Whether a holder has attributes of one of the model's modules."""
        return id(holder.target) in self._of_modules

    def absent(self, holder: Holder) -> frozenset[Any]:
        """Attributes of an object's class that the object would hide, if it had them."""
        owner = self._types.get(id(holder))
        if owner is None:
            return frozenset()
        held = {name for base in owner.__mro__ if id(base) in self._met for name in vars(base) if self.is_named(name)}
        return frozenset(name for name in held if name not in holder.before and not name.startswith("__"))

    def meet_made(self, functions: Iterable[types.FunctionType]) -> None:
        """Meet the numbers and texts, and nothing else, that functions which may have been made in the run take from
        outside."""
        for function in functions:
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                holder = Cell(cell, f"the variable {name} that {function.__name__} takes from outside")
                if isinstance(holder.content, PLAIN):
                    self._add(holder)

    def meet_environment(self) -> None:
        """Let the process's environment count."""
        variables: Any = os.environ._data  # type: ignore[attr-defined]
        self._add(Entries(variables, "os.environ", attributes=False))

    # Meeting values ----------------------------------------------------------------------------------------------

    def _add(self, holder: Holder) -> None:
        self.holders.append(holder)

    def _read_globals(self, variables: dict[str, Any], names: Iterable[str]) -> None:
        if id(variables) not in self._globals:
            holder = Entries(variables, "", attributes=True)
            self._globals[id(variables)] = holder, set()
            self._named_only.add(id(holder))
            self._add(holder)
        holder, read = self._globals[id(variables)]
        for name in names:
            if name in variables and name not in read:
                read.add(name)
                if self.clocks is not None:
                    self.clocks.meet(variables, name, variables[name])
                holder.before[name] = _unpatched(holder.before.get(name))
                self.meet(holder.before[name], name)

    def meet(self, value: Any, label: str) -> None:
        """Meet a value that the step may use: from now on its contents are compared."""
        if isinstance(value, (*PLAIN, torch.Tensor)) or id(value) in self._met or id(value) in self._in_model:
            return
        self._met[id(value)] = value
        if isinstance(value, dict):
            self._add(Entries(value, label, attributes=False))
            if len(value) <= LARGE:
                for key, item in list(dict.items(value)):
                    self.meet(item, f"{label}[{key!r}]")
            if type(value) is not dict and attributes_of(value) is not None:
                self._object(value, label)
        elif isinstance(value, (list, tuple, deque)):
            if not isinstance(value, tuple):
                self._add(Items(value, label))
            if len(value) <= LARGE:
                for position, item in enumerate(value):
                    self.meet(item, f"{label}[{position}]")
            if attributes_of(value) is not None:
                self._object(value, label)
        elif isinstance(value, (set, frozenset)):
            if isinstance(value, set):
                self._add(Members(value, label))
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
                self._attributes(Entries(vars(value), value.__name__, attributes=True), None)
        elif isinstance(value, contextvars.ContextVar):
            variable: contextvars.ContextVar[Any] = value
            self._add(Asked({label: lambda: variable.get(None)}, label))
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
        self._attributes(Entries(vars(module), label, attributes=True), type(module))
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
            self._attributes(Entries(attributes, label, attributes=True), type(value))
        if slots := slots_of(value):
            self._attributes(Attributes(value, label, slots), None)
        self._class(type(value))

    def _attributes(self, holder: Holder, owner: type | None) -> None:
        self._named_only.add(id(holder))
        self._add(holder)
        if owner is not None:
            self._types[id(holder)] = owner
        is_module = owner is not None and issubclass(owner, nn.Module)
        for name, item in holder.before.items():
            if not (is_module and name in _OF_MODULES):
                self._attribute(name, item, holder.place(name))

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
            self._attributes(Entries(vars(base), base.__name__, attributes=True), None)
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
        if id(function.__code__) in self.codes:
            self._expand(function)

    def _expand(self, function: types.FunctionType) -> None:
        """Meet the variables of surrounding functions and the defaults of a function that ran."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) in self._met or name == "__class__":
                continue
            self._met[id(cell)] = cell
            holder = Cell(cell, f"the variable {name} that {function.__name__} takes from outside")
            self._add(holder)
            self.meet(holder.content, name)
        if function.__defaults__ or function.__kwdefaults__:
            label = f"the defaults of {function.__name__}"
            self._add(Attributes(function, label, ("__defaults__", "__kwdefaults__")))
            self.meet(function.__defaults__, label)
            self.meet(function.__kwdefaults__, label)


def _unpatched(value: Any) -> Any:
    """A function as it is when nothing is recorded."""
    is_patch = isinstance(value, types.FunctionType) and is_library(value.__code__.co_filename)
    return getattr(value, "__wrapped__", value) if is_patch else value
