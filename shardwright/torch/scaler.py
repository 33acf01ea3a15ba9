"""Torch's gradient scaler over the ranks of a split model: an overflow on one of them is one on all."""

from typing import Any

import torch

from shardwright.core.errors import ShardwrightError
from shardwright.torch import session as sessions

_LOOK = "_unscale_grads_"
"""The method by which a scaler divides gradients, and looks for infinities in them."""
_original: Any = None


def share_overflows() -> None:
    """Let a ``torch.amp.GradScaler``, from now on, that finds an overflow in the gradients of this rank make all ranks
    skip the update, and shrink the scale, as the unsplit model would. The scaler's step and update stay the user's
    calls."""
    global _original
    if _original is None and hasattr(torch.amp.GradScaler, _LOOK):
        _original = getattr(torch.amp.GradScaler, _LOOK)
        setattr(torch.amp.GradScaler, _LOOK, _looked_at_together)


def _looked_at_together(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    found = _original(scaler, optimizer, *args, **kwargs)
    session = sessions.current() if sessions.is_initialized() else None
    if session is None or session.runtime is None or session.bound.mesh.size == 1:
        return found
    if not hasattr(optimizer, "holds_a_split_model"):
        of_model = any(
            session.runtime.ownership.name_of(p) for group in optimizer.param_groups for p in group["params"]
        )
        flat = session.runtime.split_model.parts.flat
        in_pieces = flat is not None and flat.is_shared
        if of_model and (in_pieces or max(session.bound.size("pp"), session.bound.size("tp")) > 1):
            raise ShardwrightError(
                "a gradient scaler is used with an optimizer of this rank's parameters alone, which would skip an "
                "update that other ranks make: wrap the optimizer, sw.DistributedOptimizer(optimizer), and give the "
                "scaler that"
            )
        return found
    here = any(bool(flag.any()) for flag in found.values())
    told = session.agreement.meet("the gradient scaler's look at the gradients", notes=(int(here),))
    anywhere = any(note for note, *_ in told.values())
    if not found:  # this rank has no gradient, and the scaler wants an answer
        device = session.bound.device
        found[device] = torch.zeros(1, dtype=torch.float32, device=device)
    for flag in found.values():
        flag.fill_(float(anywhere))
    return found
