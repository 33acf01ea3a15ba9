"""Does a long run grow? Memory, threads and open files of every rank over many steps.

    python benchmarks/soak.py --models t5            # 500 steps on two processes
    python benchmarks/soak.py --models t5 --steps 2000 --pipelines zb-h1
    python benchmarks/soak.py --models dynamic --ranks 3 --pipelines interleaved

`dynamic` takes as many layers as the values of each microbatch ask for, and runs by message passing.

Resident memory is read every step; its slope is that of a least-squares line through what follows the first 100 steps,
in which allocators and caches fill up. Limits: less than 1 MiB per 100 steps, as many threads and files at the end as
after 100 steps.
"""

import argparse
import os
import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import shardwright.torch as sw

MICROBATCHES, WARM_UP = 4, 100
LIMIT_MIB = 1.0
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Dynamic(nn.Module):
    """As many layers as the values ask for, and one that is used again where they do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        h = self.embed(input_ids)
        for layer in self.layers[: 3 + int(h.detach().abs().sum()) % 4]:
            h = layer(h)
            if float(h.detach().mean()) > 0:
                h = self.layers[0](h)
        return SimpleNamespace(loss=F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten()))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "t5":
        return T5ForConditionalGeneration(
            T5Config(num_layers=2, d_model=64, num_heads=2, d_kv=32, d_ff=128, vocab_size=256, decoder_start_token_id=0)
        )
    if name == "dynamic":
        return Dynamic()
    raise SystemExit(f"--models: no model is named {name!r}: t5 and dynamic are")


def batch(step: int) -> dict[str, torch.Tensor]:
    """Of two lengths in turn, so that two programs are under way."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(2, 256, (8, 16 + 4 * (step % 2)), generator=generator)
    return {"input_ids": ids, "labels": ids}


@sw.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def state() -> tuple[float, int, int]:
    """Resident memory in MiB, threads, open files."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return resident, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def soak(name: str, steps: int, pipeline: str) -> bool:
    sw.init({"pipeline_parallel_degree": dist.get_world_size(), "microbatches": MICROBATCHES, "pipeline": pipeline})
    model = sw.DistributedModel(build(name))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    resident, threads, files = [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        float(train_step(model, batch(step)).all_reduce_mean())
        optimizer.step()
        for store, value in zip((resident, threads, files), state(), strict=True):
            store.append(value)
    sw.shutdown()
    slope = 100 * float(np.polyfit(np.arange(steps - WARM_UP), resident[WARM_UP:], 1)[0])
    own = (slope, resident[-1], threads[WARM_UP], threads[-1], files[WARM_UP], files[-1])
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    good = True
    for rank, (mib, last, threads_then, threads_now, files_then, files_now) in enumerate(every):  # type: ignore[misc]
        good &= mib < LIMIT_MIB and threads_now <= threads_then and files_now <= files_then
        if dist.get_rank() == 0:
            print(
                f"| {name} | {pipeline} | {steps} | {rank} | {mib:+.3f} | {last:.0f} | {threads_then} → {threads_now} "
                f"| {files_then} → {files_now} |",
                flush=True,
            )
    return good


def work(rank: int, ranks: int, port: int, models: list[str], steps: int, pipelines: list[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if rank == 0:
        print("| model | schedule | steps | rank | MiB per 100 steps | MiB at the end | threads | files |")
        print("|---|---|---|---|---|---|---|---|")
    good = [soak(name, steps, pipeline) for name in models for pipeline in pipelines]
    dist.destroy_process_group()
    if not all(good):
        raise SystemExit("grows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["t5"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--pipelines", nargs="+", default=["1f1b", "zb-h1"])
    parser.add_argument("--port", type=int, default=29521)
    given = parser.parse_args()
    if given.steps < 2 * WARM_UP:
        parser.error(f"--steps: at least {2 * WARM_UP}, of which the first {WARM_UP} are warm-up")
    os.environ["OMP_NUM_THREADS"] = "1"
    print("# A long run\n\n    " + " ".join(["python", *sys.argv]) + "\n")
    mp.spawn(work, args=(given.ranks, given.port, given.models, given.steps, given.pipelines), nprocs=given.ranks)


if __name__ == "__main__":
    main()
