"""How near the torch runtime comes to the bound of a pipeline, beside torch.distributed.pipelining.

    python benchmarks/pipeline_speed.py                      # m = 8 and 32, and actions under 2 ms
    python benchmarks/pipeline_speed.py --cases 8:large --repetitions 5

Two processes of one thread run 16 equal layers in two stages. In one run, one repetition of each after the other:

- single: the whole model, all microbatches; both processes do it at the same time, so that each core is as busy as in
  a pipeline (the slower of the two counts);
- torch: `torch.distributed.pipelining.Schedule1F1B`;
- ours: `@sw.step` under 1F1B, and under the shortest schedule for the costs that were measured ("best"), which is
  chosen before the repetition begins.

The bound is single · (m + p - 1) / (m · p) for 1F1B, and single / p for any schedule. A repetition starts at a barrier
and ends when the slower process ends. Gradients, and the number of parameters on each rank, are checked in the same
program: every way must give those of the single process. Figures are medians of repetitions with the interval between
the quartiles, and medians of the ratios of one repetition.
"""

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import shardwright.torch as sw
from tests.comparison import Comparison

RANKS, LAYERS = 2, 16
SIZES = {"wide": (1024, 16, 64, 1), "large": (256, 4, 64, 2), "small": (64, 4, 16, 2), "mid": (96, 4, 32, 2)}
"""Width, heads, tokens, samples in a microbatch."""


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(nn.Module):
    def __init__(self, size: str) -> None:
        super().__init__()
        width, heads, *_ = SIZES[size]
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@sw.step
def train_step(model, x, y):
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


class Single:
    def __init__(self, model: Model, m: int) -> None:
        self.model, self.m = model, m
        self.parameters = dict(model.named_parameters())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.model.zero_grad()
        for a, b in zip(x.chunk(self.m), y.chunk(self.m), strict=True):
            (F.mse_loss(self.model(a), b) / self.m).backward()


class Torch:
    def __init__(self, model: Model, m: int, example: torch.Tensor) -> None:
        rank, held = dist.get_rank(), LAYERS // RANKS
        self.part = nn.Sequential(*model.layers[rank * held : (rank + 1) * held])
        self.parameters = {
            f"layers.{rank * held + int(name.split('.')[0])}.{name.split('.', 1)[1]}": p
            for name, p in self.part.named_parameters()
        }
        stage = PipelineStage(self.part, rank, RANKS, torch.device("cpu"), input_args=(example,))
        self.schedule = Schedule1F1B(stage, m, loss_fn=F.mse_loss)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.part.zero_grad()
        if dist.get_rank() == 0:
            self.schedule.step(x)
        else:
            losses: list[torch.Tensor] = []
            self.schedule.step(target=y, losses=losses)


class Ours:
    def __init__(self, model: Model, x: torch.Tensor, y: torch.Tensor) -> None:
        self.model = sw.DistributedModel(model)
        train_step(self.model, x, y)
        assert self.model.runtime.stage_map is not None
        self.first = self.model.runtime.stage_map.schedule
        self.parameters = dict(self.model.local_named_parameters())
        with sw.record_timeline() as timelines:
            for _ in range(5):
                train_step(self.model, x, y)
        self.costs = sw.measured_costs(timelines[2:])
        self.best = self._shortest()

    def _shortest(self) -> sw.Schedule:
        sizes = {"ranks": RANKS, "microbatches": self.first.microbatches}
        built = [sw.Schedule.build(name, costs=self.costs, **sizes) for name in ("zb-h1", "zb-h2", "auto")]
        times = [sw.simulate(schedule, self.costs).makespan_s for schedule in built]
        every: list[object] = [None] * RANKS
        dist.all_gather_object(every, times)
        assert isinstance(every[0], list)
        return built[every[0].index(min(every[0]))]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.model.zero_grad()
        train_step(self.model, x, y)


def timed(run: Callable[[], None]) -> float:
    """Seconds of the slower process."""
    dist.barrier()
    begun = time.perf_counter()
    run()
    taken = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def check(name: str, parameters: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    same = Comparison(name)
    gradients = ({key: p.grad for key, p in held.items()} for held in (parameters, wanted))
    reports: list[Any] = [None] * RANKS
    dist.all_gather_object(reports, same.gradients(*gradients, part=True).report())
    Comparison.of_ranks(reports).require("gradients")
    held = torch.tensor([sum(p.numel() for p in parameters.values())])
    every = [torch.zeros_like(held) for _ in range(RANKS)]
    dist.all_gather(every, held)
    whole = sum(p.numel() for p in wanted.values())
    assert [int(n) for n in every] == [whole // RANKS] * RANKS, (name, every, whole)


def interval(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.3f} to {high:.3f}"


def case(m: int, size: str, repetitions: int) -> dict[str, float]:
    """Medians of 1F1B's time over its bound, and over torch's."""
    width, _, tokens, samples = SIZES[size]
    x, y = torch.randn(2, m * samples, tokens, width, generator=torch.Generator().manual_seed(1))
    sw.init({"pipeline_parallel_degree": RANKS, "microbatches": m, "pipeline": "1f1b"})
    plain = Model(size)
    single, torchs = Single(plain, m), Torch(copy.deepcopy(plain), m, x[:samples])
    ours = Ours(copy.deepcopy(plain), x, y)
    ways = {
        "single": single.step,
        "torch 1f1b": torchs.step,
        "ours 1f1b": ours.step,
        f"ours {ours.best.name}": ours.step,
    }
    schedules = {"ours 1f1b": ours.first, f"ours {ours.best.name}": ours.best}
    for name, step in ways.items():
        if name in schedules:
            ours.model.use_schedule(schedules[name])
        step(x, y)
        step(x, y)
        if name != "single":
            check(name, torchs.parameters if name.startswith("torch") else ours.parameters, single.parameters)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, step in ways.items():
            if name in schedules:
                ours.model.use_schedule(schedules[name])
            times[name].append(timed(partial(step, x, y)))
    medians: dict[str, dict[str, float]] = {}
    of_bound: dict[str, list[float]] = {}
    for name, found in times.items():
        bubble = (m + RANKS - 1) / m if "1f1b" in name else 1.0
        share = bubble / RANKS if name != "single" else 1.0
        ratios = [a / (b * share) for a, b in zip(found, times["single"], strict=True)]
        peers = [a / b for a, b in zip(found, times["torch 1f1b"], strict=True)]
        of_bound[name] = ratios
        medians[name] = {"bound": statistics.median(ratios), "torch": statistics.median(peers)}
    if dist.get_rank() == 0:
        costs = ours.costs
        actions = ", ".join(f"{1e3 * (f + b):.2f}" for f, b in zip(costs.forward_s, costs.backward_s, strict=True))
        print(f"\n## m = {m}, {size} layers (width {width}, {samples} x {tokens} tokens)\n")
        print(f"Forward and backward of one microbatch on each stage: {actions} ms; {repetitions} repetitions.\n")
        print("| way | step_ms, median | quartiles | times its bound, median | quartiles | times torch, median |")
        print("|---|---|---|---|---|---|")
        for name, found in times.items():
            print(
                f"| {name} | {1e3 * statistics.median(found):.1f} | {interval([1e3 * t for t in found])} "
                f"| {medians[name]['bound']:.3f} | {interval(of_bound[name])} | {medians[name]['torch']:.3f} |",
                flush=True,
            )
    sw.shutdown()
    return medians["ours 1f1b"]


def work(rank: int, port: int, cases: list[str], repetitions: int, found: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for given in cases:
        m, size = given.split(":")
        medians = case(int(m), size, repetitions)
        if rank == 0:
            found.put((given, medians))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["8:large", "32:large", "32:small"], metavar="M:SIZE")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--port", type=int, default=29517)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print("# Speed of a pipeline of two processes\n\n    " + " ".join(["python", *sys.argv]))
    found = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, args=(given.port, given.cases, given.repetitions, found), nprocs=RANKS)
    judged = claims.pipeline_speed(dict(found.get() for _ in given.cases))
    print("\n" + judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
