"""How long it takes to record a step: the first one, and every new sequence length of a run that has recorded another.

    python benchmarks/recording_time.py                     # GPT-2 and a plain tower of 12 layers; one rank, and pp 2
    python benchmarks/recording_time.py --models gpt2 --ranks 1 --profile 30

A new length takes what its first step does, less what the next step of its shape does. Figures are CPU seconds of a
process, the busiest rank's, so that what else the machine does counts as little as can be; wall seconds stand beside.
Models are narrow: how many ops there are decides how long a recording takes, not how wide they are. Of the first step,
which also plans and splits the model, the recording alone counts. Exits with 1 where a new sequence length takes longer
than 0.3 s.
"""

import argparse
import cProfile
import json
import os
import pstats
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import torch
from torch import nn

import shardwright.torch as sw
from shardwright.backends.torch.training.microbatches import RecordedAhead
from shardwright.backends.torch.training.recorded import RecordedSteps

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = (16, 24, 20, 28, 12, 32)
"""The first is that of the first step."""
BATCH, VOCABULARY, WIDTH = 8, 64, 32


class Block(nn.Module):
    """Attention and a feed-forward layer, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class Tower(nn.Module):
    """Blocks in a row, between an embedding and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def built(model: str, layers: int) -> Any:
    torch.manual_seed(0)
    if model == "tower":
        return Tower(layers)
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, int] = {
        "n_layer": layers,
        "n_embd": WIDTH,
        "n_head": 2,
        "vocab_size": VOCABULARY,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


@sw.step
def gpt2_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


@sw.step
def tower_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = model(ids, ids)
    model.backward(loss)
    return loss


def _timed(owner: type, method: str, taken: dict[str, float]) -> None:
    """Add up what calls of a method take."""
    plain = getattr(owner, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            taken["cpu"] += time.process_time() - cpu
            taken["wall"] += time.perf_counter() - wall

    setattr(owner, method, timed)


def run(name: str, ranks: int, layers: int, profiled: int) -> dict[str, Any]:
    """One model on one rank of so many, in this process: CPU and wall seconds of every recording."""
    sw.init({"pipeline_parallel_degree": ranks, "microbatches": 2})
    model = sw.DistributedModel(built(name, layers))
    train_step = gpt2_step if name == "gpt2" else tower_step
    first = {"cpu": 0.0, "wall": 0.0}
    _timed(RecordedSteps, "prepare", first)
    _timed(RecordedAhead, "of", first)
    profile = cProfile.Profile(time.process_time)
    found: dict[str, Any] = {"cpu": [], "wall": [], "recorded": 0}
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(0, VOCABULARY, (BATCH, length))
        taken = []
        before = model.runtime.split_model.bodies.recorded
        for again in range(3):
            if profiled and number and not again:
                profile.enable()
            cpu, wall = time.process_time(), time.perf_counter()
            float(train_step(model, ids).reduce_mean())
            taken.append((time.process_time() - cpu, time.perf_counter() - wall))
            profile.disable()
            if not number and not again:
                found["cpu"].append(first["cpu"])
                found["wall"].append(first["wall"])
        found["recorded"] += model.runtime.split_model.bodies.recorded - before
        for kind, position in (("cpu", 0), ("wall", 1)) if number else ():
            found[kind].append(taken[0][position] - min(other[position] for other in taken[1:]))
    if profiled and int(os.environ.get("RANK", "0")) == 0:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(profiled)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(profiled)
    sw.shutdown()
    return found


def in_processes(name: str, ranks: int, layers: int, profiled: int) -> list[dict[str, Any]]:
    """The same on every rank, each in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH", ""), str(ROOT)) if p)
    common = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if ranks > 1:
        common |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--run", name, "--ranks", str(ranks), "--layers", str(layers)]
    command += ["--profile", str(profiled)]
    processes = [
        subprocess.Popen(
            command, env=common | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"{name} on {ranks} ranks failed")
    return [json.loads(text.splitlines()[-1]) for text in texts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--models", nargs="*", default=["gpt2", "tower"], choices=["gpt2", "tower"])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument(
        "--profile", type=int, default=0, metavar="LINES", help="show where new lengths spend their time"
    )
    parser.add_argument("--run", help="one model in this process")
    given = parser.parse_args()
    if given.run is not None:
        print(json.dumps(run(given.run, given.ranks[0], given.layers, given.profile)))
        return 0
    figures: dict[str, dict[str, float]] = {}
    print(f"{given.layers} layers; CPU seconds of the busiest rank to record a step (wall seconds)")
    print("| model | ranks | first | new lengths, median | longest |")
    print("|---|---|---|---|---|")
    for name in given.models:
        for ranks in given.ranks:
            of_ranks = in_processes(name, ranks, given.layers, given.profile)
            cpu = [max(found["cpu"][n] for found in of_ranks) for n in range(len(LENGTHS))]
            wall = [max(found["wall"][n] for found in of_ranks) for n in range(len(LENGTHS))]
            shown = [(s[0], statistics.median(s[1:]), max(s[1:])) for s in (cpu, wall)]
            row = " | ".join(f"{c:.2f} ({w:.2f})" for c, w in zip(*shown, strict=True))
            print(f"| {name} | {ranks} | {row} |", flush=True)
            recorded = min(found["recorded"] for found in of_ranks)
            figures[f"{name} on {ranks}"] = {"new_s": shown[0][1], "missed": len(LENGTHS) - recorded}
    judged = claims.recording_time(figures)
    print("\n" + judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
