"""Placements and layouts: the distribution of one logical tensor over the axes of a mesh.

The vocabulary is OneFlow's split / broadcast / partial-value (arXiv 2110.15032, section 3), which is DTensor's
Shard / Replicate / Partial and, without the partial values, JAX's PartitionSpec.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast, get_args

from shardwright.core.errors import LayoutError
from shardwright.core.layout.mesh import Mesh

Reduction = Literal["sum", "max", "min", "mean"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """A placement by which every rank along the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Split:
    """A placement by which every rank along the axis holds an equal shard of dimension ``dim``.

    ``blocks`` gives the sizes of the parts that the dimension is made of (a fused q|k|v matrix of three parts). Each
    part is then split by itself, and a rank holds its shard of every part.
    """

    dim: int
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.dim) is not int or self.dim < 0:
            raise LayoutError(f"Split counts dims from 0: given dim {self.dim!r}")
        if not isinstance(self.blocks, tuple) or any(type(size) is not int for size in self.blocks):
            raise LayoutError(f"blocks are a tuple of whole numbers: given {self.blocks!r}")
        if self.blocks and (len(self.blocks) < 2 or min(self.blocks) < 1):
            raise LayoutError(f"blocks are the sizes of two or more parts: given {self.blocks}")

    def __str__(self) -> str:
        return f"S{self.dim}" + (f"[{'|'.join(map(str, self.blocks))}]" if self.blocks else "")


@dataclass(frozen=True, slots=True)
class Partial:
    """A placement by which every rank along the axis holds a term; the tensor is their reduction by ``op``."""

    op: Reduction = "sum"

    def __post_init__(self) -> None:
        if not isinstance(self.op, str) or self.op not in get_args(Reduction):
            raise LayoutError(f"Partial reduces by one of {get_args(Reduction)}: given {self.op!r}")

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Placement = Split | Replicate | Partial

_PLACEMENT = re.compile(
    r"R|S(?P<dim>\d{1,3})(?:\[(?P<blocks>\d{1,18}(?:\|\d{1,18})+)\])?|P(?:\((?P<op>\w+)\))?", re.ASCII
)


@lru_cache(maxsize=4096)
def placement_of(text: str) -> Placement:
    """The placement that a text stands for: ``R``, ``S0``, ``S1[64|64|64]``, ``P``, ``P(max)``.

    Raises LayoutError for any other text.
    """
    found = _PLACEMENT.fullmatch(text)
    if found is None:
        raise LayoutError(f"{text!r} is no placement: expected R, a split as S0 or S1[64|64], or P")
    if text == "R":
        return Replicate()
    if found["dim"] is not None:
        return Split(int(found["dim"]), tuple(map(int, found["blocks"].split("|"))) if found["blocks"] else ())
    return Partial(cast(Reduction, found["op"] or "sum"))


@dataclass(frozen=True, slots=True)
class Layout:
    """A placement for every axis of a mesh; axes that are not named replicate.

    Replicated axes are dropped and the rest kept in order of name, so that equal layouts compare equal.
    """

    placements: tuple[tuple[str, Placement], ...] = ()

    def __post_init__(self) -> None:
        for item in self.placements if isinstance(self.placements, tuple) else (self.placements,):
            axis, placement = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
            if not isinstance(axis, str) or not isinstance(placement, Split | Replicate | Partial):
                raise LayoutError(
                    f"a layout gives axes of the mesh a Split, a Replicate or a Partial, as Layout.of(tp=Split(0)): "
                    f"given {item!r}"
                )
        names = [axis for axis, _ in self.placements]
        if len(set(names)) != len(names):
            raise LayoutError(f"a layout gives each axis one placement: given {self.placements}")
        kept = sorted(((a, p) for a, p in self.placements if not isinstance(p, Replicate)), key=lambda item: item[0])
        object.__setattr__(self, "placements", tuple(kept))

    @classmethod
    def of(cls, placements: Mapping[str, Placement] | None = None, /, **named: Placement) -> "Layout":
        """A layout from its placements, as ``Layout.of(tp=Split(0))``, or from a mapping of axis to placement."""
        return cls(tuple({**(placements or {}), **named}.items()))

    def on(self, axis: str) -> Placement:
        """The placement along ``axis``."""
        return dict(self.placements).get(axis, Replicate())

    @property
    def is_replicated(self) -> bool:
        return not self.placements

    def check(self, shape: tuple[int, ...], mesh: Mesh) -> None:
        """Raise LayoutError unless a tensor of ``shape`` can lie like this, in equal shards, on ``mesh``."""
        if not isinstance(shape, tuple) or any(type(size) is not int for size in shape):
            raise LayoutError(f"a shape is a tuple of whole numbers: given {shape!r}")
        ways = [1] * len(shape)
        for axis, placement in self.placements:
            size = mesh.axis_size(axis)
            if not isinstance(placement, Split):
                continue
            if placement.dim >= len(shape):
                raise LayoutError(f"{placement} on axis {axis!r} names a dim that shape {shape} does not have")
            if placement.blocks and sum(placement.blocks) != shape[placement.dim]:
                raise LayoutError(
                    f"the blocks of {placement} add up to {sum(placement.blocks)}, not to dim "
                    f"{placement.dim} of shape {shape}"
                )
            ways[placement.dim] *= size
            for part in placement.blocks or (shape[placement.dim],):
                if part % ways[placement.dim]:
                    raise LayoutError(
                        f"dim {placement.dim} of shape {shape} holds {part}, which axis {axis!r} of size "
                        f"{size} does not divide: use a size that divides {part}, or replicate"
                    )

    def local_shape(self, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """The shape of one rank's shard. Raises LayoutError as `check` does."""
        self.check(shape, mesh)
        local = list(shape)
        for axis, placement in self.placements:
            if isinstance(placement, Split):
                local[placement.dim] //= mesh.axis_size(axis)
        return tuple(local)

    def pieces(self, mesh: Mesh) -> int:
        """The number of different shards of the tensor."""
        return math.prod(mesh.axis_size(axis) for axis, p in self.placements if isinstance(p, Split))

    def __str__(self) -> str:
        return ", ".join(f"{axis}: {placement}" for axis, placement in self.placements) or "R"
