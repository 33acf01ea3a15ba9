"""Conversions between placements along the tensor axis, differentiable both ways as the solver decided.

A value and its gradient are converted apart: a replicated operand of a split product takes its value as it is and has
its gradient summed (Megatron's f, arXiv 1909.08053, section 3); a partial result is summed and hands its gradient on as
it is (g). With split borders the pair is an all-gather and a reduce-scatter.
"""

from typing import Any

import torch

from shardwright.backends.torch.machine.tensor_axis import Axis, Change


class _Convert(torch.autograd.Function):
    """A conversion of a value, and another one of its gradient. The gradient of a gradient is converted as the value
    was."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, value: Change, gradient: Change, unit: str) -> torch.Tensor:
        ctx.axis, ctx.value, ctx.gradient, ctx.unit = axis, value, gradient, unit
        made = axis.convert(tensor, value, (unit, "forward"))
        return made.view_as(made) if made is tensor else made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            made = _Convert.apply(gradient, ctx.axis, ctx.gradient, ctx.value, ctx.unit)  # type: ignore[no-untyped-call]
        else:
            made = ctx.axis.convert(gradient, ctx.gradient, (ctx.unit, "backward"))
        return made, None, None, None, None


def convert(tensor: torch.Tensor, axis: Axis, value: Change, gradient: Change | None, unit: str) -> torch.Tensor:
    """The tensor in its new placement. ``gradient`` is the conversion of its gradient on the way back; None where no
    gradient flows."""
    if gradient is None or not (tensor.requires_grad and torch.is_grad_enabled()):
        return axis.convert(tensor.detach() if gradient is None else tensor, value, (unit, "forward"))
    made: torch.Tensor = _Convert.apply(tensor, axis, value, gradient, unit)  # type: ignore[no-untyped-call]
    return made
