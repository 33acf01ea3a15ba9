"""Frozen models with trained maps of low rank beside their own (LoRA, arXiv 2106.09685)."""

from typing import Any

import torch
from torch import nn


class LowRank(nn.Module):
    """A frozen map and a trained one of low rank beside it."""

    def __init__(self, frozen: nn.Module, entering: int, leaving: int, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(entering, rank, bias=False), nn.Linear(rank, leaving, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return made


def adapted(model: Any) -> Any:
    """A frozen GPT-2 of transformers with trained maps beside its attentions' inputs."""
    model.requires_grad_(False)
    width = model.config.n_embd
    for block in model.transformer.h:
        block.attn.c_attn = LowRank(block.attn.c_attn, width, 3 * width)
    return model
