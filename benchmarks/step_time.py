"""Measured step times of two-rank plans against what a profile of this machine predicts.

    python benchmarks/step_time.py [--models gpt2 ncf] [--steps 10] [--write benchmarks/results/step_time.md]

Two processes of one thread each, Gloo. For every model `shardwright profile --model` runs first, both ranks at once;
then plans with pp 2, dp 2 and tp 2 are made with that profile and run. The aim is 10%.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from memory import NeuralCollaborativeFiltering, batch_of, bert, gpt2, resnet, t5

import shardwright as sw
from shardwright.backends import protocol

BUILDERS = {"gpt2": gpt2, "bert": bert, "t5": t5, "resnet": resnet, "ncf": NeuralCollaborativeFiltering}
PLANS: dict[str, dict[str, int]] = {
    "pp 2": {"pp": 2, "dp": 1, "tp": 1},
    "dp 2": {"pp": 1, "dp": 2, "tp": 1},
    "tp 2": {"pp": 1, "dp": 1, "tp": 2},
}
MICROBATCHES = 4


def of(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model and one microbatch of it, as the command line takes them."""
    torch.manual_seed(0)
    return BUILDERS[name](), batch_of(name)


def model_gpt2() -> Any:
    return of("gpt2")


def model_bert() -> Any:
    return of("bert")


def model_t5() -> Any:
    return of("t5")


def model_resnet() -> Any:
    return of("resnet")


def model_ncf() -> Any:
    return of("ncf")


def plan_of(name: str, degrees: dict[str, int], profile: str) -> tuple[Any, Any, sw.Plan]:
    model, sample = of(name)
    size = len(sample["labels"])
    cluster = sw.Cluster(profile, devices_per_node=2)
    batch = MICROBATCHES * size * degrees["dp"]
    pins = {"schedule": "1f1b", "recompute": "none", "shard": 0, "precision": "fp32", "microbatch": size}
    return model, sample, sw.plan(sw.capture(model, sample), cluster, batch=batch, **degrees, **pins)  # type: ignore[arg-type]


def worker(name: str, kind: str, profile: str, steps: int) -> None:
    torch.set_num_threads(1)
    model, sample, plan = plan_of(name, PLANS[kind], profile)
    batch = {key: torch.cat([value] * MICROBATCHES) for key, value in sample.items()}
    running = protocol.load("torch").compile(plan, model.train())
    seconds = []
    for step in range(steps + 2):
        torch.distributed.barrier()
        began = time.perf_counter()
        running.step(batch)
        torch.distributed.barrier()
        if step >= 2:
            seconds.append(time.perf_counter() - began)
    if os.environ["RANK"] == "0":
        quartiles = statistics.quantiles(seconds, n=4)
        parts = plan.predicted
        print(
            json.dumps(
                {
                    "measured": statistics.median(seconds), "low": quartiles[0], "high": quartiles[2],
                    "predicted": parts.step_time_s, "pipeline": parts.pipeline_s, "optimizer": parts.optimizer_s,
                    "data_parallel": parts.data_parallel_s, "tensor": parts.tensor_collective_s,
                }
            )
        )  # fmt: skip


def launched(arguments: list[str], timeout_s: float = 600) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=BUILDERS, default=list(BUILDERS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--budget", type=float, default=15.0, help="seconds for the profile's own measurements")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "PLAN", "PROFILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker, options.steps)
        return 0
    lines = [
        "# Step times of two-rank plans against prediction",
        "",
        "    python benchmarks/step_time.py",
        "",
        f"torch {torch.__version__}, 2 processes of one thread, {MICROBATCHES} microbatches, AdamW, fp32. Times in ms.",
        "",
        "| model | plan | measured (quartiles) | predicted | error | of it: pipeline | gradients | optimizer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[4:]), flush=True)
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            profile = str(Path(folder) / f"{name}.toml")
            target = f"{Path(__file__).resolve()}:model_{name}"
            size = str(len(of(name)[1]["labels"]))
            launched(
                ["-m", "shardwright", "profile", profile, "--budget", str(options.budget), "--model", target,
                 "--microbatch", size]
            )  # fmt: skip
            for kind in options.plans:
                said = launched(
                    [str(Path(__file__).resolve()), "--steps", str(options.steps), "--worker", name, kind, profile]
                )
                found = {key: value * 1e3 for key, value in json.loads(said.strip().splitlines()[-1]).items()}
                error = found["predicted"] / found["measured"] - 1
                errors.append(abs(error))
                lines.append(
                    f"| {name} | {kind} | {found['measured']:.1f} ({found['low']:.1f} to {found['high']:.1f}) "
                    f"| {found['predicted']:.1f} | {error:+.1%} | {found['pipeline']:.1f} "
                    f"| {found['data_parallel']:.1f} | {found['optimizer']:.1f} |"
                )
                print(lines[-1], flush=True)
    within = sum(error <= 0.1 for error in errors)
    lines += ["", f"Within 10%: {within} of {len(errors)}; mean error {statistics.mean(errors):.1%}."]
    print(lines[-1])
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
