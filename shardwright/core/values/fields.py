"""Fields that users give, checked by their annotations: numbers in a range, one of some words, yes or no.

The annotations of a class say what each field may be (`Count`, a Literal, `Words`), and with `Option` what it means to
who asks for it. The check, the arguments of `plan()`, the command line's options and the plan file follow from these.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le, Predicate

from shardwright.core.errors import ShardwrightError, nearest
from shardwright.core.values.text_files import printable

MOST = 1 << 40
"""The most of any size asked for: more samples or ranks than there are, and small enough for sums of 64 bits."""


def _is_printable(text: str) -> bool:
    printable(text)
    return True


Count = Annotated[int, Ge(1), Le(MOST)]
Amount = Annotated[int, Ge(0), Le(1 << 62)]
Seconds = Annotated[float, Ge(0), Le(1e12)]
Rate = Annotated[float, Ge(1e-30), Le(1e30)]
Share = Annotated[float, Ge(0), Le(1)]
Text = Annotated[str, Predicate(_is_printable)]
"""The type of names and sentences, which must be printable because they reach terminals."""


@dataclass(frozen=True, slots=True)
class Words:
    """A restriction of a field to some words, which are looked up when they are needed.

    Attributes:
        is_one: whether another text is one too, and ``form`` what such texts look like.
    """

    known: Callable[[], Collection[str]]
    is_one: Callable[[str], bool] | None = None
    form: str = ""

    def admits(self, text: str) -> bool:
        """Whether a text is one of the words, or as good as one."""
        return text in self.known() or (self.is_one is not None and self.is_one(text))

    @property
    def shown(self) -> list[str]:
        """The words, and the form of what is as good, as messages name them."""
        return [*self.known(), *([self.form] if self.form else [])]


@dataclass(frozen=True, slots=True)
class Choices:
    """A restriction of a field to some whole numbers."""

    known: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Option:
    """A field that can be asked for.

    Attributes:
        means: a sentence that completes the field's name, for the documentation of `plan()` and of the command line.
        without: the effect of None.
    """

    means: str
    without: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a class, read from its annotation."""

    name: str
    kind: type | None
    """The type of its values: int, float, bool, str, tuple (of whole numbers). None: it has values of its own, which
    its class checks."""
    least: float = 0
    most: float = MOST
    choices: tuple[int, ...] = ()
    words: Words | None = None
    """The words that the field may be, beside whole numbers or alone."""
    optional: bool = False
    option: Option | None = None

    def require(self, value: object, error: type[ShardwrightError]) -> None:
        """Raise ``error`` unless the field may have this value."""
        if self.kind is None or (value is None and self.optional):
            return
        known = [] if self.words is None else self.words.shown
        if isinstance(value, str) and self.words is not None and self.words.admits(value):
            return
        beside = ", or None" if self.optional else ""
        if self.kind is tuple:
            self._require_numbers(value, error)
        elif self.kind is float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not self.least <= value <= self.most:  # type: ignore[operator]  # not of NaN either
                raise error(f"{self.name}={value!r}: expected a number from {self.least:g} to {self.most:g}{beside}")
        elif self.kind is bool:
            if not isinstance(value, bool):
                raise error(f"{self.name}={value!r}: expected True or False{beside}")
        elif self.kind is str or (known and isinstance(value, str)):
            more = ", or a number" if self.kind is int else ""
            raise error(f"{self.name}={value!r}: {nearest(str(value), known)}{more}{beside}")
        elif self.choices:
            if type(value) is not int or value not in self.choices:
                *all_but_last, last = map(str, self.choices)
                raise error(f"{self.name}={value!r}: expected {', '.join(all_but_last)} or {last}{beside}")
        elif type(value) is not int or value < self.least:
            words = f", {' or '.join(map(repr, known))}" if known else ""
            raise error(f"{self.name}={value!r}: expected a whole number of at least {self.least}{words}{beside}")
        elif value > self.most:
            raise error(f"{self.name}={value}: expected at most {self.most}")

    def _require_numbers(self, value: object, error: type[ShardwrightError]) -> None:
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise error(f"{self.name}={value!r}: expected a list of whole numbers, as [0, 5, 9]")
        numbers = list(value)
        for number in numbers:
            if type(number) is not int or not self.least <= number <= self.most:
                raise error(f"{self.name}={numbers}: expected whole numbers of at least {self.least}; given {number!r}")


@lru_cache(maxsize=64)
def fields_of(cls: type) -> tuple[Field, ...]:
    """The fields of a class in their order, as its annotations describe them."""
    return tuple(_field(name, hint) for name, hint in get_type_hints(cls, include_extras=True).items())


def require_fields(value: Any, error: type[ShardwrightError]) -> None:
    """Raise ``error`` for the first field of a dataclass whose value is none that it may have."""
    for field in fields_of(value.__class__):
        field.require(getattr(value, field.name), error)


def _field(name: str, hint: Any) -> Field:
    kinds: set[type] = set()
    found: dict[str, Any] = {}
    words: list[str] = []
    _read(hint, kinds, found, words)
    found["optional"] = NoneType in kinds
    kinds.discard(NoneType)
    if words:
        beside: Words = found.get("words", Words(tuple))
        found["words"] = replace(beside, known=lambda: (*beside.known(), *words))
    if kinds == {float}:
        return Field(name, float, **found)
    if not kinds <= {int, bool, str, tuple} or not kinds or (str in kinds and "words" not in found):
        return Field(name, None, optional=found["optional"], option=found.get("option"))
    kind = next(kind for kind in (tuple, bool, int, str) if kind in kinds)
    return Field(name, kind, **found)


def _read(hint: Any, kinds: set[type], found: dict[str, Any], words: list[str]) -> None:
    """Collect the facts that one annotation gives: the kinds of its values, their range, words and option."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *metadata = get_args(hint)
        _read(inner, kinds, found, words)
        for said in metadata:
            match said:
                case Ge():
                    found["least"] = said.ge
                case Le():
                    found["most"] = said.le
                case Words():
                    found["words"] = said
                case Choices():
                    found["choices"] = said.known
                case Option():
                    found["option"] = said
    elif origin in (Union, UnionType):
        for each in get_args(hint):
            _read(each, kinds, found, words)
    elif origin is Literal:
        kinds.add(str)
        words += get_args(hint)
    elif origin in (tuple, Sequence) and _is_whole(get_args(hint)[0], found):
        kinds.add(tuple)
    else:
        kinds.add(hint if isinstance(hint, type) else object)


def _is_whole(hint: Any, found: dict[str, Any]) -> bool:
    """Whether the entries of a tuple are whole numbers; their range is that of the field."""
    kinds: set[type] = set()
    _read(hint, kinds, found, [])
    return kinds == {int}
