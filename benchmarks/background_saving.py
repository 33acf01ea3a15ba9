"""Checkpoints that are written beside training: by how much they delay it, and the memory that they take.

    python benchmarks/background_saving.py [--write benchmarks/results/background_saving.md]

A GPT-2 trains by AdamW on one rank, which leaves a core to the writing, and on two (stages, replicas with `shard=3`),
whose threads have every core of a small machine for themselves. Rounds in turn, medians of the slower rank: a step
alone; `sw.save_checkpoint` and a step; and the same in the background, with all steps until the checkpoint is complete.
The delay is what these take longer than as many steps alone, over one step; a step has 2,048 tokens for 23
million parameters, which is little beside what such models are trained with. Memory is anonymous memory of the process
(``RssAnon``) while it is saved, above that of the step alone, over the bytes that the rank writes.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import claims
import torch
import torch.distributed as dist
from cpu_ranks import AnonymousMemory, launch

import shardwright.torch as sw

MIB = 2**20
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "pp 2": (2, {"pipeline_parallel_degree": 2}),
    "dp 2, shard 3": (2, {"shard": 3}),
}
REST_S = 0.5
WIDTH, LAYERS, LENGTH, SAMPLES = 512, 6, 256, 8


@sw.step
def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def slowest(seconds: float) -> float:
    took = torch.tensor(seconds)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def rank(config: str, rounds: int, folder: str, out: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sw.init({"ddp": True, "microbatches": 2, **json.loads(config)}, log_every=0)
    torch.manual_seed(0)
    sizes = {
        "n_layer": LAYERS,
        "n_embd": WIDTH,
        "n_head": 8,
        "n_positions": LENGTH,
        "vocab_size": 8192,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    model = sw.DistributedModel(GPT2LMHeadModel(GPT2Config(**sizes)))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    ids = torch.randint(8192, (SAMPLES, LENGTH))

    def step() -> None:
        optimizer.zero_grad()
        train_step(model, ids)
        optimizer.step()

    def save(**how: Any) -> Any:
        return sw.save_checkpoint(folder, "last", **how)

    def run(kind: str) -> tuple[float, int]:
        """Seconds and steps."""
        dist.barrier()
        steps, begun = 0, time.perf_counter()
        pending = None if kind == "alone" else save(background=kind == "beside")
        while True:
            step()
            steps += 1
            # All ranks stop at once: rank 0 knows when the checkpoint is complete.
            done = torch.tensor(float(pending is None or pending.is_done))
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            if done:
                break
        took = time.perf_counter() - begun
        if pending is not None:
            pending.wait()
        time.sleep(REST_S)  # files that were replaced are freed
        return slowest(took), steps

    def most(kind: str) -> int:
        with AnonymousMemory() as memory:  # whose thread takes time of its own
            run(kind)
        return memory.most

    for _ in range(2):
        step()
    save()
    times: dict[str, list[float]] = {"alone": [], "at once": [], "beside": []}
    counts = []
    kinds = list(times)
    for number in range(rounds + 1):
        for kind in kinds[number % 3 :] + kinds[: number % 3]:
            took, steps = run(kind)
            if number:
                times[kind].append(took)
                if kind == "beside":
                    counts.append(steps)
    written = sum(p.stat().st_size for p in Path(folder, "last").glob(f"*-{sw.rank():05d}.*.safetensors"))
    extra = -most("alone") + most("beside")
    told: list[Any] = [None] * sw.size()
    dist.all_gather_object(told, {"extra": extra, "written": written})
    if sw.rank() == 0:
        Path(out).write_text(json.dumps({"times": times, "counts": counts, "ranks": told}))
    sw.shutdown()


def in_mib(found: dict[str, Any], what: str) -> str:
    return " ".join(f"{one[what] / MIB:.0f}" for one in found["ranks"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    delays, memory = {}, {}
    lines = [
        "| plan | a step, s | with a save, s | in the background: delay, s | over a step | steps until complete | "
        "written by a rank, MiB | memory beside, MiB |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in options.cases:
        ranks, config = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            launch(__file__, ranks, json.dumps(config), str(options.rounds), folder, str(out))
            found = json.loads(out.read_text())
        alone, at_once = (statistics.median(found["times"][kind]) for kind in ("alone", "at once"))
        beside = [took - steps * alone for took, steps in zip(found["times"]["beside"], found["counts"], strict=True)]
        delays[name] = statistics.median(beside) / alone
        memory[name] = max(one["extra"] / one["written"] for one in found["ranks"])
        cells = [
            name, f"{alone:.2f}", f"{at_once:.2f}", f"{delays[name] * alone:.2f}", f"{delays[name]:.1%}",
            f"{statistics.median(found['counts']):g}", in_mib(found, "written"), in_mib(found, "extra"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    text = "\n" + "\n".join(lines) + "\n"
    if options.write:
        with options.write.open("a", encoding="utf-8") as file:
            file.write(text)
    judged = claims.background_saving(delays, memory)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        rank(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        sys.exit(main())
