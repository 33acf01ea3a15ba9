"""Torch's gradient scaler over the ranks of a split model: an overflow on one of them is one on all, and gradients are
clipped once they are unscaled."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.core.errors import ShardwrightError
from shardwright.torch import session as sessions
from shardwright.torch.model_run import ModelRun

_LOOK = "_unscale_grads_"
"""The method by which a scaler divides gradients, and looks for infinities in them."""
_original: Any = None
_scale: Any = None
Scalers = weakref.WeakSet[Any]
_used: list[Scalers] = []
"""The scalers of the step function whose body runs, the innermost one last."""


@contextmanager
def noting_scalers(used: Scalers) -> Iterator[None]:
    """A context in which the scalers that a step's body scales its loss by are added to ``used``."""
    _used.append(used)
    try:
        yield
    finally:
        _used.pop()


def require_unscaled(run: ModelRun, optimizers: Sequence[Any] = ()) -> None:
    """Raise ShardwrightError where the gradients of a model's last training step, whose loss scalers scaled, were not
    unscaled yet: those of all these optimizers, or where none is named of any."""
    others = {id(one) for other in sessions.current().models if other is not run for one in other.optimizers_alive()}
    for scaler in run.scalers:
        states = getattr(scaler, "_per_optimizer_states", {})
        states = {key: state for key, state in states.items() if key not in others}
        named = [states.get(id(optimizer), {}) for optimizer in optimizers]
        are_ready = [getattr(state.get("stage"), "name", "READY") == "READY" for state in named or states.values()]
        is_unscaled = not any(are_ready) if named else not all(are_ready)
        if scaler.is_enabled() and not is_unscaled:
            raise ShardwrightError(
                "the gradients are clipped while they are scaled by a torch.amp.GradScaler, so that max_norm is not "
                "what they are compared with: call scaler.unscale_(optimizer) before model.clip_grad_norm_(max_norm); "
                "with sdp_gradient_clipping, for every optimizer before the step of the first"
            )


def _scale_noted(scaler: Any, outputs: Any) -> Any:
    if _used:
        _used[-1].add(scaler)
    return _scale(scaler, outputs)


def share_overflows() -> None:
    """Let a ``torch.amp.GradScaler``, from now on, that finds an overflow in the gradients of this rank make all ranks
    skip the update, and shrink the scale, as the unsplit model would. The scaler's step and update stay the user's
    calls."""
    global _original, _scale
    if _scale is None:
        _scale = torch.amp.GradScaler.scale
        torch.amp.GradScaler.scale = _scale_noted  # type: ignore[assignment]
    if _original is None and hasattr(torch.amp.GradScaler, _LOOK):
        _original = getattr(torch.amp.GradScaler, _LOOK)
        setattr(torch.amp.GradScaler, _LOOK, _looked_at_together)


def _looked_at_together(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    found = _original(scaler, optimizer, *args, **kwargs)
    session = sessions.current() if sessions.is_initialized() else None
    if session is None or not session.models or session.bound.mesh.size == 1:
        return found
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not hasattr(optimizer, "holds_a_split_model"):
        is_split = max(session.bound.size("pp"), session.bound.size("tp")) > 1
        for runtime in [run.runtime for run in session.models]:
            flat = runtime.split_model.parts.flat
            in_pieces = flat is not None and flat.is_shared
            if (in_pieces or is_split) and any(map(runtime.ownership.name_of, parameters)):
                raise ShardwrightError(
                    "a gradient scaler is used with an optimizer of this rank's parameters alone, which would skip an "
                    "update that other ranks make: wrap the optimizer, sw.DistributedOptimizer(optimizer), and give "
                    "the scaler that"
                )
        return found
    here = any(bool(flag.any()) for flag in found.values())
    call = optimizer.model_run.of_model("the gradient scaler's look at the gradients")
    told = session.agreement.meet(call, notes=(int(here),))
    anywhere = any(note for note, *_ in told.values())
    if not found:  # this rank has no gradient, and the scaler wants an answer
        device = session.bound.device
        found[device] = torch.zeros(1, dtype=torch.float32, device=device)
    for flag in found.values():
        flag.fill_(float(anywhere))
    return found
