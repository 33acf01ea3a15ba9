"""A small read-only mapping, which a frozen value can hold and still be hashed, compared and pickled."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

V_co = TypeVar("V_co", covariant=True)


class Table(Mapping[str, V_co]):
    """A mapping from names to values that keeps its order and cannot change."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V_co] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> V_co:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)
