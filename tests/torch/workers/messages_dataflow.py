"""Checks of message passing: what travels, and who calls whom."""

from dataclasses import dataclass, field
from typing import Any

import dynamic
import torch
import torch.nn.functional as F
from dynamic import CLASSES, WIDTH, Block
from messages_frame import compare, start
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright.torch as sw


def owners_call_each_other() -> None:
    """`outer` on 1 calls `outer.inner` on 2, which calls `shared` on 0 while that rank waits."""
    plain, model = start(dynamic.Nested, {"outer": 1, "outer.inner": 2, "shared": 0, "head": 2})
    compare(plain, model, steps=3)
    assert model.runtime.messages.calls.crossings > 0
    sw.shutdown()


class Tied(nn.Module):
    """A weight of one rank is used by another one's module, and by the root's own code; a buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.block = Block()
        self.out = nn.Linear(WIDTH, 11, bias=False)
        self.out.weight = self.embedding.weight
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.gate.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.block(self.embedding(y))
        if h.sum().item() > 1e9:
            return h.sum()
        h = F.linear(h, self.gate.weight.t() * self.gate.scale, self.gate.bias)
        assert self.gate.weight.device == h.device
        assert self.gate.weight.shape == (WIDTH, WIDTH)
        return F.cross_entropy(self.out(h) + F.linear(h, self.embedding.weight), y)


def a_weight_is_used_where_it_is_not_held() -> None:
    plain, model = start(Tied, {"embedding": 1, "block": 1, "out": 2, "gate": 2})
    compare(plain, model)
    assert model.module.gate.weight.is_meta == (sw.rank() != 2)
    sw.shutdown()


@dataclass
class Pair:
    left: torch.Tensor
    right: dict[str, Any]
    kept: list[torch.Tensor] = field(default_factory=list)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, *, factor: int, store: Pair | None) -> Pair:
        made = self.block(x)
        assert store is None
        return Pair(made * factor, {"positive": made > 0, "rank": made.argsort(-1), "none": None, "n": 3})


class Second(nn.Module):
    """Writes to the object and to the tensors that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, pair: Pair, extra: tuple[Any, ...], flag: bool = False) -> tuple[torch.Tensor, None, Pair]:
        assert flag
        assert pair.right["none"] is None
        chosen = torch.where(pair.right["positive"], pair.left, extra[1])
        out = self.block(chosen.gather(-1, pair.right["rank"])) * pair.right["n"]
        pair.kept.append(out)
        pair.right["n"] = 5
        extra[2].mul_(2.0)
        return out, None, pair


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = First(), Second()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pair = self.first(x, factor=2, store=None)
        scaled = pair.left * 0.25
        out, nothing, again = self.second(pair, ("text", pair.left * 0.5, scaled), flag=True)
        assert nothing is None
        assert again is pair, "an object that both sides know stays the same one"
        assert pair.right["n"] == 5
        before = out * 1.0
        after = self.relu(before)
        assert after is before, "an in-place module gives its input back"
        return (after + pair.kept[0] + scaled).pow(2).mean() + F.cross_entropy(out[:, :CLASSES], y)


def structures_and_writes_go_around() -> None:
    plain, model = start(Structured, {"first": 1, "second": 2, "relu": 1})
    compare(plain, model)
    sw.shutdown()


class Large(nn.Module):
    """Tensors and structures that are larger than a frame."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 20_000)

        def forward(self, x: torch.Tensor, names: list[str]) -> tuple[torch.Tensor, list[str]]:
            return self.linear(x), [name + "!" for name in names]

    def __init__(self) -> None:
        super().__init__()
        self.wide = self.Wide()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        names = [f"name {i}" for i in range(10_000)]
        out, said = self.wide(x, names)
        assert said[-1] == "name 9999!"
        return out.pow(2).mean()


def large_messages_arrive_whole() -> None:
    plain, model = start(Large, {"wide": 2})
    compare(plain, model)
    sw.shutdown()


class Checkpointed(nn.Module):
    """Activation checkpointing around calls that cross, with dropout in them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda given: self.b(self.a(given)), x, use_reentrant=False)
        return F.cross_entropy(h[:, :CLASSES], y)


def checkpointing_calls_again() -> None:
    plain, model = start(Checkpointed, {"a": 1, "b": 2})
    compare(plain, model)
    sw.shutdown()


def batch_statistics_follow_the_order_of_microbatches() -> None:
    plain, model = start(dynamic.Normed, {"a": 1, "norm": 2, "b": 0})
    compare(plain, model, steps=3)
    assert "norm.running_mean" in dict(model.local_named_buffers()) or sw.rank() != 2
    sw.shutdown()


CHECKS = (
    owners_call_each_other,
    a_weight_is_used_where_it_is_not_held,
    structures_and_writes_go_around,
    large_messages_arrive_whole,
    checkpointing_calls_again,
    batch_statistics_follow_the_order_of_microbatches,
)
