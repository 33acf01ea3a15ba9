"""Gradient scalers that are used for the first time while a step body runs on stand-ins."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.backends.torch.capture.replaced import replaced
from shardwright.backends.torch.compat import DisableTorchFunction, without_dispatch_modes

_BEGIN = "_lazy_init_scale_growth_tracker"
"""The method by which a scaler makes its scale, when the first loss is scaled."""


@contextmanager
def real_scales() -> Iterator[None]:
    """A context in which a ``GradScaler`` makes its scale as a real tensor, whatever modes are in force: it is kept for
    all steps, and a recorded step reads it where it is."""
    original: Any = getattr(torch.amp.GradScaler, _BEGIN, None)
    if original is None:
        yield
        return

    def begin(scaler: Any, device: torch.device) -> None:
        with without_dispatch_modes(), DisableTorchFunction():
            original(scaler, device)

    with replaced(torch.amp.GradScaler, _BEGIN, begin):
        yield
