"""The shapes of what a model returns, without memory and without a trace of the run."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.capture.fake_state import fake_state
from shardwright.backends.torch.capture.loss_scaler import real_scales
from shardwright.backends.torch.compat import FakeTensorMode, pytree
from shardwright.backends.torch.program.python_reads import left_as_it_is
from shardwright.backends.torch.program.randomness import kept_generators


def output_shapes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Any:
    """What a model returns for these arguments, with tensors on the meta device. Raises whatever the model raises, as
    where its control flow depends on values."""

    def fake(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, torch.Tensor) else leaf

    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with kept_generators(True, device), left_as_it_is(model), fakes, fake_state(model, device), real_scales():
        given, named = pytree.tree_map(fake, (tuple(args), dict(kwargs)))
        output = model(*given, **named)
    return pytree.tree_map(without_memory, output)


def without_memory(leaf: Any) -> Any:
    """A tensor with the same shape and dtype on the meta device; anything else as it is."""
    if not isinstance(leaf, torch.Tensor) or (type(leaf) is torch.Tensor and leaf.is_meta):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
