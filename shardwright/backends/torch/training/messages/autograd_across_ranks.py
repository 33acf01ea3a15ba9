"""Autograd from rank to rank: where a tensor crosses, its gradient crosses back.

On the caller a call is one node, whose backward sends the gradients of the outputs to the owner and waits for those of
the inputs. On the owner the received tensors come out of a node of their own, which keeps the gradients that reach it.
Both hand out tensors that are no leaves and no views, so that in-place operations on them work as in one process.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Gradients = list[torch.Tensor | None]


class _Outputs(torch.autograd.Function):
    """The node on the caller: the outputs of a call as a function of its inputs."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, outputs: list[torch.Tensor], back: Any, *inputs: torch.Tensor) -> Any:
        ctx.back = back
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        return (None, None, None, *ctx.back(list(gradients)))


class _Inputs(torch.autograd.Function):
    """The node on the owner: the inputs of a call."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, inputs: list[torch.Tensor], keep: Gradients) -> Any:
        ctx.keep = keep
        ctx.set_materialize_grads(False)
        return tuple(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.keep[:] = gradients
        return None, None, None


def as_outputs(
    outputs: list[torch.Tensor], inputs: Sequence[torch.Tensor], back: Callable[[Gradients], Gradients]
) -> tuple[torch.Tensor, ...]:
    """``outputs`` in the graph of the caller. ``back`` gives the gradients of the inputs for those of the outputs."""
    anchor = torch.empty(0, requires_grad=True)
    made: tuple[torch.Tensor, ...] = _Outputs.apply(anchor, outputs, back, *inputs)  # type: ignore[no-untyped-call]
    return made


def as_inputs(inputs: list[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Gradients]:
    """``inputs`` in a graph of the owner's, and the list that their gradients will be in after the backward pass."""
    keep: Gradients = [None] * len(inputs)
    anchor = torch.empty(0, requires_grad=True)
    made: tuple[torch.Tensor, ...] = _Inputs.apply(anchor, inputs, keep)  # type: ignore[no-untyped-call]
    return made, keep
