"""Trains models one after the other, each in a session of its own, and says which are still there afterwards.

Usage: freed.py OUT.json. Two ranks.
"""

import gc
import sys
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from launched import leave
from torch import nn

import shardwright.torch as sw

FORMS: dict[str, dict[str, Any]] = {
    "two stages": {"pipeline_parallel_degree": 2},
    "two replicas": {"ddp": True},
    "two replicas in bf16": {"ddp": True, "bf16": True},
    "shards": {"ddp": True, "shard": 3},
    "shards in fp16": {"ddp": True, "shard": 3, "fp16": True},
    "tensor parallel": {"tensor_parallel_degree": 2},
    "tensor parallel in bf16": {"tensor_parallel_degree": 2, "bf16": True},
    "compiled": {"ddp": True, "compile": "aot_eager"},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


@sw.step
def train_step(model, x):
    loss = model(x)
    model.backward(loss)
    return loss


def trained(config: dict[str, Any]) -> dict[str, weakref.ref[Any]]:
    """References to what a session of two steps was about."""
    sw.init({"microbatches": 2, "log_every": 0, "wait_timeout_s": 60.0} | config)
    built = Net()
    model = sw.DistributedModel(built)
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        optimizer.zero_grad()
        train_step(model, torch.randn(4, 32))
        optimizer.step()
    sw.shutdown()
    return {"model": weakref.ref(built), "wrapped": weakref.ref(model), "optimizer": weakref.ref(optimizer)}


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found = {}
    for form, config in FORMS.items():
        there = trained(config)
        gc.collect()
        found[form] = [name for name, reference in there.items() if reference() is not None]
    leave(found, sys.argv[1])


if __name__ == "__main__":
    main()
