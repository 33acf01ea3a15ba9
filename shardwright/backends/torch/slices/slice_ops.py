"""The ops of slices on tensors: parts of what is there whole, attention behind a context, dropout over the whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.weak import TensorWeakRef

from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.machine.tensor_shards import piece_of
from shardwright.backends.torch.memory.weight_gradients import may_be_put_off
from shardwright.backends.torch.tensor_parallel.random_ops import attention_that_keeps
from shardwright.core.errors import CaptureError
from shardwright.core.layout.placements import Split


@dataclass(frozen=True, slots=True)
class SlicePlace:
    """Where a slice lies in its sequence, in tokens."""

    start: int
    length: int
    tokens: int
    """Of the whole sequence."""

    @property
    def end(self) -> int:
        return self.start + self.length


def part_of(whole: torch.Tensor, dim: int, at: SlicePlace, rows: int = 0) -> torch.Tensor:
    """The entries of a slice along a dim of all tokens, or of so many rows for each token of all samples, one after the
    other."""
    if not rows:
        return whole.narrow(dim, at.start, at.length)
    by_sample: torch.Tensor = whole.unflatten(dim, (-1, at.tokens * rows))
    return by_sample.narrow(dim + 1, at.start * rows, at.length * rows).flatten(dim, dim + 1)


def keys_of(whole: torch.Tensor, dim: int, at: SlicePlace) -> torch.Tensor:
    """The entries of all tokens up to the end of a slice."""
    return whole.narrow(dim, 0, at.end)


def joined(dim: int, lengths: Sequence[int], rows: int, *parts: torch.Tensor) -> torch.Tensor:
    """The slices of a tensor put together along a dim; ``rows``: where the dim is of samples and their tokens, the rows
    of each token, else 0."""
    if not rows:
        return torch.cat(parts, dim)
    by_sample = [part.unflatten(dim, (-1, length * rows)) for part, length in zip(parts, lengths, strict=True)]
    return torch.cat(by_sample, dim + 1).flatten(dim, dim + 1)


def so_far(before: torch.Tensor | None, own: torch.Tensor, dim: int, at: SlicePlace) -> torch.Tensor:
    """The keys or values of all tokens up to the end of a slice: its own, written behind those before it.

    The first slice takes memory for the whole sequence, of which each result is a view, so that nothing is there twice.

    Args:
        before: what this gave for the slice before, [.., start, ..]; None for the first.
        own: [.., length, ..].
    """
    made: torch.Tensor = _SoFar.apply(before, own, dim, at)  # type: ignore[no-untyped-call]
    return made


class _SoFar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, before: torch.Tensor | None, own: torch.Tensor, dim: int, at: SlicePlace) -> torch.Tensor:
        ctx.dim, ctx.at, ctx.has_before = dim, at, before is not None
        shape = [*own.shape[:dim], at.tokens, *own.shape[dim + 1 :]]
        whole = None if before is None else _memory_of(before, shape)
        if whole is None:
            whole = own.new_empty(shape)
            if before is not None:
                whole.narrow(dim, 0, at.start).copy_(before)
        whole.narrow(dim, at.start, at.length).copy_(own)
        # A tensor of its own, not a view: what is written behind it later is no change of what was saved of it.
        return _over(whole, [*own.shape[:dim], at.end, *own.shape[dim + 1 :]], whole.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        at = ctx.at
        before = gradient.narrow(ctx.dim, 0, at.start) if ctx.has_before and ctx.needs_input_grad[0] else None
        own = gradient.narrow(ctx.dim, at.start, at.length) if ctx.needs_input_grad[1] else None
        if own is not None and may_be_put_off():
            own = own.clone()  # a weight gradient may be made of it later, when the rest is gone
        return before, own, None, None


CUMULATIVE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cumsum": torch.add, "cumprod": torch.mul, "logcumsumexp": torch.logaddexp,
}  # fmt: skip
"""What makes of a cumulative result up to a slice, and of a slice's own, that of both."""


def behind_sum(before: torch.Tensor, own: torch.Tensor, name: str) -> torch.Tensor:
    """The results of a cumulative op in a slice behind the last result of the slices before it."""
    return CUMULATIVE[name](before, own)


def behind(before: torch.Tensor | None, own: torch.Tensor, dim: int, entries: int) -> torch.Tensor:
    """A slice behind the last entries of those before it, or behind so many zeros where it is the first.

    Args:
        before: [.., entries, ..].
        own: [.., length, ..]; the result is [.., entries + length, ..].
    """
    if before is None:
        before = own.new_zeros([*own.shape[:dim], entries, *own.shape[dim + 1 :]])
    return torch.cat([before, own], dim)


def first_of(given: torch.Tensor, dim: int, entries: int) -> torch.Tensor:
    """The first entries along a dim."""
    return given.narrow(dim, 0, entries)


def last_of(given: torch.Tensor, dim: int, entries: int) -> torch.Tensor:
    """The last entries along a dim, as a tensor that holds no others in memory."""
    return given.narrow(dim, given.shape[dim] - entries, entries).clone(memory_format=torch.contiguous_format)


def _memory_of(before: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """The memory for the whole sequence at whose beginning a tensor lies; None where it lies elsewhere, as a copy
    does."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    storage = before.untyped_storage()
    is_there = storage.nbytes() == step * before.element_size() and not before.storage_offset()
    # The stride of a dim of one entry says nothing, and a view may have another one.
    lies = zip(before.shape, before.stride(), strides, strict=True)
    is_there = is_there and all(one == other for size, one, other in lies if size > 1)
    return _over(before, shape, strides) if is_there else None


def _over(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A tensor of another shape over the same memory, which autograd takes for another."""
    found: torch.Tensor = tensor.new_empty(0)
    return found.set_(tensor.untyped_storage(), tensor.storage_offset(), list(shape), list(strides))


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    at: SlicePlace,
    probability: float,
    scale: float | None,
    enable_gqa: bool,
    shape: Sequence[int],
    split: Split | None,
    axis: Axis,
) -> torch.Tensor:
    """Attention of the queries of one slice to all keys up to the end of it.

    Args:
        query: [.., slice, width].
        key, value: [.., start + slice, width].
        mask: the mask of the whole sequence, [.., tokens, tokens]; None: each token sees those before it and itself.
        probability: of dropout. Its mask is drawn for the whole sequence, and the slice's part of it taken.
        shape: [.., tokens, tokens], of the scores of the whole sequence over all ranks.
        split: the placement of the scores on the tensor axis; None: whole.
    """
    length, end = query.shape[-2], key.shape[-2]
    if mask is not None:
        mask = mask[..., at.start : at.end, :end]
    elif probability:
        mask = torch.ones((length, end), dtype=torch.bool, device=query.device).tril(at.start)
    elif at.start:
        mask = _hides_later(length, at.start, query.dtype, query.device)
    if not probability:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )
    ones = torch.ones(list(shape), dtype=query.dtype, device=query.device)
    kept = _own(torch.dropout(ones, probability, True), split, axis)[..., at.start : at.end, :end].clone()
    del ones
    return attention_that_keeps(query, key, value, mask, kept, scale, enable_gqa)


_HIDES: dict[tuple[int, int, torch.dtype, torch.device], TensorWeakRef] = {}
"""The masks that are held somewhere: all attentions to the same slice share one."""


def _hides_later(length: int, start: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to the scores [length, start + length] of a slice's queries: minus infinity for later keys."""
    key = length, start, dtype, device
    mask: torch.Tensor | None = _HIDES[key]() if key in _HIDES else None
    if mask is None:
        mask = torch.full((length, start + length), -torch.inf, dtype=dtype, device=device).triu_(start + 1)
        _HIDES[key] = TensorWeakRef(mask)
    return mask


def dropout(
    given: torch.Tensor,
    probability: float,
    shape: Sequence[int],
    order: Sequence[int],
    dim: int,
    keys: int | None,
    at: SlicePlace,
    split: Split | None,
    axis: Axis,
    rows: int = 0,
) -> torch.Tensor:
    """Dropout of a slice of a tensor of ``shape``, in whose memory the dims come in ``order``, or of a shard of it: the
    numbers are those of the whole tensor. ``keys``: the dim of keys, where it has one. ``rows``: as in `part_of`."""
    ones = torch.empty_permuted(list(shape), list(order), dtype=given.dtype, device=given.device).fill_(1.0)
    mask = part_of(_own(torch.dropout(ones, probability, True), split, axis), dim, at, rows)
    mask = mask if keys is None else keys_of(mask, keys, at)
    return given * mask.clone(memory_format=torch.contiguous_format)


def _own(whole: torch.Tensor, split: Split | None, axis: Axis) -> torch.Tensor:
    return whole if split is None else piece_of(whole, split, axis.size, axis.coordinate)


def _lowest(dtype: torch.dtype) -> float:
    """The number that softmax makes zeros of, and of all below, behind others."""
    return max(0.5 * torch.finfo(dtype).min, -1e9)


def require_causal(mask: torch.Tensor, where: str) -> None:
    """Raise CaptureError for a mask [.., tokens, tokens] that shows a query later keys, or none up to its own."""
    hidden = ~mask if mask.dtype == torch.bool else mask <= _lowest(mask.dtype)
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    _require_hidden(hidden, later, where)
    if bool((hidden | later).all(-1).any()):
        raise CaptureError(_all_hidden(where))


def require_hides(mask: torch.Tensor, queries: int, keys: int, op: str, where: str) -> None:
    """Raise CaptureError for a mask of scores that shows a query later keys. ``op``: what takes it; what is added hides
    by its value, a boolean mask of ``where`` where it is False, of others where it is True."""
    mask = mask.movedim((queries, keys), (-2, -1))
    if mask.is_floating_point():
        hidden = mask <= _lowest(mask.dtype)
    elif mask.dtype == torch.bool and op not in ("add", "add_any"):
        hidden = ~mask if op == "where" else mask
    else:
        raise CaptureError(
            f"{where} takes a mask of {mask.dtype} in {op}: expected one of low numbers to add, or a boolean one that "
            f"says which scores are replaced; leave out slices, or pass such a mask"
        )
    _require_hidden(hidden, torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1), where)


def require_low(value: float | torch.Tensor, dtype: torch.dtype, where: str) -> None:
    """Raise CaptureError for a number that hides scores, and is not so low that softmax makes a zero of it."""
    highest = float(value if not isinstance(value, torch.Tensor) else value.max())
    if not highest <= _lowest(dtype):
        raise CaptureError(
            f"{where} puts {highest:g} in the place of the scores that its mask hides: expected "
            f"{_lowest(dtype):g} or less, which softmax makes zeros of; leave out slices, or take torch.finfo's min"
        )


def require_mild(factor: float | torch.Tensor, where: str) -> None:
    """Raise CaptureError for a number times which, or divided by which, hidden scores might no longer be low."""
    if not 0.01 <= float(factor) <= 100:
        raise CaptureError(
            f"{where} scales the scores of its attention by {float(factor):g}, after which those that its mask hides "
            f"may count: expected a number from 0.01 to 100; leave out slices, or scale queries"
        )


def require_seen(scores: torch.Tensor, keys: int, where: str) -> None:
    """Raise CaptureError for a query all of whose scores are hidden. ``keys``: the dim of keys."""
    if bool((scores.detach().amax(keys) <= 0.01 * _lowest(scores.dtype)).any()):
        raise CaptureError(_all_hidden(where))


def _require_hidden(hidden: torch.Tensor, later: torch.Tensor, where: str) -> None:
    if not bool((hidden | ~later).all()):
        raise CaptureError(
            f"{where} attends by a mask that shows tokens later ones: slices follow each other where a token needs "
            f"only what came before it; leave out slices, or give a causal mask"
        )


def _all_hidden(where: str) -> str:
    return (
        f"{where} attends by a mask that hides all tokens up to its own from some: what it makes of them would "
        f"depend on later ones; pad sequences on the right, or leave out slices"
    )
