"""An overflow that is forced on rank 1 alone, in float16 with a dynamic loss scale. Writes JSON: what each rank saw.

Usage: overflow.py OUT.json CASE...
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from launched import leave
from torch import nn

import shardwright.torch as sw

CONFIGS: dict[str, dict[str, Any]] = {
    "dp": {}, "pp": {"pipeline_parallel_degree": 2}, "tp": {"tensor_parallel_degree": 2}, "shard 1": {"shard": 1},
    "shard 3": {"shard": 3},
}  # fmt: skip
FORCED = 1


@sw.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def trained(config: dict[str, Any]) -> dict[str, Any]:
    sw.init({"ddp": True, "fp16": True, "microbatches": 2, "log_every": 0, **config})
    torch.manual_seed(2)
    model = sw.DistributedModel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = sw.DistributedOptimizer(inner, dynamic_loss_scale=True, init_scale=256.0, scale_window=2)
    now = [0]

    def force(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf") if now[0] == FORCED else gradient

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3)).chunk(sw.rdp_size())[sw.rdp_rank()]
    overflows, scales, changed = [], [], []
    for step in range(5):
        now[0] = step
        optimizer.zero_grad()
        train_step(model, x)
        if step == 0 and sw.rank() == 1:  # the recording is over: it is the same on all ranks
            next(p for _, p in model.local_named_parameters() if p.dim() == 2 or config.get("shard")).register_hook(
                force
            )
        before = {name: p.clone() for name, p in model.local_named_parameters()}
        states = [t.clone() for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        optimizer.step()
        moved = any(not torch.equal(p, before[name]) for name, p in model.local_named_parameters())
        after = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        same = len(states) == len(after) and all(torch.equal(a, b) for a, b in zip(states, after, strict=True))
        overflows.append(optimizer.overflow)
        scales.append(optimizer.loss_scale)
        changed.append(moved or not same)
    sw.shutdown()
    return {"overflows": overflows, "scales": scales, "changed": changed}


def main(out: str, names: list[str]) -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name in names:
        mine = trained(CONFIGS[name])
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        found[name] = every
    leave(found, out)


main(sys.argv[1], sys.argv[2:])
