"""Which entries of a logical tensor each rank holds under a layout, equal pieces or not.

A dim that does not divide is cut as `torch.chunk` and DTensor cut it: pieces of ⌈n / ranks⌉ entries, the last ones
smaller or empty. Axes that split one dim cut it in the order of the mesh, the outermost first.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import LayoutError
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout, Partial, Split

Places = tuple[NDArray[np.int64], ...]
"""For every dim the indices that a rank holds, in the order in which it holds them."""


def check_names(shape: Sequence[int], layout: Layout, mesh: Mesh) -> None:
    """Raise LayoutError or ClusterError for an axis that the mesh lacks, a dim that the tensor lacks, blocks that do
    not add up, axes that cut one dim by different blocks, or partial values that do not commute."""
    blocks: dict[int, tuple[int, ...]] = {}
    for axis, placement in layout.placements:
        mesh.axis_size(axis)
        if not isinstance(placement, Split):
            continue
        if placement.dim >= len(shape):
            raise LayoutError(f"{placement} on axis {axis!r} names a dim that shape {tuple(shape)} does not have")
        if placement.blocks and sum(placement.blocks) != shape[placement.dim]:
            raise LayoutError(
                f"the blocks of {placement} add up to {sum(placement.blocks)}, not to the {shape[placement.dim]} "
                f"entries of dim {placement.dim} of shape {tuple(shape)}"
            )
        if blocks.setdefault(placement.dim, placement.blocks) != placement.blocks:
            raise LayoutError(f"{layout} cuts dim {placement.dim} by different blocks: use the same on every axis")
    reductions = {p.op for _, p in layout.placements if isinstance(p, Partial)}
    if len(reductions) > 1 and not reductions <= {"sum", "mean"}:
        raise LayoutError(f"{layout} mixes reductions whose order matters: reduce one of them first")


def held(shape: Sequence[int], layout: Layout, mesh: Mesh, rank: int) -> Places:
    """The entries that ``rank`` holds; of a partial value, those that it holds a term of."""
    coordinates = mesh.coordinates(rank)
    parts: list[list[NDArray[np.int64]]] = [[np.arange(size, dtype=np.int64)] for size in shape]
    for axis in mesh.names:
        placement = layout.on(axis)
        if not isinstance(placement, Split):
            continue
        dim = placement.dim
        if placement.blocks and len(parts[dim]) == 1:
            parts[dim] = list(np.split(parts[dim][0], np.cumsum(placement.blocks)[:-1]))
        parts[dim] = [_chunk(part, mesh.axis_size(axis), coordinates[axis]) for part in parts[dim]]
    return tuple(np.concatenate(of_dim) for of_dim in parts)


def _chunk(part: NDArray[np.int64], ranks: int, which: int) -> NDArray[np.int64]:
    size = -(-len(part) // ranks)
    return part[which * size : (which + 1) * size]


def entries(places: Places) -> int:
    """How many entries a piece has."""
    return int(np.prod([len(of_dim) for of_dim in places], dtype=np.int64))


def common(first: Places, second: Places) -> int:
    """How many entries two pieces share."""
    shared = 1
    for a, b in zip(first, second, strict=True):
        shared *= len(np.intersect1d(a, b, assume_unique=True))
    return shared
