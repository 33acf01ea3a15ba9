"""The ops of slices on tensors: parts of what is there whole, attention behind a context, dropout over the whole."""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from shardwright.backends.torch.tensor_parallel.random_ops import attention_that_keeps
from shardwright.core.errors import CaptureError


def part_of(whole: torch.Tensor, dim: int, start: int, length: int, tokens: int) -> torch.Tensor:
    """The entries of tokens ``start`` … along a dim of all tokens, or of all samples' tokens one after the other."""
    if whole.shape[dim] == tokens:
        return whole.narrow(dim, start, length)
    by_sample: torch.Tensor = whole.unflatten(dim, (-1, tokens)).narrow(dim + 1, start, length)
    return by_sample.flatten(dim, dim + 1)


def joined(dim: int, lengths: Sequence[int], is_flat: bool, *parts: torch.Tensor) -> torch.Tensor:
    """The slices of a tensor put together along a dim; ``is_flat``: the dim is of samples and their tokens."""
    if not is_flat:
        return torch.cat(parts, dim)
    by_sample = [part.unflatten(dim, (-1, length)) for part, length in zip(parts, lengths, strict=True)]
    return torch.cat(by_sample, dim + 1).flatten(dim, dim + 1)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    start: int,
    tokens: int,
    probability: float,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention of the queries of one slice to all keys up to the end of it.

    Args:
        query: [.., slice, width].
        key, value: [.., start + slice, width].
        mask: the mask of the whole sequence, [.., tokens, tokens]; None: each token sees those before it and itself.
        start: tokens before the slice.
        probability: of dropout. Its mask is drawn for the whole sequence, and the slice's part of it taken.
    """
    length, end = query.shape[-2], key.shape[-2]
    if mask is not None:
        mask = mask[..., start : start + length, :end]
    elif start or probability:
        mask = torch.ones((length, end), dtype=torch.bool, device=query.device).tril(start)
    if not probability:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )
    ones = torch.ones((*query.shape[:-2], tokens, tokens), dtype=query.dtype, device=query.device)
    kept = torch.dropout(ones, probability, True)[..., start : start + length, :end].clone()
    del ones
    return attention_that_keeps(query, key, value, mask, kept, scale, enable_gqa)


def dropout(
    given: torch.Tensor,
    probability: float,
    shape: Sequence[int],
    order: Sequence[int],
    dim: int,
    start: int,
    length: int,
    tokens: int,
) -> torch.Tensor:
    """Dropout of a slice of a tensor of ``shape``, in whose memory the dims come in ``order``: the numbers are those of
    the whole tensor."""
    ones = torch.empty_permuted(list(shape), list(order), dtype=given.dtype, device=given.device).fill_(1.0)
    mask = part_of(torch.dropout(ones, probability, True), dim, start, length, tokens)
    return given * mask.clone(memory_format=torch.contiguous_format)


def require_causal(mask: torch.Tensor, where: str) -> None:
    """Raise CaptureError for a mask [.., tokens, tokens] that shows a query later keys, or none up to its own."""
    hidden = ~mask if mask.dtype == torch.bool else mask <= 0.5 * torch.finfo(mask.dtype).min
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    if not bool((hidden | ~later).all()):
        raise CaptureError(
            f"{where} attends by a mask that shows tokens later ones: slices follow each other where a token needs "
            f"only what came before it; leave out slices, or give a causal mask"
        )
    if bool((hidden | later).all(-1).any()):
        raise CaptureError(
            f"{where} attends by a mask that hides all tokens up to its own from some: what it makes of them would "
            f"depend on later ones; pad sequences on the right, or leave out slices"
        )
