"""The optimizers that treat every entry of a parameter by itself, so that pieces of parameters will do for them."""

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import MissingCapabilityError

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)
_SHAPE, _STEPS, _SIZES = (6, 4), 3, (1e-3, 1.0, 1e3)
_OF_THE_TRIAL = ("param_groups", "state", "step")
"""Attributes that a trial has of its own; ``step`` is one where a scheduler has wrapped it."""


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether pieces of parameters will do: for optimizers of torch that are known, and for those that take the norms
    of whole parameters from `whole_norms`. Others get whole parameters, since no trial shows what an optimizer does at
    every size of a gradient."""
    return type(optimizer) in _ELEMENTWISE or takes_whole_norms(optimizer)


def takes_whole_norms(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step depends on norms of whole parameters, which it is given as its ``norms``."""
    return getattr(type(optimizer), "takes_whole_norms", False)


def require_separate(optimizer: torch.optim.Optimizer) -> None:
    """Raise MissingCapabilityError for an optimizer whose step on one parameter depends on the others, which lie on
    other ranks, and for one that cannot be tried: by steps of a copy on two small matrices, together and each alone."""
    name = type(optimizer).__name__
    if is_elementwise(optimizer):
        return
    try:
        same = [_is_separate(optimizer, group, size) for group in optimizer.param_groups for size in _SIZES]
    except Exception as error:
        raise MissingCapabilityError(
            f"the plan shards optimizer states, and whether {name} needs all parameters at once cannot be told, as "
            f"steps of a copy of it fail with {type(error).__name__}: {error}. Plan with shard=0"
        ) from error
    if not all(same):
        raise MissingCapabilityError(
            f"the plan shards optimizer states, and {name} computes its step on one parameter from the others too, "
            f"which lie on other ranks: plan with shard=0, or take an optimizer such as AdamW"
        )


def require_no_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise MissingCapabilityError for hooks around an optimizer's step, which would see this rank's pieces alone."""
    for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if getattr(optimizer, kind, None):
            raise MissingCapabilityError(
                f"{type(optimizer).__name__} has a hook around its step, which would be given this rank's pieces of "
                f"the parameters and gradients: take it off, or plan with shard=0"
            )


def _is_separate(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], size: float) -> bool:
    together = _trained(optimizer, group, (0, 1), size)
    alone = _trained(optimizer, group, (0,), size) + _trained(optimizer, group, (1,), size)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(together, alone, strict=True))


def _values(number: int) -> torch.Tensor:
    return torch.randn(_SHAPE, generator=torch.Generator().manual_seed(number))


def _trained(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], numbers: tuple[int, ...], size: float
) -> list[torch.Tensor]:
    """What a copy of an optimizer, with the options of a group, makes of matrices under gradients of about ``size``."""
    parameters = [nn.Parameter(_values(number)) for number in numbers]
    made = object.__new__(type(optimizer))
    own = {key: value for key, value in vars(optimizer).items() if key not in _OF_THE_TRIAL}
    vars(made).update(copy.deepcopy(own))
    made.state = defaultdict(dict)
    options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    made.param_groups = [options | {"params": parameters}]
    for step in range(_STEPS):
        for number, parameter in zip(numbers, parameters, strict=True):
            parameter.grad = size * _values(100 + 10 * number + step)
        made.step()
    return [parameter.detach() for parameter in parameters]
