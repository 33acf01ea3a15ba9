"""Measured step times of two-rank plans against what a profile of this machine predicts.

    python benchmarks/step_time.py [--models gpt2 ncf] [--steps 10] [--write benchmarks/results/step_time.md]
    python benchmarks/step_time.py --framework jax

torch: two processes of one thread each, Gloo. JAX: one process with two devices. For every model `shardwright profile
--model` runs first, on both at once; then plans with pp 2, dp 2 and tp 2 are made with that profile and run. The aim is
10%.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardwright as sw
from shardwright.backends import protocol

HERE = Path(__file__).resolve()
MODELS = ("gpt2", "bert", "t5", "resnet", "ncf")
PLANS: dict[str, dict[str, int]] = {
    "pp 2": {"pp": 2, "dp": 1, "tp": 1},
    "dp 2": {"pp": 1, "dp": 2, "tp": 1},
    "tp 2": {"pp": 1, "dp": 1, "tp": 2},
}
MICROBATCHES = 4
QUIET = 0.04
"""Of the cores, what others may take while something is measured."""
TWO_DEVICES = (
    "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)


def torch_model(name: str) -> tuple[Any, Any]:
    """A model and one microbatch of it, as the command line takes them."""
    import memory
    import torch

    torch.manual_seed(0)
    return memory.BUILDERS[name](), memory.batch_of(name)


def model_gpt2() -> Any:
    return torch_model("gpt2")


def model_bert() -> Any:
    return torch_model("bert")


def model_t5() -> Any:
    return torch_model("t5")


def model_resnet() -> Any:
    return torch_model("resnet")


def model_ncf() -> Any:
    return torch_model("ncf")


def given(framework: str, name: str) -> tuple[Any, Any, Callable[..., Any] | None]:
    """A model, one microbatch and the loss."""
    if framework == "torch":
        return *torch_model(name), None
    import jax_models

    model, sample, loss = getattr(jax_models, name)()
    return model, sample, loss


def target(framework: str, name: str) -> str:
    """The same for the command line."""
    return f"{HERE}:model_{name}" if framework == "torch" else f"{HERE.with_name('jax_models.py')}:{name}"


def worker(framework: str, name: str, kind: str, profile: str, steps: int) -> None:
    model, sample, loss = given(framework, name)
    degrees = PLANS[kind]
    size = len(next(iter(sample.values())))
    cluster = sw.Cluster(profile, devices_per_node=2)
    pins = {"schedule": "1f1b", "recompute": "none", "shard": 0, "precision": "fp32", "microbatch": size}
    count = MICROBATCHES * degrees["dp"]
    plan = sw.plan(sw.capture(model, sample, loss), cluster, batch=count * size, **degrees, **pins)  # type: ignore[arg-type]
    own, first, settle = (torch_parts if framework == "torch" else jax_parts)(model, count, degrees["dp"])
    batch = {key: own(value) for key, value in sample.items()}
    running = protocol.load(framework).compile(plan, model, loss=loss)
    seconds = []
    for step in range(steps + 2):
        began = time.perf_counter()
        running.step(batch)  # gives the loss of all ranks, so that none is ahead by more than its optimizer
        settle(running)
        if step >= 2:
            seconds.append(time.perf_counter() - began)
    if not first:
        return
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


def torch_parts(model: Any, count: int, replicas: int) -> Any:
    """How a microbatch becomes this process's batch, whether it reports, and what waits for the device."""
    import torch

    torch.set_num_threads(1)
    model.train()
    own = count // replicas
    return lambda value: torch.cat([value] * own), os.environ["RANK"] == "0", lambda _: None


def jax_parts(model: Any, count: int, _replicas: int) -> Any:
    """The same in one process for all devices."""
    import jax
    import numpy as np

    return (
        lambda value: np.concatenate([np.asarray(value)] * count),
        True,
        lambda running: jax.block_until_ready(running.state.params),
    )


def launched(framework: str, arguments: list[str]) -> str:
    """What the command prints. Run again, at most twice, while something else took more of the cores than `QUIET`."""
    for _ in range(3):
        (busy, stolen), own = cpu_s(), sum(os.times()[:4])
        began = time.perf_counter()
        said = launched_once(framework, arguments)
        (busy_after, stolen_after), own_after = cpu_s(), sum(os.times()[:4])
        others = (busy_after - busy) - (own_after - own) + (stolen_after - stolen)
        share = others / (time.perf_counter() - began) / (os.cpu_count() or 1)
        if share <= QUIET:
            break
        print(f"<!-- others had {share:.0%} of the cores beside {arguments[-1]}: measured again -->", flush=True)
    return said


def cpu_s() -> tuple[float, float]:
    """Seconds of all cores at work, and of those that the host gave to others, since the machine started."""
    fields = [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _waiting, irq, softirq, steal = fields[:8]
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks_per_s, steal / ticks_per_s


def launched_once(framework: str, arguments: list[str], timeout_s: float = 900) -> str:
    command = [sys.executable]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if framework == "torch":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    else:
        environment |= {"XLA_FLAGS": TWO_DEVICES, "NPROC": "8"}  # as `shardwright profile` sets it by itself
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for the profile's own measurements")
    parser.add_argument("--write", type=Path, help="append the table to this file")
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "PLAN", "PROFILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    framework = options.framework
    if options.worker:
        worker(framework, *options.worker, options.steps)
        return 0
    lines = [
        "| framework | model | plan | measured (quartiles) | predicted | error | pipeline | gradients | optimizer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            profile = str(Path(folder) / f"{name}.toml")
            size = str(len(next(iter(given(framework, name)[1].values()))))
            launched(
                framework,
                ["-m", "shardwright", "profile", profile, "--framework", framework, "--budget", str(options.budget),
                 "--model", target(framework, name), "--microbatch", size],
            )  # fmt: skip
            for kind in options.plans:
                said = launched(
                    framework,
                    [
                        str(HERE),
                        "--framework",
                        framework,
                        "--steps",
                        str(options.steps),
                        "--worker",
                        name,
                        kind,
                        profile,
                    ],
                )
                found = {key: value * 1e3 for key, value in json.loads(said.strip().splitlines()[-1]).items()}
                error = found["predicted"] / found["measured"] - 1
                errors.append(abs(error))
                lines.append(
                    f"| {framework} | {name} | {kind} | {found['measured']:.1f} ({found['low']:.1f} to "
                    f"{found['high']:.1f}) | {found['predicted']:.1f} | {error:+.1%} | {found['pipeline']:.1f} "
                    f"| {found['data_parallel']:.1f} | {found['optimizer']:.1f} |"
                )
                print(lines[-1], flush=True)
    within = sum(error <= 0.1 for error in errors)
    lines += ["", f"Within 10%: {within} of {len(errors)}; mean error {statistics.mean(errors):.1%}.", ""]
    print(lines[-2])
    if options.write:
        with options.write.open("a") as file:
            file.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
