"""Pipeline ranks, one of which dies or stops answering in the middle of a step. Usage: dying.py exit|stuck VICTIM."""

import os
import sys

import torch
from launched import dying
from torch import nn

import shardwright.torch as sw

HOW, VICTIM = sys.argv[1], int(sys.argv[2])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


@sw.step
def train_step(model, x):
    loss = model(x)
    model.backward(loss)
    return loss


def main() -> None:
    sw.init(
        {
            "pipeline_parallel_degree": int(os.environ["WORLD_SIZE"]),
            "microbatches": 4,
            "wait_timeout_s": 600.0 if HOW == "exit" else 8.0,
        }
    )
    torch.manual_seed(0)
    model = sw.DistributedModel(Model())
    train_step(model, torch.ones(8, 16))
    sw.barrier()
    if sw.rank() == VICTIM:
        block = next(m for m in model.module.layers if not m.linear.weight.is_meta)
        block.register_forward_pre_hook(dying(HOW))
    train_step(model, torch.ones(8, 16))


if __name__ == "__main__":
    main()
