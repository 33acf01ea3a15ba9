"""Models that are written here: neural collaborative filtering, and a residual network."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class NeuMF(nn.Module):
    """Neural collaborative filtering (arXiv 1708.05031, section 3.4): a product of embeddings beside a perceptron on
    others, and one layer on both."""

    def __init__(self, users: int = 64, items: int = 96, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.user_product, self.item_product = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_tower, self.item_tower = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
        self.tower = nn.ModuleList(
            nn.Sequential(nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Dropout(0.2)) for _ in range(depth)
        )
        self.head = nn.Linear(5 * width, 1)
        self.users, self.items = users, items

    def forward(self, user: torch.Tensor, item: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        """Users, items and whether they met, (batch,) each."""
        product = self.user_product(user) * self.item_product(item)
        x = torch.cat([self.user_tower(user), self.item_tower(item)], -1)
        for layer in self.tower:
            x = layer(x)
        scores = self.head(torch.cat([product, x], -1))[:, 0]
        return {"loss": F.binary_cross_entropy_with_logits(scores, label), "scores": scores}

    def batch(self, samples: int, generator: torch.Generator) -> dict[str, Any]:
        return {
            "user": torch.randint(self.users, (samples,), generator=generator),
            "item": torch.randint(self.items, (samples,), generator=generator),
            "label": torch.randint(2, (samples,), generator=generator).float(),
        }


class Residual(nn.Module):
    """A basic block (arXiv 1512.03385, figure 2) with a projection where the shape changes (option B)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        same = inside == outside and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.skip(x))


class ResidualNetwork(nn.Module):
    """A residual network for small images, with batch statistics."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width]
        self.blocks = nn.ModuleList(
            Residual(a, b, 1 if a == b else 2) for a, b in zip([width, *widths[:-1]], widths, strict=True)
        )
        self.head = nn.Linear(widths[-1], classes)
        self.classes = classes

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Images, (batch, 3, height, width), and their classes, (batch,)."""
        x = F.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def batch(self, samples: int, generator: torch.Generator) -> dict[str, Any]:
        return {
            "images": torch.randn(samples, 3, 16, 16, generator=generator),
            "labels": torch.randint(self.classes, (samples,), generator=generator),
        }


OWN = {"NeuMF": NeuMF, "ResidualNetwork": ResidualNetwork}
