"""Named networks that are a page of PyTorch each: neural collaborative filtering and a giant vision transformer.

shardwright plan examples/networks/own_models.py:ncf --cluster v100 --devices-per-node 8 --batch 65536
"""

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class NeuMF(nn.Module):
    """Neural matrix factorisation (arXiv 1708.05031, section 3.4): a product of embeddings beside a perceptron."""

    def __init__(self, users: int, items: int, factors: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.user_product, self.item_product = nn.Embedding(users, factors), nn.Embedding(items, factors)
        half = layers[0] // 2
        self.user_perceptron, self.item_perceptron = nn.Embedding(users, half), nn.Embedding(items, half)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(layers))
        self.output = nn.Linear(factors + layers[-1], 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        product = self.user_product(user) * self.item_product(item)
        x = torch.cat([self.user_perceptron(user), self.item_perceptron(item)], -1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.output(torch.cat([product, x], -1)).squeeze(-1)


def ncf() -> tuple[Any, Any, Any]:
    """NCF on MovieLens-20M as MLPerf had it: 138,493 users, 26,744 films, 64 factors, layers 256 to 64."""
    with torch.device("meta"):
        model = NeuMF(138_493, 26_744, 64, (256, 256, 128, 64))
    sample = {"user": torch.zeros(2, dtype=torch.long), "item": torch.zeros(2, dtype=torch.long)}
    return model, sample, lambda score: F.binary_cross_entropy_with_logits(score, torch.ones_like(score))


class Block(nn.Module):
    """One layer of a vision transformer."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norm_1(x)).chunk(3, -1)
        split = (batch, length, self.heads, width // self.heads)
        parts = (part.reshape(split).transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class VisionTransformer(nn.Module):
    """ViT (arXiv 2010.11929) over patches, with their mean as the feature of an image."""

    def __init__(
        self, layers: int, width: int, heads: int, inner: int, patch: int, size: int = 224, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def vit_g() -> tuple[Any, Any, Any]:
    """ViT-G/14 (arXiv 2106.04560, table 2): 48 layers of 1664, 16 heads, an inner width of 8192."""
    with torch.device("meta"):
        model = VisionTransformer(48, 1664, 16, 8192, 14)
    return model, torch.zeros(2, 3, 224, 224), lambda logits: torch.logsumexp(logits, -1).mean()
