"""Random ops on shards: a mask is drawn over the logical tensor, and every rank keeps its own shard."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.backends.torch.compat import safe_softmax
from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.machine.tensor_shards import piece_of
from shardwright.core.layout.placements import Split


def dropout(
    source: torch.Tensor,
    probability: float,
    place: Split | None,
    shape: Sequence[int],
    order: Sequence[int],
    axis: Axis,
) -> torch.Tensor:
    """Dropout of a shard (None: all) of a tensor of ``shape``, in whose memory the dims come in ``order``."""
    ones = torch.empty_permuted(list(shape), list(order), dtype=source.dtype, device=source.device).fill_(1.0)
    mask = torch.dropout(ones, probability, True)
    del ones
    return source * (mask if place is None else _own_piece(mask, place, axis))


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    probability: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    place: Split,
    shape: Sequence[int],
    axis: Axis,
) -> torch.Tensor:
    """Attention with dropout on a shard of the scores, which are of ``shape`` [batch, head, query, key] in all."""
    ones = torch.ones(list(shape), dtype=query.dtype, device=query.device)
    kept = _own_piece(torch.dropout(ones, probability, True), place, axis)
    del ones
    if is_causal:
        mask = torch.ones((query.shape[-2], key.shape[-2]), dtype=torch.bool, device=query.device).tril()
    return attention_that_keeps(query, key, value, mask, kept, scale, enable_gqa)


def attention_that_keeps(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kept: torch.Tensor,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention whose probabilities are multiplied by ``kept`` [.., query, key], a mask of dropout."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    scores = (query * root) @ (key * root).transpose(-1, -2)
    if mask is not None and mask.dtype == torch.bool:  # added, as the backward of a sum keeps nothing
        mask = torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    if mask is not None:
        scores = scores + mask
    return (safe_softmax(scores, -1) * kept) @ value


def _own_piece(whole: torch.Tensor, place: Split, axis: Axis) -> torch.Tensor:
    """This rank's shard in memory of its own: the backward keeps the shard, and not the whole."""
    return piece_of(whole, place, axis.size, axis.coordinate).clone(memory_format=torch.contiguous_format)


def piece_of_whole(
    function: Callable[..., torch.Tensor], place: Split, axis: Axis, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """This rank's shard of the result of a random function."""
    return _own_piece(function(*args, **kwargs), place, axis)
