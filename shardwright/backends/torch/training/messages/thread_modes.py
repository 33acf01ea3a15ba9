"""Modes of torch that belong to a thread and travel with a call."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes in which the caller computes.

    Attributes:
        autocast: the dtype, None when it is off.
        recomputing: whether this is inside a backward pass, where activation checkpoints run again.
    """

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    recomputing: bool = False

    @classmethod
    def here(cls, device: torch.device, recomputing: bool = False) -> "Modes":
        kind = device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, recomputing)

    @contextmanager
    def applied(self, device: torch.device) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if torch.is_grad_enabled() != self.grad:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.autocast is not None or torch.is_autocast_enabled(device.type):
                enabled = self.autocast is not None
                stack.enter_context(torch.autocast(device.type, dtype=self.autocast, enabled=enabled))
            yield
