"""``torch.sagemaker.grad_norm``, which AWS's scripts take."""

from typing import Any

import torch
from torch import nn


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip the gradients of a model by their norm, that of the unsplit model's. Returns that norm."""
    own: Any = getattr(model, "clip_grad_norm_", None)
    if own is not None:
        found: torch.Tensor = own(max_norm, norm_type)
        return found
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
