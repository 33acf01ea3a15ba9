"""torch's own clipping of gradients, which sees the parameters of one rank alone: warned of, or refused."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from shardwright.core.errors import ShardwrightError

_in_pieces: dict[int, weakref.ref[nn.Parameter]] = {}
"""The parameters of which ranks hold pieces, by id; ids are given again once a tensor is gone."""
_plain_clip: Callable[..., Any] | None = None


def warn_of_plain_clipping(parameters: Iterator[nn.Parameter]) -> None:
    """Let torch's clip_grad_norm_ warn, from now on, when it is given one of these parameters.

    Its inner function is replaced, since user code may have imported the outer one already.
    """
    global _plain_clip
    _marked.update(id(p) for p in parameters)
    if _plain_clip is not None:
        return
    _plain_clip = clip_grad._clip_grads_with_norm_

    def clip(given: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [given] if isinstance(given, torch.Tensor) else list(given)
        if any((known := _in_pieces.get(id(p))) is not None and known() is p for p in tensors):
            raise ShardwrightError(
                "torch.nn.utils.clip_grad_norm_ would clip this rank's pieces of the gradients by the norm of these "
                "alone: call model.clip_grad_norm_(max_norm), which takes the norm of the whole model"
            )
        if any(id(p) in _marked for p in tensors):
            warnings.warn(
                "torch.nn.utils.clip_grad_norm_ sees only the parameters of this rank, and clips by their norm alone: "
                "call model.clip_grad_norm_(max_norm), which takes the norm of the whole model",
                stacklevel=4,
            )
        assert _plain_clip is not None
        return _plain_clip(tensors, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = clip  # type: ignore[assignment]


_marked: set[int] = set()


def refuse_plain_clipping(pieces: Iterable[nn.Parameter]) -> None:
    """Let torch's clip_grad_norm_ raise ShardwrightError, from now on, when it is given one of these parameters, of
    which this rank holds a piece."""
    held = list(pieces)
    _in_pieces.update((id(p), weakref.ref(p)) for p in held)
    warn_of_plain_clipping(iter(held))
