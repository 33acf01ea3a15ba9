"""Named axes laid over the ranks of a cluster."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from shardwright.core.errors import ClusterError, nearest

AXIS_OF_LETTER = {"P": "pp", "D": "dp", "T": "tp"}
"""The letters of placement orders, as SageMaker's `placement_strategy` has them."""

MOST_RANKS = 1 << 20
"""The most ranks of a mesh or a cluster: several times the largest machine that there is."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks 0 … size-1 as a grid with one named axis per direction.

    ``names[0]`` is the outermost axis; ranks that differ only on the last axis are neighbours.
    Raises ClusterError for repeated names and sizes below 1.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.names, tuple) or not isinstance(self.sizes, tuple):
            raise ClusterError(f"a mesh is a tuple of names and one of sizes: given {self.names!r} and {self.sizes!r}")
        if len(self.names) != len(self.sizes):
            raise ClusterError(f"a mesh needs one size per axis: given {self.names} and {self.sizes}")
        if any(not isinstance(name, str) for name in self.names) or len(set(self.names)) != len(self.names):
            raise ClusterError(f"the axes of a mesh have different names: given {self.names}")
        for name, size in zip(self.names, self.sizes, strict=True):
            if type(size) is not int or size < 1:
                raise ClusterError(f"axis {name!r} has size {size!r}: expected a whole number of at least 1")
        if self.size > MOST_RANKS:
            said = " × ".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))
            raise ClusterError(f"{said} are {self.size} ranks: expected at most {MOST_RANKS}")

    @classmethod
    def of(cls, **axes: int) -> "Mesh":
        """A mesh from the sizes of its axes, as ``Mesh.of(pp=2, dp=2, tp=2)``: the first axis is outermost."""
        return cls(tuple(axes), tuple(axes.values()))

    @classmethod
    def placed(cls, order: str, *, pp: int, dp: int, tp: int) -> "Mesh":
        """The mesh of a placement order, a permutation of D, P and T. Ranks that differ only on the last letter are
        neighbours.

        Raises ClusterError for anything else.
        """
        if not isinstance(order, str) or sorted(order) != sorted(AXIS_OF_LETTER):
            raise ClusterError(f"placement={order!r}: expected an order of the letters D, P and T, such as PDT")
        return _placed(order, pp, dp, tp)

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def stride(self, axis: str) -> int:
        """The distance between neighbours on an axis, in ranks."""
        return math.prod(self.sizes[self._index(axis) + 1 :])

    def axis_size(self, axis: str) -> int:
        return self.sizes[self._index(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on every axis."""
        if not 0 <= rank < self.size:
            raise ClusterError(f"rank {rank} is not on a mesh of {self.size} ranks")
        found: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.names}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at the given place; axes left out count as 0."""
        for name in coordinates:
            self._index(name)
        rank = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            place = coordinates.get(name, 0)
            if not 0 <= place < size:
                raise ClusterError(f"coordinate {place} on axis {name!r} is outside 0 … {size - 1}")
            rank = rank * size + place
        return rank

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that share every coordinate with ``rank`` but those on ``axes``, in mesh order."""
        if len(axes) == 1:
            size, stride = self.axis_size(axes[0]), self.stride(axes[0])
            first = rank - self.coordinates(rank)[axes[0]] * stride
            return tuple(range(first, first + size * stride, stride))
        here = self.coordinates(rank)
        ordered = [name for name in self.names if name in {self.names[self._index(axis)] for axis in axes}]
        places = product(*(range(self.axis_size(name)) for name in ordered))
        return tuple(self.rank(here | dict(zip(ordered, place, strict=True))) for place in places)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All the groups along ``axes``: together they hold every rank exactly once."""
        return tuple(sorted({self.group(rank, *axes) for rank in range(self.size)}))

    def _index(self, axis: str) -> int:
        if axis not in self.names:
            raise ClusterError(f"the mesh has no axis {axis!r}: {nearest(axis, self.names)}")
        return self.names.index(axis)


@lru_cache(maxsize=1024)  # searches ask for every choice
def _placed(order: str, pp: int, dp: int, tp: int) -> Mesh:
    degrees = {"pp": pp, "dp": dp, "tp": tp}
    return Mesh.of(**{AXIS_OF_LETTER[letter]: degrees[AXIS_OF_LETTER[letter]] for letter in order})
