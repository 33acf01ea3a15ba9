"""Disjoint sets of members that are merged step by step (union–find, with the larger set's representative kept)."""

from collections.abc import Iterator
from typing import Generic, TypeVar

Member = TypeVar("Member")


class DisjointSets(Generic[Member]):
    """Members in the order in which they were added, each in one set. (SciPy's class of this kind takes longer to load
    than all of this package.)"""

    def __init__(self) -> None:
        self._parents: dict[Member, Member] = {}
        self._sizes: dict[Member, int] = {}
        """The number of members of the set of each representative."""

    def add(self, member: Member) -> None:
        """Add a member as a set of its own; nothing changes where it is there already."""
        if member not in self._parents:
            self._parents[member] = member
            self._sizes[member] = 1

    def __getitem__(self, member: Member) -> Member:
        """The representative of a member's set. Raises KeyError for what was never added."""
        parents = self._parents
        while (parent := parents[member]) != member:
            parents[member] = parents[parent]
            member = parent
        return member

    def merge(self, one: Member, other: Member) -> None:
        """Join the sets of two members."""
        larger, smaller = self[one], self[other]
        if larger == smaller:
            return
        if self._sizes[larger] < self._sizes[smaller]:
            larger, smaller = smaller, larger
        self._parents[smaller] = larger
        self._sizes[larger] += self._sizes.pop(smaller)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._parents)

    def __len__(self) -> int:
        """The number of sets."""
        return len(self._sizes)
