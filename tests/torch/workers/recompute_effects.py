"""Units whose forward has effects, computed again and not, in one process.

Usage: recompute_effects.py OUT.json. Of every kind of effect, and with and without recompute: losses, gradients, and
what the effect left.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwright.torch as sw
from tests.comparison import Comparison

WIDTH, LAYERS, STEPS = 8, 4, 2
KINDS = ("counter", "counter that is read", "list", "list that is read", "dictionary", "new attribute", "buffer",
         "buffer anew", "batch norm")  # fmt: skip
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zb-h1": {"pipeline": sw.Schedule.build("zb-h1", ranks=1, microbatches=4)},
}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.seen: list[float] = []
        self.by_size: dict[int, int] = {}
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else nn.Identity()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind.startswith("counter"):
            self.calls += 1
        if self.kind == "counter that is read":
            x = x * (1 + 0.1 * self.calls)
        if self.kind.startswith("list"):
            self.seen.append(1.0)
        if self.kind == "list that is read":
            x = x * (1 + 0.1 * sum(self.seen))
        if self.kind == "dictionary":
            self.by_size[len(x)] = self.by_size.get(len(x), 0) + 1
        if self.kind == "new attribute":
            self.last = len(x)
        if self.kind == "buffer":
            self.count += 1
            x = x * (1 + 0.1 * self.count)
        if self.kind == "buffer anew":
            self.count = self.count + 1
            x = x * (1 + 0.1 * self.count)
        return x + torch.tanh(self.linear(self.norm(x)))

    def left(self) -> dict[str, Any]:
        buffers = {name: buffer.double().tolist() for name, buffer in self.named_buffers()}
        return {"calls": self.calls, "seen": self.seen, "by size": self.by_size, "buffers": buffers,
                "last": getattr(self, "last", None)}  # fmt: skip


class Tower(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@sw.step
def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)
    model.backward(loss, reduction="mean")
    return loss


def run(kind: str, schedule: str, recompute: str) -> dict[str, Any]:
    sw.init({"microbatches": 4, "log_every": 0, "recompute": recompute, **SCHEDULES[schedule]})
    tower = Tower(kind)
    model = sw.DistributedModel(tower)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = [float(train_step(model, x).reduce_mean()) for _ in range(STEPS)]
    gradients = {name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None}
    found = {"losses": losses, "gradients": gradients, "left": [block.left() for block in tower.blocks]}
    sw.shutdown()
    return found


def main() -> None:
    results = {}
    for kind in KINDS:
        wanted = run(kind, "1f1b", "none")
        for schedule in SCHEDULES:
            found = run(kind, schedule, "full")
            same = Comparison(f"{kind}, {schedule}").losses(found["losses"], wanted["losses"])
            same.gradients(found["gradients"], wanted["gradients"])
            results[f"{kind}, {schedule}"] = {
                "same": same.report(), "left": found["left"], "wanted": wanted["left"], "fresh": Block(kind).left()
            }  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
