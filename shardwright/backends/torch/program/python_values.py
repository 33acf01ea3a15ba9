"""Python values of a recording: the values that it rests on, read again at every step, and those that running it
changes."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.backends.torch.program.python_numbers import Expression, Place
from shardwright.backends.torch.program.python_places import Guarded, Holder, same


@dataclass(frozen=True, slots=True)
class Effect:
    """A value that the step leaves somewhere, or the expression of it."""

    holder: Holder
    key: Any
    value: Any

    @property
    def place(self) -> Place:
        return id(self.holder.target), self.key


@dataclass(frozen=True, slots=True)
class PythonValues:
    """The Python values that a recording reads and writes.

    Attributes:
        guarded: those that it rests on.
        effects: those that the step's body leaves, once for each microbatch.
        used: the expressions whose values the program is given, anew for each microbatch.
        conditions: (expression, its value) where the recording rests on that.
        serial: another number for each recording.
    """

    guarded: tuple[Guarded, ...] = ()
    effects: tuple[Effect, ...] = ()
    used: tuple[Expression, ...] = ()
    conditions: tuple[tuple[Expression, Any], ...] = ()
    clocks: Mapping[Place, Any] = field(default_factory=dict)
    """The value of each reading of a clock while this was recorded, in order."""
    readings: tuple[Expression, ...] = ()
    """The expressions of the clocks' readings, in order, so that none is before an earlier one."""
    serial: int = field(default_factory=itertools.count().__next__)

    def hold(self) -> bool:
        """Whether all values are as they were when the recording was made."""
        return all(guarded.holds() for guarded in self.guarded) and self._conditions_hold()

    def _conditions_hold(self) -> bool:
        known: dict[int, Any] = {}
        try:
            return all(same(expression.value(known), given) for expression, given in self.conditions)
        except Exception:  # the user's numbers and functions: what fails now did not when this was recorded
            return False

    def changed(self) -> list[tuple[Holder, Any]]:
        """The places of the values that differ."""
        return [(g.holder, key) for g in self.guarded if not g.holds() for key in g.changed()]

    def changed_in_words(self) -> list[str]:
        """The places of the values that differ, and of the conditions that do not hold, in words."""
        found = [holder.place(key) for holder, key in self.changed()]
        if not self._conditions_hold():
            found += sorted({place for expression, _ in self.conditions for place in places_of(expression)})
        return found

    def numbers(self) -> tuple[Any, ...]:
        """The values that the program is given now."""
        known: dict[int, Any] = {}
        for reading in self.readings:
            reading.value(known)
        return tuple([expression.value(known) for expression in self.used])

    def compared(self, numbers: Sequence[Any]) -> list[Any]:
        """The numbers, among these, that are the same on every rank."""
        return [n for n, expression in zip(numbers, self.used, strict=True) if not expression.is_of_clock]

    def leave(self) -> list[tuple[Holder, Any, Any]]:
        """Change Python values as one run of the step's body does. Returns the values that were there before."""
        before = [(effect.holder, effect.key, effect.holder.value(effect.key)) for effect in self.effects]
        known: dict[int, Any] = {}
        values = [e.value.value(known) if isinstance(e.value, Expression) else e.value for e in self.effects]
        for effect, value in zip(self.effects, values, strict=True):
            effect.holder.put(effect.key, value)
        return before


def places_of(expression: Expression) -> list[str]:
    """The places from which an expression is computed, in words."""
    if expression.holder is not None:
        return [expression.holder.place(expression.key)]
    return [place for a in expression.arguments if isinstance(a, Expression) for place in places_of(a)]
