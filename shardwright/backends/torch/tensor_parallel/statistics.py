"""Softmax and normalisation over a dim that is split: each rank has its shard, with small sums and maxima of all ranks.

The backward passes reduce once: the sums that the gradient needs travel together. Arithmetic on a new tensor is done in
its own memory: beside its operands a pass holds no more than torch's own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.machine.tensor_shards import piece_of, whole_of
from shardwright.core.errors import MissingCapabilityError
from shardwright.core.layout.placements import Split


class _Normalize(torch.autograd.Function):
    """Normalisation, (x - mean) / sqrt(mean of squares + eps), over ``dims``, of which one is split; without the mean
    for RMS norms."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, dims: list[int], eps: float, centered: bool, axis: Axis, unit: str
    ) -> torch.Tensor:
        wide = _wide(source)
        count = axis.size
        for dim in dims:
            count *= source.shape[dim]
        key = (unit, "inner")
        if centered:
            wide = wide - axis.all_reduce(wide.sum(dims, keepdim=True), "sum", key) / count
        square = axis.all_reduce(wide.square().sum(dims, keepdim=True), "sum", key) / count
        scale = torch.rsqrt(square + eps)
        normed = wide.mul_(scale) if centered else wide * scale
        ctx.save_for_backward(normed, scale)
        ctx.dims, ctx.centered, ctx.axis, ctx.key, ctx.count = dims, centered, axis, key, count
        return normed.to(source.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _refuse_graph()
        normed, scale = ctx.saved_tensors
        wide = gradient.to(normed.dtype)
        sums = [(wide * normed).sum(ctx.dims, keepdim=True)]
        if ctx.centered:
            sums.append(wide.sum(ctx.dims, keepdim=True))
        means = ctx.axis.all_reduce(torch.stack(sums), "sum", ctx.key) / ctx.count
        found = torch.addcmul(wide, normed, means[0], value=-1)
        if ctx.centered:
            found.sub_(means[1])
        return found.mul_(scale).to(gradient.dtype), None, None, None, None, None


class _Softmax(torch.autograd.Function):
    """Softmax, or its logarithm, over a dim that is split."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, dim: int, log: bool, axis: Axis, unit: str) -> torch.Tensor:
        key = (unit, "inner")
        wide = _wide(source)
        top = axis.all_reduce(wide.amax(dim, keepdim=True), "max", key)
        top = top.masked_fill(torch.isneginf(top), 0.0)
        powers = (wide - top).exp_()
        total = axis.all_reduce(powers.sum(dim, keepdim=True), "sum", key)
        made = powers.copy_(source).sub_(top).sub_(total.log()) if log else powers.div_(total)
        made = made.to(source.dtype)
        ctx.save_for_backward(made)
        ctx.dim, ctx.log, ctx.axis, ctx.key = dim, log, axis, key
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _refuse_graph()
        (made,) = ctx.saved_tensors
        wide, found = _wide(gradient), _wide(made)
        weighed = wide if ctx.log else wide * found
        total = ctx.axis.all_reduce(weighed.sum(ctx.dim, keepdim=True), "sum", ctx.key)
        found = found.exp().mul_(-total).add_(wide) if ctx.log else weighed.addcmul_(found, total, value=-1)
        return found.to(gradient.dtype), None, None, None, None


def _refuse_graph() -> None:
    """Raise MissingCapabilityError under ``create_graph=True``: the sums over ranks here have no second derivative."""
    if torch.is_grad_enabled():
        raise MissingCapabilityError(
            "create_graph=True goes through a softmax or a norm over a dim that the tensor axis splits, whose second "
            "derivative is not carried out: take that gradient with tp=1, or pin the layouts of its block to Replicate"
        )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as sums are made of it, in float32 at least: 16 bits overflow or lose small values."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def normalize(
    source: torch.Tensor, dims: Sequence[int], eps: float, centered: bool, axis: Axis, unit: str
) -> torch.Tensor:
    """A rank's shard of the normalised tensor. ``dims`` counts from 0."""
    made: torch.Tensor = _Normalize.apply(source, list(dims), eps, centered, axis, unit)  # type: ignore[no-untyped-call]
    return made


def softmax(source: torch.Tensor, dim: int, log: bool, axis: Axis, unit: str) -> torch.Tensor:
    """A rank's shard of a softmax, or of its logarithm."""
    made: torch.Tensor = _Softmax.apply(source, dim, log, axis, unit)  # type: ignore[no-untyped-call]
    return made


def batch_norm(
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_variance: torch.Tensor,
    momentum: float,
    eps: float,
    place: Split,
    axis: Axis,
) -> torch.Tensor:
    """A rank's channels, normed by the batch. Every rank holds the running statistics of all channels: each updates its
    own, and they are put together."""
    channels = Split(0, place.blocks)
    own = torch.stack([piece_of(r, channels, axis.size, axis.coordinate) for r in (running_mean, running_variance)])
    made = F.batch_norm(source, own[0], own[1], weight, bias, True, momentum, eps)
    with torch.no_grad():
        every = axis.all_gather(own)
        for number, running in enumerate((running_mean, running_variance)):
            running.copy_(whole_of([of_rank[number] for of_rank in every], channels))
    return made
