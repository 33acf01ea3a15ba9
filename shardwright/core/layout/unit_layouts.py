"""The layouts of a unit in full: what every op reads and makes on each axis, and the conversions between ops.

A tensor-parallel runtime carries this out. A value lies as its producer made it (or as a parameter is held, or as it
enters the unit). A link without a reader converts it once for all of its readers, a link with a reader for that one
operand. Gradients go the other way: an op's backward leaves the gradient of an operand as its link's
``gradient_before`` says; where several readers meet, the terms are added up; the link turns the sum into
``gradient_after``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.core.layout.placements import Layout, Partial, Placement, Replicate, Split
from shardwright.core.layout.signature import Signature

Places = tuple[Placement, ...]
"""One placement per axis."""


@dataclass(frozen=True, slots=True)
class Step:
    """One collective, or one local cut, along one axis."""

    axis: int
    before: Placement
    after: Placement
    others: Places
    """The placements on the other axes meanwhile (replicated at ``axis``): these axes share the tensor among them."""

    @property
    def collective(self) -> str:
        """``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all``, or "" for what is local."""
        if isinstance(self.before, Replicate) or isinstance(self.after, Partial):
            return ""
        if isinstance(self.before, Partial):
            return "all_reduce" if isinstance(self.after, Replicate) else "reduce_scatter"
        return "all_gather" if isinstance(self.after, Replicate) else "all_to_all"


def steps(before: Places, after: Places) -> Iterator[Step]:
    """The steps of a conversion, one axis after the other: splits that shrink the tensor come first, gathers last."""
    now = list(before)
    for axis in sorted(range(len(before)), key=lambda a: _rank(before[a], after[a])):
        if now[axis] != after[axis]:
            others = tuple(p if i != axis else Replicate() for i, p in enumerate(now))
            yield Step(axis, now[axis], after[axis], others)
            now[axis] = after[axis]


def _rank(before: Placement, after: Placement) -> int:
    if isinstance(before, Replicate):
        return 0
    if isinstance(after, Split):
        return 1
    return 2 if isinstance(before, Partial) else 3


@dataclass(frozen=True, slots=True)
class Link:
    """The conversion of a tensor from the layout in which it lies to that in which it is read."""

    tensor: int
    reader: int | None
    """The op (its index in the graph) that reads it; None: all of its readers, or the units that come after."""
    position: int
    """The position of the operand among those of the reader."""
    before: Places
    after: Places
    gradient_before: Places
    gradient_after: Places
    """The placements of the gradient as it is made and as it is wanted; both () where no gradient comes back."""
    flows: bool
    """Whether a gradient comes back."""
    is_parameter: bool = False
    """Whether the tensor is a parameter, which is split where it lies and whose gradient is reduced once a step."""
    leaves: bool = False
    """Whether the link is for the units that come after."""

    @property
    def forward(self) -> tuple[Step, ...]:
        return tuple(steps(self.before, self.after))

    @property
    def backward(self) -> tuple[Step, ...]:
        return tuple(steps(self.gradient_before, self.gradient_after)) if self.flows else ()


@dataclass(frozen=True, slots=True)
class RealisedUnit:
    """All layouts of one unit on the given axes."""

    unit: int
    first_op: int
    axes: tuple[tuple[str, int], ...]
    """(name, number of ranks) of every axis."""
    signatures: tuple[tuple[Signature, ...], ...]
    """One signature for each axis, for every op of the unit in order."""
    links: tuple[Link, ...]
    parameters: tuple[tuple[int, Layout], ...]
    """(tensor, layout) of every parameter that the unit uses."""
    enters: tuple[tuple[int, Layout], ...] = ()
    """(tensor, layout) of every value that comes from earlier units."""
    leaves: tuple[tuple[int, Layout], ...] = ()

    def __hash__(self) -> int:
        """The hash of the little that tells most units apart: hashing every signature and link would take long."""
        return hash((self.unit, self.axes, self.parameters, self.enters, self.leaves))

    def operand(self, op: int, position: int) -> Places:
        """The placements of operand ``position`` of op ``op`` (its index in the graph; inputs, then outputs)."""
        return tuple((*s.inputs, *s.outputs)[position] for s in self.signatures[op - self.first_op])

    def ways(self, places: Places) -> int:
        """The number of shards of a tensor that lies like this."""
        cut = (size for (_, size), place in zip(self.axes, places, strict=True) if isinstance(place, Split))
        return math.prod(cut)

    def pieces(self, layout: Layout) -> int:
        """The number of shards of a tensor with this layout."""
        return self.ways(tuple(layout.on(axis) for axis, _ in self.axes))

    def layout(self, places: Sequence[Placement]) -> Layout:
        return Layout.of({name: place for (name, _), place in zip(self.axes, places, strict=True)})
