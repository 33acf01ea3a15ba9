"""Column-parallel products whose backward sums the gradient of their input while it makes that of their weight.

Autograd makes both gradients of a product in one go, so that a sum after it would find nothing to run beside. Here the
sum starts as soon as its terms are there (Megatron-LM overlaps the two; the sum is in arXiv 1909.08053, section 3).
"""

from typing import Any

import torch
from torch.nn import functional as F

from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.memory import weight_gradients
from shardwright.backends.torch.tensor_parallel.collectives import convert
from shardwright.core.layout.placements import Partial, Replicate

R = Replicate()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What `functional.linear` is when it runs: under a split backward one that puts its weight gradient off."""
    return F.linear(x, weight, bias)


def embedding(*args: Any, **kwargs: Any) -> torch.Tensor:
    """What `functional.embedding` is when it runs, as `linear`."""
    return F.embedding(*args, **kwargs)


def flat_product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product […, k] · [k, n] (+ [n]), as one over flattened leading dims."""
    flat = left.reshape(-1, left.shape[-1])
    made = weight_gradients.matrix_product(flat, right) if bias is None else torch.addmm(bias, flat, right)
    return made.view(*left.shape[:-1], right.shape[-1])


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        is_in_out: bool,
        axis: Axis,
        unit: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.is_in_out, ctx.axis, ctx.unit = is_in_out, axis, unit
        return (flat_product if is_in_out else F.linear)(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_input = of_weight = of_bias = arrive = None
        if wants_input:
            terms = gradient @ (weight.t() if ctx.is_in_out else weight)
            if torch.is_grad_enabled():  # a gradient of this gradient will be asked for
                of_input = convert(terms, ctx.axis, (Partial("sum"), R), (R, R), ctx.unit)
            else:
                of_input, arrive = ctx.axis.begin_sum(terms, (ctx.unit, "backward"))
        flat = gradient.reshape(-1, gradient.shape[-1])
        if wants_weight:
            given = x.reshape(-1, x.shape[-1])
            left, right = (given.t(), flat) if ctx.is_in_out else (flat.t(), given)
            of_weight = None if weight_gradients.added(weight, left, right) else left @ right
        if wants_bias:
            of_bias = flat.sum(0)
        if arrive is not None:
            arrive()
        return of_input, of_weight, of_bias, None, None, None


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_in_out: bool, axis: Axis, unit: str
) -> torch.Tensor:
    """A rank's columns of x · weight (+ bias). ``x`` […, in] is whole, and the gradient that it gets back is the sum
    over all ranks; ``weight`` is (in, out) with ``is_in_out``, else (out, in)."""
    if _plain(x, weight):
        made: torch.Tensor = _Columns.apply(x, weight, bias, is_in_out, axis, unit)  # type: ignore[no-untyped-call]
        return made
    x = convert(x, axis, (R, R), (Partial("sum"), R), unit)
    return (flat_product if is_in_out else F.linear)(x, weight, bias)


def _plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether nothing else changes the course of the product: autocast, a compiler, a backward that is split."""
    return not (
        x.dtype is not weight.dtype
        or x.is_complex()
        or torch.is_autocast_enabled(x.device.type)
        or torch.compiler.is_compiling()
        or weight_gradients.may_be_put_off()
    )
