"""Dims that are made of blocks, each of which a mesh axis splits by itself (a fused q|k|v projection).

A PartitionSpec cuts a dim as one piece, so such a dim is *held* in another order: first every block's first shard,
then every block's second, and so on. A plain cut of that is a shard of every block, and taking a block out of it moves
nothing between devices. Entrywise ops, sums and products are the same in either order.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp

Blocks = tuple[int, ...]
Tags = Mapping[int, Blocks]
"""The dims of an array that are held by blocks."""


def divided(x: Any, dim: int, ways: int) -> Any:
    """An array with ``dim`` as two dims, [ways, …]."""
    return x.reshape(*x.shape[:dim], ways, x.shape[dim] // ways, *x.shape[dim + 1 :])


def to_held(x: Any, dim: int, blocks: Blocks, ways: int) -> Any:
    """An array with ``dim`` brought from its original order to the held one, for an axis of ``ways`` ranks."""
    lead, tail = x.shape[:dim], x.shape[dim + 1 :]
    if len(set(blocks)) == 1:
        split = x.reshape(*lead, len(blocks), ways, blocks[0] // ways, *tail)
        return jnp.moveaxis(split, dim, dim + 1).reshape(x.shape)
    pieces = [
        divided(jax.lax.slice_in_dim(x, start, end, axis=dim), dim, ways)
        for start, end in pairwise(accumulate(blocks, initial=0))
    ]
    return jnp.concatenate(pieces, axis=dim + 1).reshape(x.shape)


def to_original(x: Any, dim: int, blocks: Blocks, ways: int) -> Any:
    """An array with ``dim`` brought back from the held order: the counterpart of `to_held`."""
    lead, tail = x.shape[:dim], x.shape[dim + 1 :]
    if len(set(blocks)) == 1:
        split = x.reshape(*lead, ways, len(blocks), blocks[0] // ways, *tail)
        return jnp.moveaxis(split, dim, dim + 1).reshape(x.shape)
    pieces = [slice_held(x, dim, ways, start, end) for start, end in pairwise(accumulate(blocks, initial=0))]
    return jnp.concatenate(pieces, axis=dim)


def hold(x: Any, tags: Tags, ways: int) -> Any:
    """An array with every tagged dim in held order (`to_held`)."""
    for dim, blocks in tags.items():
        x = to_held(x, dim, blocks, ways)
    return x


def restore(x: Any, tags: Tags, ways: int) -> Any:
    """An array with every tagged dim in its original order (`to_original`)."""
    for dim, blocks in tags.items():
        x = to_original(x, dim, blocks, ways)
    return x


def slice_held(x: Any, dim: int, ways: int, start: int, end: int) -> Any:
    """The blocks of a held dim from ``start`` to ``end`` of the original: one is a plain dim, several a held one."""
    piece = jax.lax.slice_in_dim(divided(x, dim, ways), start // ways, end // ways, axis=dim + 1)
    return piece.reshape(*x.shape[:dim], end - start, *x.shape[dim + 1 :])


def concatenate_held(pieces: Sequence[Any], dim: int, ways: int) -> Any:
    """The held dim whose blocks are those of the pieces, one after the other."""
    joined = jnp.concatenate([divided(piece, dim, ways) for piece in pieces], axis=dim + 1)
    return joined.reshape(*pieces[0].shape[:dim], -1, *pieces[0].shape[dim + 1 :])


def blocks_between(blocks: Blocks, start: int, end: int) -> Blocks | None:
    """The blocks inside a part of a dim, () for one; None when the part cuts a block."""
    borders = list(accumulate(blocks, initial=0))
    if start not in borders or end not in borders:
        return None
    inside = tuple(b - a for a, b in pairwise(borders) if start <= a and b <= end)
    return inside if len(inside) > 1 else ()


def reshape_held(x: Any, tags: Tags, shape: Sequence[int], wanted: Tags, ways: int) -> tuple[Any, Tags]:
    """A reshape of an array whose ``tags`` dims are held, and the dims of the result that are.

    A held dim moves nothing when it stays, comes apart outside its blocks' shards, or has its blocks become a dim of
    their own. Any other reshape goes through the original order. ``wanted``: the blocks by which a dim that merges from
    several should be held."""
    groups = list(_groups(x.shape, tuple(shape)))
    after: dict[int, Blocks] = {}
    for dim, blocks in tags.items():
        found = next(((a, b) for a, b in groups if dim in a), None)
        kept = _kept(dim, blocks, found, x.shape, shape, ways)
        if kept is not None:
            after[kept[0]] = kept[1]
            continue
        part = _inner(blocks, found, shape, ways) if found is not None and found[0] == [dim] else None
        if found is None or part is None or len(tags) > 1:
            return restore(x, tags, ways).reshape(shape), {}
        # [ways, blocks, …] of the merged dim → the piece's dim
        at = part - found[1][0]
        local = [shape[d] // ways if d == part else shape[d] for d in found[1]]
        apart = x.reshape(*x.shape[:dim], ways, *local, *x.shape[dim + 1 :])
        return jnp.moveaxis(apart, dim, dim + at).reshape(shape), {}
    for dim, blocks in wanted.items():
        if dim in after or tags:
            continue
        found = next(((a, b) for a, b in groups if dim in b), None)
        part = _inner(blocks, (found[1], found[0]), x.shape, ways) if found and found[1] == [dim] else None
        if part is None:
            return hold(x.reshape(shape), wanted, ways), dict(wanted)
        first = found[0][0] if found else 0
        return jnp.moveaxis(divided(x, part, ways), part, first).reshape(shape), {dim: blocks}
    return x.reshape(shape), after


def _kept(
    dim: int,
    blocks: Blocks,
    group: tuple[list[int], list[int]] | None,
    before: Sequence[int],
    after: Sequence[int],
    ways: int,
) -> tuple[int, Blocks] | None:
    """The (dim, blocks) of the result when the held order stays as it is: the dim is the outermost of its group."""
    if group is None:
        return None
    here = [d for d in group[0] if before[d] != 1]
    there = [d for d in group[1] if after[d] != 1]
    if not here or not there or here[0] != dim:
        return None
    size, other = before[dim], after[there[0]]
    scaled = tuple(b * other // size for b in blocks)
    if any(b * other % size or s % ways for b, s in zip(blocks, scaled, strict=True)):
        return None
    return there[0], scaled


def _inner(blocks: Blocks, group: tuple[list[int], list[int]], shape: Sequence[int], ways: int) -> int | None:
    """The dim that is split once a dim of equal blocks comes apart: the one right behind the blocks."""
    if len(set(blocks)) != 1:
        return None
    outer = 1
    for dim in group[1]:
        if outer == len(blocks) and shape[dim] != 1:
            return dim if shape[dim] % ways == 0 else None
        outer *= shape[dim]
    return None


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The runs of dims of one shape that are runs of the other."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        a, b = [i], [j]
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                if i == len(before):
                    return found
                left *= before[i]
                a.append(i)
                i += 1
            else:
                if j == len(after):
                    return found
                right *= after[j]
                b.append(j)
                j += 1
        found.append((a, b))
    return found
