"""Replicas beside torch's own: DistributedDataParallel, and `fully_shard` (FSDP2).

    python benchmarks/data_parallel.py                          # all models, whole replicas and sharded parameters
    python benchmarks/data_parallel.py --models bert --rounds 9 --levels 3

Two processes of one thread train the same model on the same batch, one way after the other in each round:

- whole replicas (shard 0) beside DDP with gradients as views of buckets, at the best of five bucket sizes;
- sharded parameters (shard 3) beside FSDP2, at the best of two wrappings (every block, or the model alone), gathered
  module by module, or with `--gathered-stages 1` once a step.

A repetition starts at a barrier and ends when the slower process ends: forward, backward, exchange and the step of
SGD. Losses and every gradient are compared with those of the peer in the same program. Figures are medians over rounds;
the ratio is the median of the ratios of one round, with the upper 95% bound of a bootstrap of that median. What is
hidden of the exchange is 1 - (step - step without an exchange) / (the sums of the same gradients, alone), for whole
replicas: both ways have a `no_sync`. Bytes are what a rank sends, counted in the collectives' arguments by their
algorithms: an all-reduce of n bytes over r ranks is 2 n (r - 1) / r, a gather or a scatter of parts n (r - 1) / r.
Ranks of one host read each other's memory in place of what the collectives send: what a rank reads is counted with it,
and `--backend gloo` has everything go through Gloo, as between hosts. Memory is the peak of live storages in a step, by
torch's MemTracker.
"""

import argparse
import copy
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from tracked import LiveStorages
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForMaskedLM

import shardwright.torch as sw
from tests.comparison import Comparison
from tests.torch.forked import free_port

BUCKETS_MB = (1, 5, 25, 50, 100)
RANKS = 2


class Ncf(nn.Module):
    """Neural collaborative filtering (He et al., arXiv 1708.05031): two large embeddings and a small tower."""

    def __init__(self, users: int = 40_000, items: int = 8_000, width: int = 64) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.tower = nn.Sequential(
            nn.Linear(2 * width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, user: torch.Tensor, item: torch.Tensor, label: torch.Tensor) -> Any:
        found = self.tower(torch.cat([self.user(user), self.item(item)], -1)).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(found, label)


def gpt() -> nn.Module:
    sizes = {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def _bert(kind: Any, config: Any) -> nn.Module:
    return kind(config(num_hidden_layers=4, hidden_size=384, num_attention_heads=6, intermediate_size=1536,
                       vocab_size=30_000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))  # fmt: skip


def _text(vocabulary: int, samples: int, length: int, rank: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(2, vocabulary, (samples, length), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": tokens, "labels": tokens}


def _ratings(rank: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(rank)
    return {"user": torch.randint(0, 40_000, (512,), generator=drawn),
            "item": torch.randint(0, 8_000, (512,), generator=drawn),
            "label": torch.randint(0, 2, (512,), generator=drawn).float()}  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, torch.Tensor]]]] = {
    "gpt": (gpt, lambda rank: _text(8192, 4, 64, rank)),
    "bert": (lambda: _bert(BertForMaskedLM, BertConfig), lambda rank: _text(30_000, 2, 32, rank)),
    "roberta": (lambda: _bert(RobertaForMaskedLM, RobertaConfig), lambda rank: _text(30_000, 2, 32, rank)),
    "ncf": (Ncf, _ratings),
}


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


@sw.step
def train_step(model, batch):
    loss = loss_of(model(**batch))
    model.backward(loss, reduction="mean")
    return loss


class Way:
    """One way of training: a step, and the gradients that it leaves, whole; ``no_sync``: a context of steps without an
    exchange; ``read_bytes``: the bytes that this rank has read from the memory of others so far."""

    def __init__(
        self, name: str, step: Callable[[], float], update: Callable[[], None], gradients: Callable[[], Any],
        no_sync: Callable[[], AbstractContextManager[Any]] | None, read_bytes: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self.name, self._step, self._update, self.gradients = name, step, update, gradients
        self.no_sync, self.read_bytes = no_sync, read_bytes

    def run(self, *, update: bool = True) -> float:
        loss = self._step()
        if update:
            self._update()
        return loss


def peers(model: nn.Module, batch: dict[str, torch.Tensor], level: int) -> list[Way]:
    found = []
    for size in BUCKETS_MB if level == 0 else (0, 1):
        own = copy.deepcopy(model)
        if level == 0:
            wrapped: Any = DistributedDataParallel(own, bucket_cap_mb=size, gradient_as_bucket_view=True)
            name = f"DDP {size} MB"
        else:
            blocks = [m for m in own.modules() if type(m).__name__ in ("GPT2Block", "BertLayer", "RobertaLayer")]
            for block in blocks if size else ():
                fully_shard(block)
            wrapped = fully_shard(own)
            # A mean over ranks is wrong on the CPU in some versions: a sum, and the scale in the loss.
            for module in own.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            name = f"FSDP2 {'blocks' if size else 'model'}"
            if size and not blocks:
                continue
        found.append(_plain(name, wrapped, own, batch, 1.0 if level == 0 else 1.0 / dist.get_world_size()))
    return found


def _plain(name: str, wrapped: Any, own: nn.Module, batch: dict[str, torch.Tensor], scale: float) -> Way:
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(wrapped(**batch))
        (loss * scale).backward()
        return float(loss)

    def gradients() -> dict[str, torch.Tensor | None]:
        return {n: _full(p.grad) for n, p in own.named_parameters()}

    return Way(name, step, lambda: optimizer.step() and None, gradients, getattr(wrapped, "no_sync", None))


def _full(gradient: Any) -> torch.Tensor | None:
    if gradient is None:
        return None
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).detach().clone()


def ours(model: nn.Module, batch: dict[str, torch.Tensor], level: int, gathered: int, backend: str) -> Way:
    sw.init({"ddp": True, "shard": level, "microbatches": 1, "gathered_stages": gathered if level == 3 else 0,
             "ddp_dist_backend": backend})  # fmt: skip
    wrapped = sw.DistributedModel(model)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))

    def step() -> float:
        optimizer.zero_grad()
        return float(train_step(wrapped, batch).outputs[0])

    def gradients() -> dict[str, torch.Tensor | None]:
        parts, found = wrapped.runtime.split_model.parts, {}
        for name, p in sorted(wrapped.local_named_parameters()):
            gradient = p.grad
            if parts.is_part(name):
                gradient = parts.whole(name, torch.empty(0) if gradient is None else gradient)
            found[name] = gradient.detach().clone()
        return found

    what = f", {'model' if gathered else 'modules'}" if level == 3 else ""
    no_sync = wrapped.no_sync if level == 0 else None

    def read_bytes() -> int:
        data = wrapped.runtime.split_model.gradients.data
        return 0 if data is None else data.read_bytes

    return Way(f"ours, shard {level}{what}", step, lambda: optimizer.step() and None, gradients, no_sync, read_bytes)


class Sent:
    """The bytes that this rank sends, by the arguments of the collectives."""

    def __init__(self) -> None:
        self.total = 0.0

    def mode(self) -> Any:
        sent, ranks = self, dist.get_world_size()
        shares = {"allreduce_": 2.0, "_allgather_base_": 1.0, "_reduce_scatter_base_": 1.0, "alltoall_base_": 1.0,
                  "allgather_": 1.0, "reduce_scatter_": 1.0, "broadcast_": 1.0}  # fmt: skip

        class Counting(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                name = func._schema.name.partition("::")[2]
                if func.namespace == "c10d" and name == "send":
                    sent.total += sum(t.nbytes for t in torch.utils._pytree.tree_leaves(args[0]))
                elif func.namespace == "c10d" and name in shares:
                    tensors = [t for t in torch.utils._pytree.tree_leaves(args[0]) if isinstance(t, torch.Tensor)]
                    if name == "_reduce_scatter_base_":
                        tensors = [args[1]]
                    size = sum(t.nbytes for t in tensors)
                    sent.total += shares[name] * size * (ranks - 1) / ranks
                return func(*args, **(kwargs or {}))

        return Counting()


def measure(rank: int, arguments: argparse.Namespace, port: int, found: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                   "WORLD_SIZE": str(arguments.ranks), "LOCAL_RANK": str(rank)}  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks)
    for name in arguments.models:
        for level in arguments.levels:
            _measure(rank, name, level, arguments, found)
    dist.destroy_process_group()


def _measure(rank: int, name: str, level: int, arguments: argparse.Namespace, found: Any) -> None:
    make, batch_of = MODELS[name]
    torch.manual_seed(0)
    model, batch = make(), batch_of(rank)
    ways = peers(model, batch, level)
    ways.append(ours(model, batch, level, arguments.gathered_stages, arguments.backend))
    own = ways[-1]
    reference = None
    for way in ways:
        way.run(update=False)
        gradients_of_way = way.gradients()
        if reference is None:
            reference = gradients_of_way
        if rank == 0:
            Comparison(f"{name}, {way.name}").gradients(gradients_of_way, reference).require("gradients")
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    alone: dict[str, list[float]] = {way.name: [] for way in ways if way.no_sync is not None}
    sums: list[float] = []
    gradients = [torch.zeros(p.shape) for p in model.parameters()]
    drawn = random.Random(1)
    for number in range(arguments.rounds + 1):
        order = list(ways)
        drawn.shuffle(order)
        for way in order:
            taken = _timed(way.run, arguments.steps)
            if number:
                times[way.name].append(taken)
            if number and way.no_sync is not None:
                with way.no_sync():
                    alone[way.name].append(_timed(partial(way.run, update=False), arguments.steps))
                way.run()
        if number and alone:
            sums.append(_timed(partial(_sum, gradients), arguments.steps))
    figures = {way.name: _counted(way) for way in ways}
    sw.shutdown()
    if rank == 0:
        hidden = {
            name: 1 - (statistics.median(times[name]) - statistics.median(taken)) / statistics.median(sums)
            for name, taken in alone.items()
        }
        found.put((name, level, _report(name, level, times, figures, own.name, hidden)))


def _timed(run: Callable[[], Any], steps: int) -> float:
    """Milliseconds of a step, of the slower process."""
    run()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        run()
    taken = torch.tensor([(time.perf_counter() - begun) / steps])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken) * 1e3


def _sum(gradients: list[torch.Tensor]) -> None:
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()


def _counted(way: Way) -> tuple[float, float]:
    """Bytes sent, and the peak of live storages, of one step, in MB."""
    sent, before = Sent(), way.read_bytes()
    with sent.mode():
        way.run()
    read = way.read_bytes() - before
    tracker = LiveStorages()
    with tracker:
        way.run()
    return (sent.total + read) / 1e6, tracker.peak_bytes() / 1e6


def _report(
    name: str, level: int, times: dict[str, list[float]], figures: dict[str, Any], own: str, hidden: dict[str, float]
) -> dict[str, float]:
    """Print the table of a case; the ratios of ours over the best of the peers, and over the least that they hold."""
    best = min((w for w in times if w != own), key=lambda w: statistics.median(times[w]))
    ratios = [a / b for a, b in zip(times[own], times[best], strict=True)]
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(2000))
    print(f"\n## {name}, shard {level}\n")
    print("| way | step_ms, median | hidden of the exchange | sent_mb | peak of live storages made in a step, mb |")
    print("|---|---|---|---|---|")
    for way, taken in times.items():
        sent, peak = figures[way]
        share = f"{hidden[way]:.0%}" if way in hidden else ""
        print(f"| {way} | {statistics.median(taken):.1f} | {share} | {sent:.2f} | {peak:.1f} |")
    median, bound = statistics.median(ratios), medians[int(0.95 * 2000)]
    print(f"\nOurs takes {median:.3f} of {best} (95%: at most {bound:.3f}).", flush=True)
    least = min(peak for way, (_, peak) in figures.items() if way != own)
    return {"time": median, "sent": figures[own][0] / figures[best][0], "memory": figures[own][1] / least}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--levels", nargs="+", type=int, default=[0, 3])
    parser.add_argument("--gathered-stages", type=int, default=0, help="1: the model is gathered once a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--backend", default="auto", choices=("auto", "gloo"))
    arguments = parser.parse_args()
    context = mp.get_context("spawn")
    found = context.SimpleQueue()
    mp.start_processes(measure, args=(arguments, free_port(), found), nprocs=arguments.ranks, start_method="spawn")
    cases: dict[tuple[str, int], dict[str, float]] = {}
    while not found.empty():
        name, level, ratios = found.get()
        cases[name, level] = ratios
    judged = claims.data_parallel(cases, timed=arguments.ranks == RANKS and arguments.backend == "auto")
    print("\n" + judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
