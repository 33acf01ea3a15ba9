"""Slices of one sequence, really run: two local ranks of one thread, one sequence, beside the same pipeline unsliced.

    python benchmarks/sliced_steps.py [--rounds 9] [--write benchmarks/results/token_slices.md]

A causal transformer of 8 layers, width 384, on two stages; one sequence of 1,024 tokens, so one microbatch. In one run,
a round of one step of each after the other: whole sequences; the planner's lengths; ten other ways to cut
it; torch's own pipeline with the one microbatch that it can have. Figures are medians of rounds, a step ends when the
slower rank ends, and the first gradients of every form are held against those of whole sequences.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import torch
import torch.distributed as dist
from cpu_ranks import launch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

import shardwright
import shardwright.torch as sw
from tests.comparison import Comparison

TOKENS, WIDTH, HEADS, LAYERS, WORDS, RANKS = 1024, 384, 6, 8, 1024, 2
OTHERS = (
    (512, 512), (256,) * 4, (128,) * 8, (64,) * 16, (342, 341, 341), (640, 384), (384, 640), (400, 300, 200, 124),
    (320, 256, 192, 160, 96), (205, 205, 205, 205, 204),
)  # fmt: skip


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, s, 3, HEADS, w // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return loss_of(self.head(self.norm(x)), wanted)


def loss_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


@sw.step
def train_step(model, tokens):
    loss = model(tokens, tokens)
    model.backward(loss, reduction="mean")
    return loss


def ours(graph: shardwright.Plan, given: torch.Tensor, **slices: object) -> tuple[tuple[int, ...], nn.Module]:
    cluster = shardwright.Cluster("cpu", devices_per_node=RANKS)
    plan = shardwright.plan(
        graph, cluster, batch=1, pp=RANKS, tp=1, dp=1, schedule="1f1b", recompute="none", precision="fp32", **slices
    )
    return plan.decision.slice_lengths, sw.DistributedModel(Model(), plan=plan)


def torchs(given: torch.Tensor) -> Callable[[], None]:
    """A step of torch's own pipeline of one microbatch, of the same layers on each rank."""
    whole, rank = Model(), dist.get_rank()
    half = LAYERS // 2
    first = nn.Sequential(whole.embedding, *whole.layers[:half])
    last = nn.Sequential(*whole.layers[half:], whole.norm, whole.head)
    stage = PipelineStage((first, last)[rank], rank, RANKS, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 1, loss_of)

    def step() -> None:
        if rank == 0:
            schedule.step(given)
        else:
            schedule.step(target=given)

    return step


def timed(step: Callable[[], object]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - begun


def run(rounds: int, out: Path) -> None:
    dist.init_process_group("gloo")
    sw.init({"pipeline_parallel_degree": RANKS, "microbatches": 1})
    given = torch.randint(0, WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    graph = shardwright.capture(Model(), (given, given))
    models = {"whole": ours(graph, given)[1]}
    chosen, models["the planner's"] = ours(graph, given, slices="auto")
    models |= {" + ".join(map(str, lengths)): ours(graph, given, slice_lengths=list(lengths))[1] for lengths in OTHERS}
    steps: dict[str, Callable[[], object]] = {
        name: (lambda model=model: train_step(model, given)) for name, model in models.items()
    }
    steps["torch's pipeline"] = torchs(given)
    found: dict[str, dict[str, torch.Tensor | None]] = {}
    for name, step in steps.items():
        step()
        if name in models:
            held = dict(models[name].local_named_parameters())
            found[name] = {key: None if p.grad is None else p.grad.clone() for key, p in held.items()}
    same = Comparison("slices")
    for name, gradients in found.items():
        same.where = name
        same.gradients(gradients, found["whole"], part=True)
    same.require("gradients")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(timed(step))
    if dist.get_rank() == 0:
        lines = [f"{name}|{statistics.median(taken)}" for name, taken in times.items()]
        out.write_text("\n".join([" + ".join(map(str, chosen)) or "whole", *lines]))
    sw.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", type=Path, help="append the table to this file")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS, type=Path)
    parser.add_argument("--out", help=argparse.SUPPRESS, type=Path)
    options = parser.parse_args()
    if options.rank_of is not None:
        run(options.rounds, options.rank_of)
        return
    out = Path("sliced_steps.out").resolve()
    try:
        launch(__file__, RANKS, str(out), "--rounds", str(options.rounds))
        chosen, *rows = out.read_text().splitlines()
    finally:
        out.unlink(missing_ok=True)
    times = {name: float(taken) for name, taken in (row.split("|") for row in rows)}
    lines = ["| slices | step, ms | whole over it |", "|---|---|---|"]
    for name, taken in times.items():
        said = f"{name}: {chosen}" if name == "the planner's" else name
        lines.append(f"| {said} | {taken * 1e3:.1f} | {times['whole'] / taken:.2f} |")
    print("\n".join(lines))
    if options.write is not None:
        with options.write.open("a") as file:
            file.write("\n".join(lines) + "\n")
    judged = claims.sliced_steps(times)
    print(judged.verdict())
    sys.exit(judged.exit_code)


if __name__ == "__main__":
    main()
