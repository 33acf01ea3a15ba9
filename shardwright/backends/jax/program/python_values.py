"""The Python values that a loss function reads: closures, globals, attributes. A step is compiled for those values.

A traced function sees such a value once. So every value that the function's code names is remembered, with all
functions that it calls and the classes of its modules; where one has changed, the step is another one. A number that
has changed becomes an input of the step, so that a number that changes in every step is compiled no more than twice;
where Python needs to know it (a shape, a branch), the step is compiled for each of its values.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from operator import is_
from typing import Any

import jax
import numpy as np
from flax import nnx

from shardwright.backends.jax.capture.samples import FlatBatch
from shardwright.backends.jax.compat import weak_type
from shardwright.backends.jax.program.python_reads import MISSING, SIMPLE, Finder, Slot, slots_of
from shardwright.core.errors import PlanError

WRITTEN = (
    "the loss function changes {} while it runs: it runs when a step is compiled and not again, so that what it counts "
    "there stays; return it with has_aux=True, or keep it in the state (an nnx.Variable, or state= of a plain function)"
)


@dataclass(slots=True, eq=False)
class ModuleValues:
    """The attributes of an NNX module that are no arrays: a state holds them as they were when it was made.

    The module itself is not held, as its arrays are the whole model's, on one device, beside the shares of a state. The
    attributes of a module that is gone stay as they were last seen.
    """

    paths: list[tuple[Any, ...]]
    modules: list["weakref.ref[nnx.Module]"]
    names: list[str]
    values: list[Any]
    """The attributes as they were when the module was given."""
    seen: list[Any]
    """The attributes as they were last seen."""

    @classmethod
    def of(cls, model: nnx.Module) -> "ModuleValues":
        found = cls([], [], [], [], [])
        for path, module in nnx.iter_modules(model):
            for name, value in vars(module).items():
                if isinstance(value, SIMPLE) and not name.startswith("_"):
                    found.paths.append(tuple(path))
                    found.modules.append(weakref.ref(module))
                    found.names.append(name)
                    found.values.append(value)
        found.seen = list(found.values)
        return found

    def changed(self) -> list[int]:
        """The numbers of the attributes that are not what they were, as they are seen now."""
        for number, (module, name) in enumerate(zip(self.modules, self.names, strict=True)):
            if (held := module()) is not None:
                self.seen[number] = vars(held).get(name, MISSING)
        if all(map(is_, self.seen, self.values)):
            return []
        return [
            number
            for number, (one, other) in enumerate(zip(self.seen, self.values, strict=True))
            if one is not other and not (type(one) is type(other) and one == other)
        ]

    def name(self, number: int) -> str:
        return ".".join(map(str, (*self.paths[number], self.names[number]))) + " of the model"

    def slot(self, number: int) -> Slot:
        """The place of an attribute as it was last seen."""
        return Slot(self.name(number), self.seen, number)


@dataclass(slots=True, eq=False)
class PythonValues:
    """The Python values that a loss function reads, and those of them that are inputs of its steps."""

    slots: list[Slot]
    lifted: list[Slot] = field(default_factory=list)
    """The slots of numbers that are inputs."""
    fixed: set[int] = field(default_factory=set)
    """The slots, by identity, whose values Python has to know."""
    classes: set[Any] = field(default_factory=set)
    """The classes of modules that were looked through."""
    module: ModuleValues | None = None
    """The attributes of the module that was given to init."""
    begun: nnx.Module | None = None
    """That module, until its attributes are first looked at: what changed since init is not lost with it."""
    of_module: dict[int, Slot] = field(default_factory=dict)
    """The slots of those attributes that have changed since, by number."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "PythonValues":
        return cls(slots_of(function))

    def follow(self, model: nnx.Module) -> None:
        """Follow the attributes of a module that training begins with."""
        self.module, self.begun = ModuleValues.of(model), model
        self.slots = [slot for slot in self.slots if slot not in self.of_module.values()]
        self.of_module = {}

    def notice(self) -> None:
        """Look at the attributes of the module that training began with."""
        if self.module is None:
            return
        for number in self.module.changed():
            if number not in self.of_module:
                self.of_module[number] = self.module.slot(number)
                self.slots.append(self.of_module[number])
        self.begun = None

    @contextmanager
    def on(self, model: nnx.Module) -> Iterator[None]:
        """A context in which a module that was made from a state has the attributes that have changed since. Raises
        PlanError when code inside changes others."""
        modules = {tuple(path): vars(module) for path, module in nnx.iter_modules(model)}
        before = ModuleValues.of(model)
        changed = [] if self.module is None else [
            (self.module.paths[number], self.module.names[number], slot) for number, slot in self.of_module.items()
        ]  # fmt: skip
        kept = [(path, name, modules[path][name]) for path, name, _ in changed]
        for path, name, slot in changed:
            modules[path][name] = slot.read()
        given = {(path, name) for path, name, _ in kept}
        try:
            yield
            written = [n for n in before.changed() if (before.paths[n], before.names[n]) not in given]
        finally:
            for path, name, value in kept:
                modules[path][name] = value
        if written:
            raise PlanError(WRITTEN.format(", ".join(map(before.name, written))))

    def look_through(self, classes: Sequence[type]) -> None:
        """Add the values that the methods of these classes read."""
        found = Finder()
        for each in classes:
            if each not in self.classes:
                self.classes.add(each)
                found.methods(each)
        known = {(id(slot.base), slot.key, slot.way) for slot in self.slots}
        self.slots += [slot for slot in found.slots.values() if (id(slot.base), slot.key, slot.way) not in known]

    def prints(self) -> tuple[Any, ...]:
        """The keys of the values that a step is compiled for; None stands for an input."""
        lifted = {id(slot) for slot in self.lifted}
        return tuple(None if id(slot) in lifted else slot.print() for slot in self.slots)

    def inputs(self) -> list[np.ndarray]:
        """The numbers that are inputs, as they are now."""
        return [_as_array(slot.read()) for slot in self.lifted]

    def changed(self, before: Sequence[Any], now: Sequence[Any]) -> list[Slot]:
        """The slots whose values differ. New ones among them are attributes of the module that have changed for the
        first time."""
        known = [slot for slot, one, other in zip(self.slots, before, now, strict=False) if one != other]
        return known + self.slots[len(before) :]

    def lift(self, slots: Sequence[Slot]) -> list[Slot]:
        """Make inputs of those slots that hold numbers, and return them."""
        if weak_type() is None:
            return []
        held = {id(slot) for slot in self.lifted} | self.fixed
        made = [slot for slot in slots if id(slot) not in held and _is_number(slot.read())]
        self.lifted += made
        return made

    def settle(self, slots: Sequence[Slot]) -> None:
        """Make these slots inputs no more, as Python has to know their values after all."""
        given = {id(slot) for slot in slots}
        self.fixed |= given
        self.lifted = [slot for slot in self.lifted if id(slot) not in given]

    @contextmanager
    def given(self, values: Sequence[Any]) -> Iterator[None]:
        """A context in which the lifted numbers are these values. Raises PlanError when code inside changes a value
        that the function reads."""
        before = [slot.read() for slot in self.lifted]
        cast = weak_type()
        try:
            for slot, value in zip(self.lifted, values, strict=True):
                slot.write(value if cast is None else cast(value))
            prints = self.prints()
            yield
            written = [
                slot.name for slot, one, other in zip(self.slots, prints, self.prints(), strict=False) if one != other
            ]
        finally:
            for slot, value in zip(self.lifted, before, strict=True):
                slot.write(value)
        if written:
            raise PlanError(WRITTEN.format(", ".join(written)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class WithValues:
    """A batch, and the Python numbers that are inputs of the step."""

    batch: Any
    values: list[Any]


def with_values(batch: Any, dims: tuple[int | None, ...], values: list[np.ndarray]) -> FlatBatch:
    """A batch, and the Python numbers that are inputs of its step."""
    leaves, structure = jax.tree.flatten(WithValues(batch, values) if values else batch)
    return FlatBatch(tuple(leaves), structure, (*dims, *([None] * len(values))))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool | Enum)


def _as_array(value: Any) -> np.ndarray:
    kind = np.float32 if isinstance(value, float | np.floating) else np.int32
    return np.asarray(value, kind)
