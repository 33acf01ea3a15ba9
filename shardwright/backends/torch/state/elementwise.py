"""Whether an optimizer treats every entry of a parameter by itself, so that pieces of parameters will do for it."""

import inspect
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import MissingCapabilityError

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)
_SHAPE, _CUT, _STEPS = (6, 4), 10, 3


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps on the two pieces of a small matrix give what steps on the matrix give; False too where the
    optimizer does not take pieces. Optimizers of torch that are known are not tried."""
    if type(optimizer) in _ELEMENTWISE:
        return True
    try:
        (whole,) = _trained(optimizer, [_values(0)])
        pieces = _trained(optimizer, [_values(0).reshape(-1)[:_CUT], _values(0).reshape(-1)[_CUT:]])
    except Exception:
        return False
    return torch.allclose(torch.cat(pieces), whole.reshape(-1), rtol=1e-5, atol=1e-7)


def require_separate(optimizer: torch.optim.Optimizer) -> None:
    """Raise MissingCapabilityError for an optimizer whose step on one parameter depends on the others, which lie on
    other ranks, and for one that cannot be tried."""
    name = type(optimizer).__name__
    if type(optimizer) in _ELEMENTWISE:
        return
    try:
        together = _trained(optimizer, [_values(0), _values(1)], first=0)
        alone = [*_trained(optimizer, [_values(0)], first=0), *_trained(optimizer, [_values(1)], first=1)]
    except Exception as error:
        raise MissingCapabilityError(
            f"the plan shards optimizer states, and whether {name} needs all parameters at once cannot be told, as "
            f"{name}([parameter], **defaults) fails with {type(error).__name__}: {error}. Plan with shard=0"
        ) from error
    if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(together, alone, strict=True)):
        raise MissingCapabilityError(
            f"the plan shards optimizer states, and {name} computes its step on one parameter from the others too, "
            f"which lie on other ranks: plan with shard=0, or take an optimizer such as AdamW"
        )


def _values(number: int) -> torch.Tensor:
    return torch.randn(_SHAPE, generator=torch.Generator().manual_seed(number))


def _trained(optimizer: torch.optim.Optimizer, values: list[torch.Tensor], first: int = 0) -> list[torch.Tensor]:
    """What an optimizer of the same class and settings makes of parameters with such values. The gradients are those of
    whole matrices, cut where the values are pieces."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    known = inspect.signature(type(optimizer).__init__).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
    options: dict[str, Any] = {k: v for k, v in optimizer.defaults.items() if takes_all or k in known}
    made = type(optimizer)(parameters, **options)
    for step in range(_STEPS):
        entries = 0
        for number, parameter in enumerate(parameters, first):
            if parameter.shape == _SHAPE:
                parameter.grad = _values(100 + 10 * number + step)
            else:
                parameter.grad = _values(100 + step).reshape(-1)[entries : entries + parameter.numel()].clone()
                entries += parameter.numel()
        made.step()
    return [parameter.detach() for parameter in parameters]
