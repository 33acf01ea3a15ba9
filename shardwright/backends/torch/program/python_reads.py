"""The Python values that a step read while it was recorded: values outside of tensors that its program may rest on.

While the step's body runs, every function of the user's and of the model's libraries that is called is noted, with the
names in its code. The values that these can reach are compared with their earlier ones (`python_reachable`). Units that
replay whole read their values anew each time, and are left out.
"""

import dataclasses
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.program.names_in_code import is_library, names_in
from shardwright.backends.torch.program.python_numbers import Number
from shardwright.backends.torch.program.python_places import (
    MISSING,
    Asked,
    Attributes,
    Entries,
    Guarded,
    Holder,
    Members,
    remembered,
    same,
)
from shardwright.backends.torch.program.python_reachable import LARGE, ReachableValues

_CODE = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    type(getattr(dataclasses, "_HAS_DEFAULT_FACTORY", object)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Write:
    """A value that was another one after the recording than before."""

    holder: Holder
    key: Any
    old: Any
    new: Any
    by_unit: bool
    """Whether a unit wrote it; the unit does so whenever it runs."""

    @property
    def place(self) -> str:
        return self.holder.place(self.key)


@contextmanager
def left_as_it_is(model: nn.Module, roots: Iterable[tuple[Any, str]] = ()) -> Iterator[None]:
    """A context in which code may write to Python values, which is undone on leaving: it runs on stand-ins."""
    reads = Reads(model, lambda: False)
    try:
        with reads.watching(roots):
            yield
    finally:
        undo(reads.writes())


def undo(writes: Iterable["Write"]) -> None:
    """Put back the values that a run of the body changed, which was no training."""
    for write in writes:
        write.holder.put(write.key, write.old)


class Reads:
    """The Python values that a run of a step's body may read.

    Args:
        is_left_out: whether the code that runs now will run again at every replay.
    """

    def __init__(self, model: nn.Module, is_left_out: Callable[[], bool]) -> None:
        self._is_left_out = is_left_out
        self.reached = ReachableValues(model)
        self.loaded: set[str] = set()
        """The attributes that code which ran does not only set."""
        self._skipped: dict[int, types.CodeType] = {}
        self._orphans: list[types.CodeType] = []
        self._by_units: set[tuple[int, Any]] = set()
        self._on_replay: set[tuple[int, str]] = set()
        """The (id of a module's attributes, name) of the attributes that a step of the program sets."""
        self._environment = False
        self.is_collecting = False
        """Whether Python collects garbage. Code that runs then (callbacks, finalizers) is no part of the body, which it
        interrupts at any call."""

    # The run -----------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, roots: Iterable[tuple[Any, str]]) -> Iterator[None]:
        """Note the calls inside.

        Args:
            roots: where to begin beside the model, with labels: the step function, its arguments.
        """
        self.reached.begin(roots)
        outer = sys.gettrace()
        called, skipped, codes = self._called, self._skipped, self.reached.codes

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
        names = names_in(code)
        is_known = self.reached.run(code, names, frame.f_globals)
        if code.co_freevars and not is_known and not code.co_name.startswith("<") and _takes_values(frame):
            self._orphans.append(code)
        self.loaded |= names.loaded
        self._environment = self._environment or names.environment
        self.reached.name(names.attributes, names.beginnings)

    def set_on_replay(self, module: nn.Module, name: str) -> None:
        """Note that a step of the program sets this attribute."""
        self._on_replay.add((id(vars(module)), name))

    @contextmanager
    def unit(self) -> Iterator[None]:
        """A context in which a unit runs. It writes the same values again whenever it is replayed."""
        before = [(holder, holder.read()) for holder in self.reached.holders if not isinstance(holder, Asked)]
        try:
            yield
        finally:
            for holder, values in before:
                for key in _differing(values, holder.read()):
                    self._by_units.add((id(holder), key))

    # The end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the run: meet functions that no value above led to, and the process's environment."""
        if self._orphans:
            wanted = {id(code) for code in self._orphans}
            found = referrers_of(self._orphans)
            self.reached.meet_made(
                item for item in found if isinstance(item, types.FunctionType) and id(item.__code__) in wanted
            )
        if self._environment:
            self.reached.meet_environment()

    def writes(self) -> list[Write]:
        """The values that differ from those before the run, as far as code that ran names them."""
        found: list[Write] = []
        for holder in self.reached.holders:
            if isinstance(holder, Asked):
                continue
            now = holder.read()
            for key in _differing(holder.before, now):
                if self.reached.counts(holder, key) and not self._is_set_on_replay(holder, key):
                    by_unit = (id(holder), key) in self._by_units
                    old, new = holder.before.get(key, MISSING), now.get(key, MISSING)
                    if _are_classes_registered(old, new):
                        holder.before[key] = new
                        continue
                    found.append(Write(holder, key, old, new, by_unit))
        return found

    def may_be_read(self, write: Write) -> bool:
        """Whether code that ran may read the written value, and does not only set it."""
        return not isinstance(write.key, str) or write.key in self.loaded or not isinstance(write.holder, Entries)

    def guards(self, constants: set[int], is_given: Callable[[torch.Tensor], bool]) -> tuple[Guarded, ...]:
        """The values that the recording rests on.

        Args:
            constants: ids of the tensors that the program uses as they are.
            is_given: whether the program is given a tensor anew at every step.
        """
        found = []
        for holder in self.reached.holders:
            values = {
                key: remembered(value)
                for key, value in holder.before.items()
                if self.reached.counts(holder, key)
                and not isinstance(value, Number)
                and not (isinstance(value, torch.Tensor) and is_given(value))
                and (not isinstance(value, torch.Tensor) or id(value) in constants)
                and (id(holder), key) not in self._by_units
                and not self._is_set_on_replay(holder, key)
            }
            whole = self.reached.is_whole(holder) and not isinstance(holder, (Asked, Members, Attributes))
            size = len(holder.before) if whole else None
            if len(values) > LARGE:
                values = {}
            absent = self.reached.absent(holder)
            if values or absent or size is not None:
                found.append(Guarded(holder, tuple(values), tuple(values.values()), absent, size))
        return tuple(found)

    def _is_set_on_replay(self, holder: Holder, key: Any) -> bool:
        return (id(holder.target), key) in self._on_replay


def _takes_values(frame: types.FrameType) -> bool:
    """Whether a called function takes anything from outside but code: functions, classes, modules."""
    names, variables = frame.f_code.co_freevars, frame.f_locals
    return not all(isinstance(variables.get(name), _CODE) for name in names)


def referrers_of(objects: Sequence[Any]) -> list[Any]:
    """What refers to some objects. What `gc.freeze` has frozen is looked at too, and frozen again."""
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    try:
        return gc.get_referrers(*objects)
    finally:
        if frozen:
            gc.freeze()


def _are_classes_registered(old: Any, new: Any) -> bool:
    """Whether a set has got classes and lost nothing: a library remembers what it has registered elsewhere, as
    `transformers` does with torch's registry of containers, and would register it twice."""
    return (
        isinstance(old, frozenset)
        and isinstance(new, frozenset)
        and old < new
        and all(isinstance(member, type) for member in new - old)
    )


def _differing(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    return [key for key, value in now.items() if key not in before or not same(value, before[key])] + [
        key for key in before if key not in now
    ]
