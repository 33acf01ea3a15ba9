"""The Python values that modules hold as attributes, as the forward of a unit finds them: a counter, a list of what was
seen. A unit whose forward runs again finds what it found at first, and what it writes then is forgotten.

Values are numbers, strings, tensors and other things by reference, and lists, dictionaries, sets and queues by their
items. A tensor that is written in place is refused, as only buffers are copied. What is inside of other objects, and
what is printed or sent elsewhere, is not known here.
"""

import copy
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import MissingCapabilityError

Place = tuple[str, str]
"""The path of a module within the unit, and the name of its attribute."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, deque)
_MISSING = object()


class Attributes:
    """The attributes of a module and of those in it at one time.

    Args:
        places: the attributes that are meant; None: all.
    """

    def __init__(self, module: nn.Module, places: Collection[Place] | None = None) -> None:
        self._module = module
        found = _attributes(module) if places is None else ((place, _value(module, place)) for place in places)
        self._values = dict(found)
        self._versions = {p: v._version for p, v in self._values.items() if isinstance(v, torch.Tensor)}
        self._items = {p: copy.copy(value) for p, value in self._values.items() if isinstance(value, _CONTAINERS)}

    @property
    def places(self) -> tuple[Place, ...]:
        """The attributes."""
        return tuple(self._values)

    def keep_written(self) -> None:
        """Remember those attributes alone that have other values now, or are new.

        Raises MissingCapabilityError for a tensor that was written in place.
        """
        for (path, name), version in self._versions.items():
            value = self._values[path, name]
            if value._version != version:
                where = f"{path}.{name}" if path else name
                raise MissingCapabilityError(
                    f"the forward of a unit that is computed again writes in place to {where}, a tensor that is no "
                    f"buffer, so that it would be written twice: make it one, by register_buffer({name!r}, …), or plan "
                    f"again with recompute='none'"
                )
        places = self._changed()
        self._values = {place: self._values.get(place, _MISSING) for place in places}
        self._items = {place: items for place, items in self._items.items() if place in self._values}
        self._versions.clear()

    def have_changed(self) -> bool:
        """Whether some of them have other values now, are new, or are tensors that were written in place."""
        return bool(self._changed()) or any(self._values[p]._version != v for p, v in self._versions.items())

    def _changed(self) -> list[Place]:
        now = dict(_attributes(self._module))
        return [p for p in (self._values | now) if self._differs(p, now.get(p, _MISSING))]

    def _differs(self, place: Place, value: Any) -> bool:
        if value is not self._values.get(place, _MISSING):
            return True
        return place in self._items and not _same_items(self._items[place], value)

    def restore(self) -> None:
        """Give the attributes these values again."""
        for (path, name), value in self._values.items():
            held = vars(self._module.get_submodule(path))
            if value is _MISSING:
                held.pop(name, None)
                continue
            held[name] = value
            if (items := self._items.get((path, name))) is not None:
                _refill(value, items)


def _attributes(module: nn.Module) -> Iterator[tuple[Place, Any]]:
    for path, one in module.named_modules():
        for name, value in vars(one).items():
            if name not in _OF_EVERY_MODULE:
                yield (path, name), value


def _value(module: nn.Module, place: Place) -> Any:
    return vars(module.get_submodule(place[0])).get(place[1], _MISSING)


def _same_items(one: Any, other: Any) -> bool:
    if isinstance(one, set) or len(one) != len(other):
        return bool(one == other)
    if isinstance(one, dict):
        return all(key in other and value is other[key] for key, value in one.items())
    return all(a is b for a, b in zip(one, other, strict=True))


def _refill(container: Any, items: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(items)
