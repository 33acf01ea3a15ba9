"""Places where Python keeps values: attributes, entries, cells, defaults of functions.

A place is read again at every step, so reading and comparing must be quick: all values of one holder are fetched by one
call in C and compared by identity, and only where that fails one by one.
"""

import enum
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

PLAIN = (
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum, np.generic,
)  # fmt: skip
"""Values that nobody can change, compared by what they are."""
MISSING = object()


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The dict of an object's own attributes; None where it has none. The object is not asked, as it may answer by code
    of its own: a stand-in for a package that is not installed raises an error at every name."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:
        return None
    return found if isinstance(found, dict) else None


class Holder:
    """An object that keeps values under keys.

    Attributes:
        target: the object that is read: a dict, a list, a cell, an object.
        label: for messages, such as ``model.config``.
        before: key → value, when it was first looked at.
    """

    __slots__ = ("before", "label", "target")

    def __init__(self, target: Any, label: str) -> None:
        self.target, self.label = target, label
        self.before: dict[Any, Any] = self.read()

    def read(self) -> dict[Any, Any]:
        """All values now, by key."""
        raise NotImplementedError

    def put(self, key: Any, value: Any) -> None:
        """Set one value. Raises an error where it cannot be set."""
        raise NotImplementedError

    def fetcher(self, keys: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        """A quick way to read some values. It raises LookupError, AttributeError or ValueError when one is gone."""
        raise NotImplementedError

    def place(self, key: Any) -> str:
        """A value of this holder in words; that of its one value is its label."""
        return self.label if key is None else f"{self.label}[{key!r}]"

    def value(self, key: Any) -> Any:
        """One value now; MISSING where there is none."""
        return self.read().get(key, MISSING)


class Entries(Holder):
    """Entries of a dict. With ``attributes`` it is the dict of an object, a module or a class, whose label names
    that."""

    __slots__ = ("attributes",)

    def __init__(self, target: Mapping[Any, Any], label: str, *, attributes: bool) -> None:
        self.attributes = attributes
        super().__init__(target, label)

    def read(self) -> dict[Any, Any]:
        # What lies in it: a subclass may make a new object of each entry that it is asked for.
        return dict(dict.items(self.target) if isinstance(self.target, dict) else self.target)

    def value(self, key: Any) -> Any:
        return dict.get(self.target, key, MISSING) if isinstance(self.target, dict) else self.target.get(key, MISSING)

    def put(self, key: Any, value: Any) -> None:
        if value is MISSING:
            self.target.pop(key, None)
        else:
            self.target[key] = value

    def fetcher(self, keys: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        target = self.target
        if isinstance(target, dict) and type(target) is not dict:
            return lambda: tuple([dict.__getitem__(target, key) for key in keys])
        get = operator.itemgetter(*keys, keys[0])
        return lambda: get(target)

    def place(self, key: Any) -> str:
        if not self.attributes:
            return f"{self.label}[{key!r}]"
        return f"{self.label}.{key}" if self.label else f"the global {key}"


class Items(Holder):
    """Items of a list, a tuple or a deque, by position."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return dict(enumerate(self.target))

    def put(self, key: Any, value: Any) -> None:
        if value is MISSING:
            del self.target[key:]
        elif key == len(self.target):
            self.target.append(value)
        else:
            self.target[key] = value

    def fetcher(self, keys: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        target = self.target
        if keys == tuple(range(len(self.before))):
            return lambda: tuple(target)
        return lambda: tuple([target[key] for key in keys])


class Members(Holder):
    """Members of a set, as one value under the key None."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {None: frozenset(self.target)}

    def put(self, key: Any, value: Any) -> None:
        self.target.clear()
        self.target.update(value)

    def fetcher(self, keys: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        target = self.target
        return lambda: (frozenset(target),)


class Attributes(Holder):
    """Attributes that are in no dict: those of ``__slots__``, and the defaults and the code of functions."""

    __slots__ = ("names",)

    def __init__(self, target: Any, label: str, names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(target, label)

    def read(self) -> dict[Any, Any]:
        found = {}
        for name in self.names:
            with suppress(AttributeError, ValueError):  # a slot, or a cell, that holds nothing
                found[name] = object.__getattribute__(self.target, name)
        return found

    def put(self, key: Any, value: Any) -> None:
        if value is MISSING:
            object.__delattr__(self.target, key)
        else:
            object.__setattr__(self.target, key, value)

    def fetcher(self, keys: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        get, target = operator.attrgetter(*keys, keys[0]), self.target
        return lambda: get(target)

    def place(self, key: Any) -> str:
        return f"{self.label}.{key}"


class Cell(Attributes):
    """A variable of a surrounding function, the one attribute of its cell."""

    __slots__ = ()

    def __init__(self, target: types.CellType, label: str) -> None:
        super().__init__(target, label, ("cell_contents",))

    @property
    def content(self) -> Any:
        """The value when it was first looked at; MISSING where there was none."""
        return self.before.get("cell_contents", MISSING)

    def place(self, key: Any) -> str:
        return self.label


class Asked(Holder):
    """The results of functions without arguments, by their names: settings of torch, a context variable."""

    __slots__ = ("functions",)

    def __init__(self, functions: Mapping[str, Callable[[], Any]], label: str) -> None:
        self.functions = dict(functions)
        super().__init__(None, label)

    def read(self) -> dict[Any, Any]:
        return {name: function() for name, function in self.functions.items()}

    def put(self, key: Any, value: Any) -> None:
        raise TypeError(f"{self.place(key)} is not set from here")

    def fetcher(self, keys: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        functions = [self.functions[key] for key in keys]
        return lambda: tuple([function() for function in functions])

    def place(self, key: Any) -> str:
        return str(key)


class Clock(Holder):
    """A function that gives another number each time, under the number of the call."""

    __slots__ = ()

    def __init__(self, target: Callable[[], Any]) -> None:
        super().__init__(target, f"time.{target.__name__}()")

    def read(self) -> dict[Any, Any]:
        return {}

    def value(self, key: Any) -> Any:
        return self.target()

    def place(self, key: Any) -> str:
        return self.label


def same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or plain values that do not differ."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (np.ndarray, Array)):
        return _content(one) == _content(other)
    if isinstance(one, types.MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    if isinstance(one, tuple) and not isinstance(one, PLAIN):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, frozenset):
        return bool(one == other)
    if not isinstance(one, PLAIN):
        return False
    return bool(one == other) or (one != one and other != other)


@dataclass(frozen=True, slots=True)
class Array:
    """The content of an array at a moment: the array may be written to."""

    content: tuple[Any, ...]


def _content(array: Any) -> tuple[Any, ...]:
    if isinstance(array, Array):
        return array.content
    return array.shape, array.dtype.str, array.tobytes()


def remembered(value: Any) -> Any:
    """A value as it is kept to be compared with later ones."""
    return Array(_content(value)) if isinstance(value, np.ndarray) else value


@dataclass(slots=True)
class Guarded:
    """The values of one holder that a recording rests on."""

    holder: Holder
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    absent: frozenset[Any] = frozenset()
    """The keys under which there was nothing, and where something would be found first now."""
    size: int | None = None
    """The number of items, for a list or a dict."""
    _fetch: Callable[[], tuple[Any, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._fetch = self.holder.fetcher(self.keys) if self.keys else tuple

    def holds(self) -> bool:
        """Whether all values are as they were."""
        try:
            now = self._fetch()
        except (LookupError, AttributeError, ValueError, TypeError):
            return False
        target = self.holder.target
        if self.size is not None and len(target) != self.size:
            return False
        if self.absent and not self.absent.isdisjoint(target):
            return False
        if all(map(operator.is_, now, self.values)):
            return True
        values = self.values
        if not all(map(same_or_array, now, values)):
            return False
        self.values = tuple(
            [old if isinstance(old, Array) else new for new, old in zip(now, values, strict=False)]
        )  # equal values are quicker to find alike when they are the same objects
        return True

    def changed(self) -> list[Any]:
        """The keys under which there is another value now."""
        now = self.holder.read()
        found = [
            key
            for key, value in zip(self.keys, self.values, strict=False)
            if key not in now or not same_or_array(now[key], value)
        ]
        found += [key for key in self.absent if key in now]
        if self.size is not None and len(now) != self.size:
            found += [key for key in now if key not in self.holder.before] or [None]
        return found


def same_or_array(now: Any, kept: Any) -> bool:
    """Whether a value is the one that `remembered` kept."""
    if isinstance(kept, Array):
        return isinstance(now, np.ndarray) and _content(now) == kept.content
    return same(now, kept)
