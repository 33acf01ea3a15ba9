"""Attention masks of transformers' releases 4, made of indices that broadcast, as releases 5 make them.

Releases 4 map the function of a mask over every index by ``torch.vmap``, between the blocks of a model. No step in
which that happens can be recorded, so that it would run by messages, without sharded state.
"""

from collections.abc import Callable
from typing import Any

import torch

MaskFunction = Callable[[Any, Any, Any, Any], torch.Tensor]
"""Whether a position attends to another, by the indices of sample, head, query and key."""
_MAPS = "_vmap_for_bhqkv"
"""The function of ``transformers.masking_utils`` that maps it, in releases 4."""


def install() -> None:
    """Let transformers make masks of indices that broadcast, where it maps functions over every index."""
    from transformers import masking_utils

    if hasattr(masking_utils, _MAPS):
        setattr(masking_utils, _MAPS, over_all_indices)


def over_all_indices(mask_function: MaskFunction, bh_indices: bool = True) -> MaskFunction:
    """A function of vectors of indices, whose result has a dim for each of them. ``bh_indices``: whether there are
    vectors for samples and heads; else its first two arguments are handed on as they are."""

    def masked(sample: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        sizes = [len(query), len(key)]
        if bh_indices:
            sizes = [len(sample), len(head), *sizes]
            sample, head = sample[:, None, None, None], head[None, :, None, None]
        return mask_function(sample, head, query[:, None], key[None, :]).expand(sizes)

    return masked
