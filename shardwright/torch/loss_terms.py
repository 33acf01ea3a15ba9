"""The tensors that ``model.backward`` is given, as one loss."""

from typing import Any

import torch

from shardwright.core.errors import ShardwrightError


def one_loss(tensors: Any, grad_tensors: Any) -> Any:
    """The loss whose backward is that of `torch.autograd.backward` on these tensors and gradients."""
    many = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    if grad_tensors is None:
        factors: list[Any] = [None] * len(many)
    else:
        factors = list(grad_tensors) if isinstance(grad_tensors, (list, tuple)) else [grad_tensors]
    if len(factors) != len(many):
        raise ShardwrightError(f"model.backward was given {len(many)} tensors and {len(factors)} grad_tensors")
    terms = []
    for tensor, factor in zip(many, factors, strict=True):
        if factor is None:
            terms.append(tensor)
            continue
        if not isinstance(factor, torch.Tensor) or factor.shape != tensor.shape:
            said = f"shape {tuple(factor.shape)}" if isinstance(factor, torch.Tensor) else type(factor).__name__
            raise ShardwrightError(
                f"the second argument of model.backward is grad_tensors, as SageMaker and torch.autograd.backward have "
                f"it, a tensor of shape {tuple(tensor.shape)} like the first: given {said}. The weight of a microbatch "
                f"is given by name, model.backward(loss, weight=...)"
            )
        terms.append((tensor * factor.detach()).sum())
    if len(terms) == 1:
        return terms[0]
    for term in terms:
        if not isinstance(term, torch.Tensor) or term.numel() != 1:
            raise ShardwrightError("model.backward takes several tensors of one element each, or grad_tensors for them")
    return torch.stack([term.reshape(()) for term in terms]).sum()
