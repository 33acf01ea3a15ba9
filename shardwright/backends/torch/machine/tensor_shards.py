"""Shards of a tensor along one axis: how they are cut and put together, and their sizes, with blocks respected."""

from collections.abc import Sequence

import torch

from shardwright.core.layout.placements import Partial, Placement, Split


def local_shape(shape: Sequence[int], place: Placement, ranks: int) -> tuple[int, ...]:
    """The shape of one rank's shard; that of the whole for a value that is replicated or partial."""
    if not isinstance(place, Split):
        return tuple(shape)
    found = list(shape)
    found[place.dim] //= ranks
    return tuple(found)


def piece_of(whole: torch.Tensor, place: Split, ranks: int, rank: int) -> torch.Tensor:
    """The shard that ``rank`` holds; a view where the dim has no blocks."""
    if not place.blocks:
        return whole.chunk(ranks, place.dim)[rank]
    parts = whole.split(list(place.blocks), place.dim)
    return torch.cat([part.chunk(ranks, place.dim)[rank] for part in parts], place.dim)


def whole_of(pieces: Sequence[torch.Tensor], place: Split) -> torch.Tensor:
    """The tensor that the shards of all ranks, in order, make up."""
    if not place.blocks:
        return torch.cat(list(pieces), place.dim)
    ranks = len(pieces)
    parts = [piece.split([block // ranks for block in place.blocks], place.dim) for piece in pieces]
    return torch.cat([part for of_block in zip(*parts, strict=True) for part in of_block], place.dim)


def describe(place: Placement) -> str:
    """A placement in words for messages: ``whole``, ``split along dim 1`` …."""
    if isinstance(place, Split):
        return f"split along dim {place.dim}" + (f" in blocks {place.blocks}" if place.blocks else "")
    return "a partial sum" if isinstance(place, Partial) else "whole"
