"""Losses of training in bf16 beside FSDP2's, and the distance of both from training in float32.

    python benchmarks/bf16_losses.py [--seeds 5] [--steps 10] [--write benchmarks/results/bf16_losses.md]

A small GPT-2 and a small BERT on the bytes of Python's own documentation (`pydoc_data.topics`), two ranks over Gloo,
32 accumulated microbatches on each, AdamW at 1e-3, sharded parameters. From the same weights, for each seed:

- float32: the plain model in one process over all 64 microbatches;
- ours: ``{"ddp": True, "shard": 3, "bf16": True}``;
- FSDP2: ``MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=float32)`` on every block and the model. Its mean over
  ranks was a sum on the CPU in some versions (pytorch#162338), so sums are forced and the losses carry the scale. That
  this is right is checked in float32 first: its losses are then those of the plain model to 1e-5.

Each loss is the mean of a step's 64. Aims: at every step both losses in bf16 lie within a rounding of bf16 (2⁻⁸
relative) of each other; and over the seeds ours are as near to those in float32 as FSDP2's, or nearer: the mean of the
differences of distance, seed by seed, is at most its standard error.
"""

import argparse
import copy
import json
import math
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import shardwright.torch as sw
from tests.torch.forked import free_port

RANKS, MICROBATCHES, SAMPLES, LENGTH, RATE = 2, 32, 1, 64, 1e-3
VOCABULARY, MASK = 256, 0
Losses = list[float]


def gpt2() -> nn.Module:
    config = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    return GPT2LMHeadModel(
        GPT2Config(**config, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    )


def bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=256, vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


BUILDERS = {"gpt2": gpt2, "bert": bert}


def batches(name: str, seed: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """The whole batch of every step. BERT reads text of which 15% of the bytes are masked, and tells all bytes."""
    text = torch.tensor(list("\n".join(topics.values()).encode()), dtype=torch.int64)
    drawn = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - LENGTH, (RANKS * MICROBATCHES * SAMPLES,), generator=drawn)
        tokens = text[starts[:, None] + torch.arange(LENGTH)]
        masked = torch.rand(tokens.shape, generator=drawn) < (0.15 if name == "bert" else 0.0)
        found.append({"input_ids": tokens.masked_fill(masked, MASK), "labels": tokens})
    return found


def microbatches(batch: dict[str, torch.Tensor], rank: int | None = None) -> list[dict[str, torch.Tensor]]:
    """All of them in order, or those of one rank."""
    parts = [
        dict(zip(batch, split, strict=True)) for split in zip(*(b.split(SAMPLES) for b in batch.values()), strict=True)
    ]
    return parts if rank is None else parts[rank * MICROBATCHES : (rank + 1) * MICROBATCHES]


def plain(model: nn.Module, given: list[dict[str, torch.Tensor]]) -> Losses:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for batch in given:
        optimizer.zero_grad()
        total = 0.0
        for part in microbatches(batch):
            loss = model(**part).loss
            (loss / (RANKS * MICROBATCHES)).backward()
            total += float(loss)
        optimizer.step()
        losses.append(total / (RANKS * MICROBATCHES))
    return losses


def fsdp2(model: nn.Module, given: list[dict[str, torch.Tensor]], dtype: torch.dtype) -> Losses:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in [m for m in model.modules() if type(m).__name__ in ("GPT2Block", "BertLayer")]:
        fully_shard(block, mp_policy=policy)
    wrapped: Any = fully_shard(model, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for batch in given:
        optimizer.zero_grad()
        total = torch.zeros(())
        parts = microbatches(batch, dist.get_rank())
        for number, part in enumerate(parts, 1):
            wrapped.set_requires_gradient_sync(number == len(parts))
            loss = wrapped(**part).loss
            (loss / (RANKS * MICROBATCHES)).backward()
            total += loss.detach().float()
        optimizer.step()
        dist.all_reduce(total)
        losses.append(float(total) / (RANKS * MICROBATCHES))
    return losses


@sw.step
def train_step(model: Any, **batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss, reduction="mean")
    return loss


def ours(model: nn.Module, given: list[dict[str, torch.Tensor]]) -> Losses:
    sw.init({"ddp": True, "shard": 3, "bf16": True, "microbatches": MICROBATCHES, "log_every": 0})
    wrapped = sw.DistributedModel(model)
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=RATE))
    losses = []
    for batch in given:
        optimizer.zero_grad()
        own = microbatches(batch, dist.get_rank())
        found = train_step(wrapped, **{name: torch.cat([part[name] for part in own]) for name in batch})
        optimizer.step()
        total = torch.stack([loss.detach().float() for loss in found.outputs]).sum()
        dist.all_reduce(total)
        losses.append(float(total) / (RANKS * MICROBATCHES))
    sw.shutdown()
    return losses


def measure(rank: int, arguments: argparse.Namespace, port: int, out: str) -> None:
    """What every rank runs; rank 0 writes the losses by model and seed."""
    warnings.simplefilter("ignore")
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, list[dict[str, Losses]]] = {}
    for name in arguments.models:
        for seed in range(arguments.seeds):
            torch.manual_seed(seed)
            model = BUILDERS[name]().train()
            given = batches(name, seed, arguments.steps)
            of_seed = {
                "ours": ours(copy.deepcopy(model), given),
                "fsdp2": fsdp2(copy.deepcopy(model), given, torch.bfloat16),
                "float32": plain(copy.deepcopy(model), given),
            }
            if seed == 0:
                of_seed["fsdp2 in float32"] = fsdp2(copy.deepcopy(model), given[:3], torch.float32)
            found.setdefault(name, []).append(of_seed)
            if rank == 0:
                print(f"{name}, seed {seed}: {of_seed['float32'][-1]:.5f} {of_seed['ours'][-1]:.5f} "
                      f"{of_seed['fsdp2'][-1]:.5f}", flush=True)  # fmt: skip
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def distance(one: Losses, other: Losses) -> float:
    """The mean over steps of the relative difference."""
    return statistics.fmean(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def judged(of_seeds: list[dict[str, Losses]]) -> dict[str, float]:
    """The figures of one model (`claims.bf16_losses`)."""
    apart = [abs(a - b) / abs(b) for s in of_seeds for a, b in zip(s["ours"], s["fsdp2"], strict=True)]
    check = of_seeds[0]["fsdp2 in float32"]
    wrong = [abs(a - b) / abs(b) for a, b in zip(check, of_seeds[0]["float32"][: len(check)], strict=True)]
    ours, theirs = ([distance(s[way], s["float32"]) for s in of_seeds] for way in ("ours", "fsdp2"))
    farther = [a - b for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(farther) / math.sqrt(len(farther)) if len(farther) > 1 else math.nan
    return {
        "apart": max(apart), "peer in float32": max(wrong), "ours": statistics.fmean(ours),
        "fsdp2": statistics.fmean(theirs), "farther": statistics.fmean(farther), "error": error,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(BUILDERS), choices=list(BUILDERS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "losses.json")
        mp.start_processes(measure, args=(arguments, free_port(), out), nprocs=RANKS, start_method="spawn")
        found = json.loads(Path(out).read_text())
    figures = {name: judged(of_seeds) for name, of_seeds in found.items()}
    lines = [
        "# Losses in bf16", "", "    python benchmarks/bf16_losses.py", "",
        f"{arguments.seeds} seeds, {arguments.steps} steps, torch {torch.__version__} on two CPU ranks. Relative "
        "distances, means over steps and seeds;", "farther: ours less FSDP2's, seed by seed.", "",
        "| model | last loss in float32, by seed | ours | FSDP2 | ours from float32 | FSDP2 from float32 | farther | "
        "ours from FSDP2, most at any step |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, of_seeds in found.items():
        last = (" ".join(f"{s[way][-1]:.4f}" for s in of_seeds) for way in ("float32", "ours", "fsdp2"))
        f = figures[name]
        lines.append(
            f"| {name} | {' | '.join(last)} | {f['ours']:.2e} | {f['fsdp2']:.2e} | {f['farther']:.1e} ± "
            f"{f['error']:.1e} | {f['apart']:.1e} |"
        )
    verdict = claims.bf16_losses(figures)
    text = "\n".join([*lines, "", verdict.verdict()]) + "\n"
    print(text)
    if arguments.write:
        arguments.write.write_text(text)
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
