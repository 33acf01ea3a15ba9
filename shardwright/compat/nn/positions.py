"""Positions in attention: rotary embeddings (Su et al. 2021, arXiv 2104.09864) and linear biases (Press et al. 2021,
arXiv 2108.12409)."""

from typing import Literal

import torch

RotaryPairs = Literal["adjacent", "halves"]
"""Which channels of a head are turned together: 2i and 2i + 1 (GPT-J), or i and i + dim/2 (GPT-NeoX)."""


def rotated(
    states: torch.Tensor, position_ids: torch.Tensor, *, dim: int, base: float, pairs: RotaryPairs
) -> torch.Tensor:
    """Queries or keys turned by their positions.

    Args:
        states: [N, heads, S, head size].
        position_ids: [N or 1, S].
        dim: how many channels of each head are turned, from the first; the others stay.
    """
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=states.device)
    angles = position_ids[..., None].float() * base ** (-steps / dim)  # [N or 1, S, dim / 2]
    angles = angles.repeat_interleave(2, dim=-1) if pairs == "adjacent" else torch.cat([angles, angles], dim=-1)
    cosines, sines = angles.cos()[:, None].to(states.dtype), angles.sin()[:, None].to(states.dtype)
    turned, same = states[..., :dim], states[..., dim:]
    turned = turned * cosines + _quarter_turn(turned, pairs) * sines
    return torch.cat([turned, same], dim=-1)


def _quarter_turn(states: torch.Tensor, pairs: RotaryPairs) -> torch.Tensor:
    if pairs == "adjacent":
        return torch.stack([-states[..., 1::2], states[..., ::2]], dim=-1).flatten(-2)
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def linear_biases(heads: int, length: int, largest: float, like: torch.Tensor) -> torch.Tensor:
    """What ALiBi adds to the scores of keys: [1, heads, 1, length], 0 for the last key and less for those before it.

    Head h of H, from 1, falls by 2 ** (-h · ``largest`` / H) a key. Scores of one query differ by the same as under the
    distance to it, which is all that a softmax sees.
    """
    steps = torch.arange(1 - length, 1, dtype=torch.float32, device=like.device)
    slopes = 2.0 ** (-torch.arange(1, heads + 1, dtype=torch.float32, device=like.device) * (largest / heads))
    return (slopes[:, None, None] * steps)[None].to(like.dtype)
