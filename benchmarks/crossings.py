"""What a call of a module on another rank costs, beside the same call here.

    torchrun --nproc-per-node 2 benchmarks/crossings.py

A model calls a module that scales its input many times in a row. With the module on the same rank a call costs what
Python and autograd take; on the other rank two messages go for the forward and two for the backward. The difference is
the overhead of a crossing; the time of a bare send and its answer over the same Gloo group is the floor of each pair.
"""

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright.torch as sw
from shardwright.backends.torch.training.messages.owners import Owners


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Caller(nn.Module):
    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.here = Scale()
        self.there = Scale()

    def forward(self, x: torch.Tensor, away: bool) -> torch.Tensor:
        module = self.there if away else self.here
        for _ in range(self.calls):
            x = module(x)
        return x.sum()


@sw.step
def forward(model: Any, x: torch.Tensor, away: bool) -> torch.Tensor:
    loss: torch.Tensor = model(x, away)
    return loss


@sw.step
def train(model: Any, x: torch.Tensor, away: bool) -> torch.Tensor:
    loss: torch.Tensor = model(x, away)
    model.backward(loss)
    return loss


def measure(run: Any, repeats: int) -> float:
    """The median over repeated runs, in seconds."""
    found = []
    for _ in range(repeats):
        sw.barrier()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def echo(size_bytes: int, count: int) -> float:
    """Seconds of a message and its answer, from rank 0's view."""
    group = dist.group.WORLD
    buffer = torch.zeros(size_bytes, dtype=torch.uint8)
    sw.barrier()
    start = time.perf_counter()
    for _ in range(count):
        for sender in (0, 1):
            if sw.rank() == sender:
                dist.send(buffer, 1 - sender, group)
            else:
                dist.recv(buffer, sender, group)
    return (time.perf_counter() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kib", type=int, nargs="+", default=[1, 64, 1024])
    given = parser.parse_args()
    torch.set_num_threads(1)
    sw.init({"pipeline_parallel_degree": 2, "microbatches": 1, "pipeline_mode": "messages", "wait_timeout_s": 120.0})
    model = sw.DistributedModel(Caller(given.calls))
    owners = Owners.of(model.module, {"here": 0, "there": 1})
    model.runtime.run_by_messages(owners, active=None, schedule="interleaved")
    if sw.rank() == 0:
        print("tensor      forward    forward + backward    bare message and answer   (microseconds for each call)")
    for kib in given.kib:
        x = torch.ones(1, kib * 256)
        costs = []
        for step in (forward, train):
            away, here = (measure(partial(step, model, x, away), given.repeats) for away in (True, False))
            costs.append((away - here) / given.calls * 1e6)
        bare = statistics.median(echo(kib * 1024, 20) for _ in range(given.repeats)) * 1e6
        if sw.rank() == 0:
            print(f"{kib:5} KiB  {costs[0]:9.0f}  {costs[1]:20.0f}  {bare:23.0f}")
    sw.shutdown()


if __name__ == "__main__":
    main()
