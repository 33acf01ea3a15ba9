"""torch's own clipping of gradients, ``torch.nn.utils.clip_grad_norm_``, over a split model: all of the model's
gradients are clipped by the norm of the whole model; a part of them is refused, as ranks hold different parts."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

from shardwright.backends.torch.compat import CLIPPING
from shardwright.core.errors import MissingCapabilityError

_plain_norm: Callable[..., torch.Tensor] | None = None
_plain_scale: Callable[..., Any] | None = None
_models: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The models of whose gradients a rank holds a part."""
_asked: tuple[float, bool] = (2.0, False)
"""The kind of norm of the last call, and whether one that is not finite is an error."""
CALL = "torch.nn.utils.clip_grad_norm_"


def serve_plain_clipping(model: Any) -> None:
    """Let torch's functions take the norm of the whole model, from now on, where they are given the gradients of this
    DistributedModel; every rank calls them then.

    The two functions that `clip_grad_norm_` consists of are replaced, since user code may have imported it already:
    one computes the norm, and the other divides by it.
    """
    global _plain_norm, _plain_scale
    _models.add(model)
    if _plain_norm is not None:
        return
    _plain_norm, _plain_scale = (getattr(clip_grad, name) for name in CLIPPING)
    for (private, public), function in zip(CLIPPING.items(), (_norm, _scaled), strict=True):
        setattr(clip_grad, private, function)
        if hasattr(utils, public):
            setattr(utils, public, function)


def _norm(
    tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """The norm of these tensors; where they are the gradients of a split model, that of the whole model."""
    global _asked
    assert _plain_norm is not None
    _asked = float(norm_type), error_if_nonfinite
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    model = _model_of(given, lambda one: [p.grad for p in one.local_parameters() if p.grad is not None])
    if model is None:
        return _plain_norm(given, norm_type, error_if_nonfinite, foreach)
    own = [p.grad for p in model.local_parameters() if p.grad is not None]
    norm: torch.Tensor = model.norm_of_gradients(CALL, *_asked, _failure(given, own, "gradients"))
    return norm


def _scaled(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> Any:
    """Divide the gradients of these parameters. A rank without a gradient takes part in the norm of the others."""
    assert _plain_scale is not None
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    model = _model_of(given, lambda one: one.parameters())
    if model is not None and all(p.grad is None for p in given):
        trained = [p for p in model.local_parameters() if p.requires_grad]
        total_norm.copy_(model.norm_of_gradients(CALL, *_asked, _failure(given, trained, "parameters")))
        return None
    return _plain_scale(given, max_norm, total_norm, foreach)


def _model_of(given: Iterable[torch.Tensor], theirs: Callable[[Any], Iterable[Any]]) -> Any:
    """The split model that has one of these tensors; None where they are none of any."""
    known = {id(tensor) for tensor in given}
    for model in list(_models):
        if known and model.can_ask_for_parts() and any(id(tensor) in known for tensor in theirs(model)):
            return model
    return None


def _failure(given: list[torch.Tensor], own: list[Any], what: str) -> Exception | None:
    """The reason why the norm of these tensors cannot be that of the model whose tensors ``own`` are on this rank."""
    known, all_own = {id(tensor) for tensor in given}, {id(tensor) for tensor in own}
    foreign = 0 if what == "parameters" else len(known - all_own)  # parameters of other ranks are given too
    if all_own <= known and not foreign:
        return None
    return MissingCapabilityError(
        f"{CALL} is given {len(known & all_own)} of the {len(all_own)} {what} that this rank has of a split model, and "
        f"{foreign} others: the norm of a split model is that of all its gradients, on all ranks. Give it "
        f"model.parameters(), or call model.clip_grad_norm_(max_norm)"
    )
