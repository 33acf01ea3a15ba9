"""Clocks that a step reads while it is recorded: each reading is a number that the program takes anew at every step.

``time.time()`` is no value that is kept anywhere, so that nothing could be compared at the next step. While user code
runs under a recorder, it gives a stand-in (`python_numbers`) whose expression is the call itself. torch, the standard
library and units that run again at every replay read the clock itself.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from shardwright.backends.torch.program.names_in_code import is_library
from shardwright.backends.torch.program.python_numbers import Expression, Place, Tape
from shardwright.backends.torch.program.python_places import Clock

_NAMES = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
CLOCKS: dict[int, Callable[[], Any]] = {
    id(function): function
    for name in _NAMES
    for function in (getattr(time, name, None), getattr(time, f"{name}_ns", None))
    if function is not None
}
"""The clocks, by id."""


class Clocks:
    """The clocks of one recording.

    Args:
        tape: where readings are noted.
        given: the readings, in order: as in an earlier recording, and plain numbers; None: stand-ins for the present
            readings of the clocks.
    """

    def __init__(self, tape: Tape, given: Sequence[Any] | None) -> None:
        self._tape, self._given = tape, given
        self._readings: list[tuple[Clock, int, Any]] = []
        self.sources: list[Expression] = []
        """The expressions of the readings, in order."""
        self._changed: list[tuple[dict[str, Any], str, Any]] = []
        self._are_followed = False
        self._thread = threading.get_ident()
        self._followed = {number: self._reading(function) for number, function in CLOCKS.items()}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """A context in which the clocks of the module ``time`` are followed, and those that `meet` is shown."""
        self._are_followed = True
        try:
            for name, value in list(vars(time).items()):
                self.meet(vars(time), name, value)
            yield
        finally:
            self._are_followed = False
            for variables, name, value in reversed(self._changed):
                variables[name] = value
            self._changed.clear()

    def meet(self, variables: dict[str, Any], name: str, value: Any) -> None:
        """Follow the value of a global, where it is a clock. Code that is about to run names this global."""
        followed = self._followed.get(id(value))
        if followed is not None and self._are_followed:
            self._changed.append((variables, name, value))
            variables[name] = followed

    @property
    def readings(self) -> Mapping[Place, Any]:
        """The value of each reading, by its place, in order."""
        return {(id(clock.target), key): value for clock, key, value in self._readings}

    def _reading(self, function: Callable[[], Any]) -> Callable[[], Any]:
        clock = Clock(function)

        def read() -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if threading.get_ident() != self._thread or is_library(caller) or not self._tape.is_heard():
                return function()
            number = len(self._readings)
            if self._given is not None and number < len(self._given):
                value = self._given[number]
                self._readings.append((clock, number, value))
                return value
            value = function()
            self._readings.append((clock, number, value))
            self.sources.append(Expression(None, (), clock, number))
            return self._tape.number(self.sources[-1], value)

        read.__wrapped__ = function  # type: ignore[attr-defined]
        return read
