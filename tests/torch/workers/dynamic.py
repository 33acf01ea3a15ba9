"""Models whose control flow depends on values, and the plain runs that they are compared with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 16
CLASSES = 5


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Depth(nn.Module):
    """As many blocks as the input asks for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        depth = 2 + int(x.abs().sum().item() * 10) % 5
        for layer in self.layers[:depth]:
            h = layer(h)
        return F.cross_entropy(self.head(h), y)


class Chosen(nn.Module):
    """A shared block is used again where the values ask for it, and one of several experts is chosen."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.shared = Block(dropout)
        self.experts = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.shared(x)
        for turn in range(3):
            chosen = int(h.sum().abs().item() * 100 + turn) % len(self.experts)
            h = self.experts[chosen](h)
            if h.mean() > 0:
                h = self.shared(h)
        return F.cross_entropy(self.head(self.shared(h)), y)


class EarlyExit(nn.Module):
    """Leaves as soon as a classifier is sure enough."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(5))
        self.exits = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros((), dtype=x.dtype)
        for layer, leave in zip(self.layers, self.exits, strict=True):
            x = layer(x)
            logits = leave(x)
            loss = loss + F.cross_entropy(logits, y)
            if logits.softmax(-1).max().item() > 0.55:
                break
        return loss


class Loop(nn.Module):
    """Runs a cell until its state is large enough."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x)
        given = self.embed(x)
        turns = 0
        while turns < 8 and (turns < 2 or float(state.abs().max()) < 0.5):
            state = self.cell(self.dropout(given), state)
            turns += 1
        return F.cross_entropy(self.head(state), y)


class Inner(nn.Module):
    """A unit that calls a module of another owner, in a loop whose length depends on values."""

    def __init__(self, shared: Block, dropout: float) -> None:
        super().__init__()
        self.first = Block(dropout)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        while x.abs().max().item() > 2.0:
            x = self.shared(x) * 0.5
        return self.shared(x)


class Nested(nn.Module):
    """Owners that call back: `outer.inner` lies on another rank than `outer`, and calls `shared` of a third."""

    class Outer(nn.Module):
        def __init__(self, shared: Block, dropout: float) -> None:
            super().__init__()
            self.before = Block(dropout)
            self.inner = Inner(shared, dropout)
            self.after = Block(dropout)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.inner(self.before(x)))

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.shared = Block(dropout)
        self.outer = self.Outer(self.shared, dropout)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.outer(self.shared(x))
        return F.cross_entropy(self.head(h), y)


class Normed(nn.Module):
    """Batch statistics, whose order matters, behind a choice that depends on values."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = Block(dropout)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.b = Block(dropout)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if x.sum().item() > 0:
            h = self.a(h)
        return F.cross_entropy(self.b(self.norm(h))[:, :CLASSES], y)


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "depth": Depth, "chosen": Chosen, "exit": EarlyExit, "loop": Loop, "nested": Nested, "normed": Normed,
}  # fmt: skip


def build(name: str, dropout: float = 0.0) -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(11)
    return MODELS[name](dropout)


def batch(step: int, samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        "x": torch.randn(samples, WIDTH, generator=generator),
        "y": torch.randint(0, CLASSES, (samples,), generator=generator),
    }


@dataclass
class Reference:
    """The plain model over the same microbatches in the same order."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    state: dict[str, Any]


def reference(name: str, steps: int, microbatches: int, samples: int) -> Reference:
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = Reference([], [], {})
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        whole = batch(step, samples)
        for m in range(microbatches):
            loss = model(**{key: tensor.chunk(microbatches)[m] for key, tensor in whole.items()})
            (loss / microbatches).backward()
            total += loss.item() / microbatches
        found.losses.append(total)
        found.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    found.state = model.state_dict()
    return found
