"""Numbers that remember how they were computed from Python values, while a step is recorded.

A value that changes from step to step would be recorded anew each time. Instead a stand-in for it is put in its place:
a float of a class of its own, whose arithmetic is noted. Where such a number reaches the program, the program gets the
expression, which is evaluated at every step; where it decides something (``if beta > 0.5``), the answer becomes a
condition of the recording.

To code in C a stand-in is a slightly different number. An error that slips through there differs from a recording
without stand-ins, and is found by comparing the two (`recording_check`).
"""

import builtins
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch

from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.program.python_places import Clock, Holder

Place = tuple[int, Any]
"""The place of a value: (id of the holder's target, key)."""
_OFF = 2.0**-30
"""The relative difference between a stand-in and its value, as code in C sees it."""


class Expression:
    """The way in which a value follows from Python values.

    Attributes:
        function: computes it from ``arguments``, which may be expressions; None where it is read from ``holder``.
    """

    __slots__ = ("arguments", "function", "holder", "key")

    def __init__(
        self, function: Callable[..., Any] | None, arguments: tuple[Any, ...] = (), holder: Holder | None = None,
        key: Any = None,
    ) -> None:  # fmt: skip
        self.function, self.arguments, self.holder, self.key = function, arguments, holder, key

    def value(self, known: dict[int, Any], at: "Mapping[Place, Any] | None" = None) -> Any:
        """The value now, or where its places have the values ``at``.

        Args:
            known: values of expressions by their ids, to which this adds.

        Raises:
            Exception: whatever its function raises; KeyError for a place that ``at`` lacks.
        """
        found = known.get(id(self), known)
        if found is not known:
            return found
        if self.function is None:
            assert self.holder is not None
            found = self.holder.value(self.key) if at is None else at[id(self.holder.target), self.key]
        else:
            found = self.function(*[a.value(known, at) if isinstance(a, Expression) else a for a in self.arguments])
        known[id(self)] = found
        return found

    @property
    def is_of_clock(self) -> bool:
        """Whether a clock is read for the value."""
        if self.function is None:
            return isinstance(self.holder, Clock)
        return any(isinstance(a, Expression) and a.is_of_clock for a in self.arguments)

    def now(self) -> Any:
        """The value now, in a recording too."""
        found = self.value({})
        return found.true if isinstance(found, Number) else found

    def __repr__(self) -> str:  # the same on every rank
        if self.function is None:
            assert self.holder is not None
            return self.holder.place(self.key)
        inner = ", ".join(map(repr, self.arguments))
        return f"{getattr(self.function, '__name__', '?')}({inner})"


class Number(float):
    """A stand-in for a number."""

    expression: Expression
    true: Any
    tape: "Tape"

    def _fixed(self) -> Any:
        return self.tape.fixed(self)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._fixed()

    def __copy__(self) -> Any:
        return self._fixed()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a number that is being recorded cannot be pickled")

    def __hash__(self) -> int:
        return hash(self._fixed())

    def __bool__(self) -> bool:
        return bool(self.tape.decide(bool, (self,)))

    def __int__(self) -> int:
        return int(self.tape.decide(int, (self,)))

    def __float__(self) -> float:
        return float(self.tape.decide(float, (self,)))

    def __str__(self) -> str:
        return str(self.tape.shown(self))

    def __repr__(self) -> str:
        return repr(self.tape.shown(self))

    def __format__(self, spec: str) -> str:
        return format(self.tape.shown(self), spec)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **named: Any) -> Any:
        if method == "__call__" and not named and not any(isinstance(item, np.ndarray) for item in given):
            return self.tape.apply(ufunc, given)
        return getattr(ufunc, method)(*[i._fixed() if isinstance(i, Number) else i for i in given], **named)


_PLAIN = (int, float, complex, np.generic)
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY: dict[str, Callable[..., Any]] = {
    "neg": operator.neg, "pos": operator.pos, "abs": builtins.abs, "round": builtins.round, "trunc": math.trunc,
    "floor": math.floor, "ceil": math.ceil,
}  # fmt: skip
_ASKED = ("is_integer", "as_integer_ratio", "hex", "conjugate")


def _binary(function: Callable[..., Any], *, reflected: bool) -> Callable[..., Any]:
    def method(self: Number, other: Any) -> Any:
        if not isinstance(other, _PLAIN):
            return NotImplemented
        return self.tape.apply(function, (other, self) if reflected else (self, other))

    return method


def _compared(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Number, other: Any) -> Any:
        return self.tape.decide(function, (self, other)) if isinstance(other, _PLAIN) else NotImplemented

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *more: self.tape.apply(function, (self, *more))


def _asked(name: str) -> Callable[..., Any]:
    return lambda self: getattr(self.tape.fixed(self), name)()


for _name in _BINARY:
    setattr(Number, f"__{_name}__", _binary(getattr(operator, _name), reflected=False))
    setattr(Number, f"__r{_name}__", _binary(getattr(operator, _name), reflected=True))
for _name in _COMPARED:
    setattr(Number, f"__{_name}__", _compared(getattr(operator, _name)))
for _name, _function in _UNARY.items():
    setattr(Number, f"__{_name}__", _unary(_function))
for _name in _ASKED:
    setattr(Number, _name, _asked(_name))


class Tape:
    """The stand-ins of one recording, the expressions that the program uses, and the conditions that they decided.

    Args:
        places: where they stand.
        with_tensors: whether tensors there may be given to the program anew at every step.

    Attributes:
        used: the expressions in the program.
        conditions: (expression, its value) where that decided what was recorded.
        tensors: id of a tensor in such a place → its expression.
        is_heard: whether a decision made now is part of the recording.
    """

    def __init__(
        self, places: Sequence[tuple[Holder, Any]], is_heard: Callable[[], bool], *, with_tensors: bool
    ) -> None:
        self.places, self.is_heard, self.with_tensors = tuple(places), is_heard, with_tensors
        self.used: list[Expression] = []
        self.conditions: list[tuple[Expression, Any]] = []
        self.tensors: dict[int, Expression] = {}
        self._shown: list[tuple[Expression, Any]] = []
        self._count = 0
        self._kept: list[Any] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which stand-ins are where the values are, while the step runs. Raises whatever a holder raises
        that takes no stand-in."""
        before: list[tuple[Holder, Any, Any]] = []
        patched = _patched_math(self)
        try:
            for holder, key in self.places:
                value = holder.value(key)
                source = Expression(None, (), holder, key)
                if isinstance(value, torch.Tensor) and not self.with_tensors:
                    self.conditions.append((source, value))
                    continue
                if isinstance(value, torch.Tensor):
                    self.tensors[id(value)] = source
                    self._kept.append(value)
                    self.conditions.append((Expression(_look_of, (source,)), _look_of(value)))
                    continue
                self.conditions.append((Expression(type, (source,)), type(value)))
                before.append((holder, key, value))
                holder.put(key, self.number(source, value))
            with patched:
                yield
        finally:
            for holder, key, value in before:
                holder.put(key, value)

    def number(self, expression: Expression, value: Any) -> Any:
        """A stand-in for a value; a value that is no real number is fixed as it is."""
        if type(value) not in (int, float) and not isinstance(value, (np.floating, np.integer)):
            self._note(expression, value)
            return value
        self._count += 1
        near = float(value)
        made = Number(near - (abs(near) or 1e-30) * _OFF * self._count)
        made.expression, made.true, made.tape = expression, value, self
        return made

    def apply(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """The result of a function, as a number whose expression is noted."""
        return self.number(Expression(function, _expressions(arguments)), function(*_true(arguments)))

    def decide(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """The result of a function, as a condition of the recording."""
        result = function(*_true(arguments))
        self._note(Expression(function, _expressions(arguments)), result)
        return result

    def fixed(self, number: Number) -> Any:
        """The value of a stand-in, which the recording rests on from now on."""
        self._note(number.expression, number.true)
        return number.true

    def shown(self, number: Number) -> Any:
        """The value of a stand-in that is made text. A clock's decides nothing, unless the text is kept."""
        if not number.expression.is_of_clock:
            return self.fixed(number)
        self._shown.append((number.expression, number.true))
        return number.true

    def keep_texts(self) -> None:
        """Note that a text is left somewhere: the recording rests on the clocks that it may have been made of."""
        self.conditions += self._shown
        self._shown.clear()

    def _note(self, expression: Expression, value: Any) -> None:
        if self.is_heard():
            self.conditions.append((expression, value))

    def expression_of(self, item: Any) -> Expression | None:
        """The expression by which a stand-in, or a tensor in such a place, follows from Python values; None for
        anything else."""
        return item.expression if isinstance(item, Number) else self.tensors.get(id(item))

    def use(self, expression: Expression) -> int:
        """The number of an expression in the program."""
        for position, known in enumerate(self.used):
            if known is expression:
                return position
        self.used.append(expression)
        return len(self.used) - 1

    def plain(self, arguments: Any, *, fix: bool = False) -> Any:
        """Arguments with values in place of stand-ins, on which with ``fix`` the recording rests from now on."""
        if not self.places or not any(isinstance(leaf, Number) for leaf in pytree.tree_leaves(arguments)):
            return arguments
        return pytree.tree_map_only(Number, self.fixed if fix else operator.attrgetter("true"), arguments)


def _true(arguments: Sequence[Any]) -> list[Any]:
    return [a.true if isinstance(a, Number) else a for a in arguments]


def _expressions(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(a.expression if isinstance(a, Number) else a for a in arguments)


def _look_of(value: Any) -> Any:
    """The properties of a tensor from outside that a recording rests on; the type of any other value."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad


@contextmanager
def _patched_math(tape: Tape) -> Iterator[None]:
    """A context in which functions of ``math`` note their results from stand-ins, where they are called as
    ``math.exp``."""
    known: Mapping[str, Any] = {name: f for name, f in vars(math).items() if callable(f) and not name.startswith("_")}

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            return tape.apply(function, given) if any(isinstance(a, Number) for a in given) else function(*given)

        return called

    changed = [(vars(math), name, f) for name, f in known.items()] if tape.places else []
    try:
        for table, name, function in changed:
            table[name] = noted(function)
        yield
    finally:
        for table, name, function in changed:
            table[name] = function
