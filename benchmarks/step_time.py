"""Measured step times of two-rank plans against what profiles of this machine predict.

    python benchmarks/step_time.py [--models gpt2 ncf] [--write benchmarks/results/step_time.md]
    python benchmarks/step_time.py --framework jax
    python benchmarks/step_time.py --models gpt2 bert --plans composed

torch: two processes of one thread each, Gloo. JAX: one process with two devices. Profiles (`shardwright profile
--model`, on both at once) and rounds take turns; a round runs every plan, each alone in its processes, as plans that
share them slow each other.

How fast the machine is changes within minutes (products that stay in the cache take up to 1.7 times as long, while
nothing else runs): a profile tells what plans take about when it was taken. So what was measured in a round is held
against the mean of what the profiles before and after it predict, and what counts is the median over the rounds. The
aim is 10%.

``--plans composed``: only plans of a form that the profile does not run itself.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import claims

import shardwright as sw
from shardwright.backends import registry
from shardwright.core.plan.record import Predicted

HERE = Path(__file__).resolve()
MODELS = ("gpt2", "bert", "t5", "resnet", "ncf")
PP, DP, TP = {"pp": 2, "dp": 1, "tp": 1}, {"pp": 1, "dp": 2, "tp": 1}, {"pp": 1, "dp": 1, "tp": 2}
PLANS: dict[str, dict[str, Any]] = {"pp 2": PP, "dp 2": DP, "tp 2": TP}
"""Of a form that the profile runs: pipelines, and one stage on each device or shared by both."""
COMPOSED: dict[str, dict[str, Any]] = {
    "pp 2, gpipe": PP | {"schedule": "gpipe"},
    "pp 2, two stages a rank": PP | {"schedule": "interleaved-1f1b", "virtual_stages": 2},
    "pp 2, cut a unit earlier": PP | {"earlier": 1},
    "pp 2, all recomputed": PP | {"recompute": "full"},
    "pp 2, 16 microbatches": PP | {"microbatches": 16},
    "dp 2, microbatches half as large": DP | {"divided": 2},
    "dp 2, optimizer shared": DP | {"shard": 1},
}
"""Of another form: what is measured is put together otherwise."""
MICROBATCHES = 4
WARM = 6
"""Steps of a launch that are not timed: in the first ones memory comes from the system."""
QUIET = 0.04
"""Of the cores, what others may take while something is measured."""
TWO_DEVICES = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "NPROC": "2",  # a thread for each device, as `shardwright profile` sets it by itself
    # Freed memory stays with the process, else much of a step is page faults, more or fewer from launch to launch.
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
}  # fmt: skip
"""The environment of JAX's launches."""


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


def worker(framework: str, name: str, file: str, steps: int) -> None:
    """Steps of a plan, alone in its processes; prints the seconds they took."""
    model, sample, loss = given(framework, name)
    plan = sw.Plan.load(file)
    own, first, settle = (torch_parts if framework == "torch" else jax_parts)(model, plan)
    batch = {key: own(value) for key, value in sample.items()}
    running = registry.load(framework).compile(plan, model, loss=loss)
    seconds = []
    for step in range(WARM + steps):
        began = time.perf_counter()
        running.step(batch)  # gives the loss of all ranks, so that none is ahead by more than its optimizer
        settle(running)
        if step >= WARM:
            seconds.append(time.perf_counter() - began)
    if first:
        print(json.dumps(seconds))


def planned(graph: sw.Graph, size: int, profile: str, asked: dict[str, Any]) -> sw.Plan:
    """The plan that is asked for, of microbatches as large as the sample unless it says otherwise."""
    asked = {"schedule": "1f1b", "recompute": "none", "shard": 0, "precision": "fp32", "loss_scope": "replica"} | asked
    earlier, divided = asked.pop("earlier", 0), asked.pop("divided", 1)
    size //= divided
    batch = asked.pop("microbatches", MICROBATCHES * divided) * size * asked["dp"]
    cluster = sw.Cluster(profile, devices_per_node=2)
    plan = sw.plan(graph, cluster, batch=batch, microbatch=size, **asked)
    if not earlier:
        return plan
    starts = [max(stage, start - earlier) for stage, start in enumerate(plan.decision.stage_starts)]
    return sw.plan(graph, cluster, batch=batch, microbatch=size, stage_starts=starts, **asked)


def torch_parts(model: Any, plan: sw.Plan) -> Any:
    """How a sample becomes this process's batch, whether it reports, and what waits for the device."""
    import torch

    torch.set_num_threads(1)
    model.train()
    own = plan.decision.batch // plan.decision.dp
    return lambda value: torch.cat([value] * -(-own // len(value)))[:own], os.environ["RANK"] == "0", lambda _: None


def jax_parts(_model: Any, plan: sw.Plan) -> Any:
    """The same in one process for all devices."""
    import jax
    import numpy as np

    whole = plan.decision.batch
    return (
        lambda value: np.concatenate([np.asarray(value)] * -(-whole // len(value)))[:whole],
        True,
        lambda running: jax.block_until_ready(running.state.params),
    )


def launched(framework: str, arguments: list[str], folder: Path) -> str:
    """What the command prints; ``folder`` is for what it compiles. Run again, at most twice, while something else took
    more of the cores than `QUIET`."""
    for _ in range(3):
        (busy, stolen), own = cpu_s(), sum(os.times()[:4])
        began = time.perf_counter()
        said = launched_once(framework, arguments, folder)
        (busy_after, stolen_after), own_after = cpu_s(), sum(os.times()[:4])
        others = (busy_after - busy) - (own_after - own) + (stolen_after - stolen)
        share = others / (time.perf_counter() - began) / (os.cpu_count() or 1)
        if share <= QUIET:
            break
        print(f"<!-- others had {share:.0%} of the cores beside {arguments[0]}: measured again -->", flush=True)
    return said


def cpu_s() -> tuple[float, float]:
    """Seconds of all cores at work, and of those that the host gave to others, since the machine started."""
    fields = [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _waiting, irq, softirq, steal = fields[:8]
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks_per_s, steal / ticks_per_s


def launched_once(framework: str, arguments: list[str], folder: Path, timeout_s: float = 900) -> str:
    command = [sys.executable]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if framework == "torch":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    else:
        environment |= TWO_DEVICES
        # Of a plan's launches the first compiles.
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=(*PLANS, *COMPOSED, "composed"), default=list(PLANS))
    parser.add_argument("--steps", type=int, default=12, help="timed, of every plan in every round")
    parser.add_argument("--rounds", type=int, default=3, help="of a launch of every plan and a profile")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for the profile's own measurements")
    parser.add_argument("--write", type=Path, help="append the table to this file")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "PLAN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    framework = options.framework
    kinds = options.plans
    if "composed" in kinds:  # PyTorch's runtime has no shared optimizer
        kinds = [kind for kind, asked in COMPOSED.items() if framework == "jax" or "shard" not in asked]
    if options.worker:
        worker(framework, *options.worker, options.steps)
        return 0
    lines = [
        "| framework | model | plan | measured | predicted | pipeline | gradients | optimizer | error | of rounds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    found: dict[str, Rounds] = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            for kind, rounds in measured(framework, name, kinds, Path(folder), options).items():
                found[f"{name}, {kind}"] = rounds
                lines.append(f"| {framework} | {name} | {kind} | {rounds.row()} |")
                print(lines[-1], flush=True)
    errors = [abs(rounds.error) for rounds in found.values()]
    single = [abs(error) for rounds in found.values() for error in rounds.errors]
    lines += [
        "",
        f"Within 10%: {within(errors)} of {len(errors)} rows, {within(single)} of {len(single)} rounds; mean error "
        f"of a row {statistics.mean(errors):.1%}, of a round {statistics.mean(single):.1%}.",
        "",
    ]
    print(lines[-2])
    if options.write:
        with options.write.open("a") as file:
            file.write("\n".join(lines) + "\n")
    of_rounds = {plan: rounds.errors for plan, rounds in found.items()}
    judged = claims.step_time(of_rounds, {plan: rounds.error for plan, rounds in found.items()})
    print(judged.verdict())
    return judged.exit_code


def within(errors: Sequence[float]) -> int:
    return sum(error <= 0.1 for error in errors)


@dataclass(frozen=True)
class Rounds:
    """What one plan was measured to take, and predicted to take by the profiles before and after every round."""

    measured_s: list[float]
    predicted: list[Predicted]

    @property
    def errors(self) -> list[float]:
        """Of every round."""
        both = zip(self.predicted, self.predicted[1:], strict=False)
        return [
            (before.step_time_s + after.step_time_s) / 2 / measured - 1
            for (before, after), measured in zip(both, self.measured_s, strict=True)
        ]

    @property
    def error(self) -> float:
        return statistics.median(self.errors)

    def row(self) -> str:
        """Of the table: medians over the rounds, of the error too."""
        parts = ("step_time_s", "pipeline_s", "data_parallel_s", "optimizer_s")
        of_parts = (statistics.median(getattr(one, part) for one in self.predicted) for part in parts)
        cells = [f"{1e3 * seconds:.1f}" for seconds in (statistics.median(self.measured_s), *of_parts)]
        return " | ".join([*cells, f"{self.error:+.1%}", ", ".join(f"{error:+.1%}" for error in self.errors)])


def measured(
    framework: str, name: str, kinds: Sequence[str], folder: Path, options: argparse.Namespace
) -> dict[str, Rounds]:
    """Of every kind of plan."""
    model, sample, loss = given(framework, name)
    graph, size = sw.capture(model, sample, loss), len(next(iter(sample.values())))
    file = str(folder / "plan.json")
    found = {kind: Rounds([], []) for kind in kinds}

    def profiled() -> dict[str, sw.Plan]:
        """The plans by a new profile."""
        profile = str(folder / "profile.toml")
        launched(
            framework,
            ["-m", "shardwright", "profile", profile, "--framework", framework, "--budget", str(options.budget),
             "--model", target(framework, name), "--microbatch", str(size)],
            folder,
        )  # fmt: skip
        plans = {kind: planned(graph, size, profile, (PLANS | COMPOSED)[kind]) for kind in kinds}
        for kind, plan in plans.items():
            found[kind].predicted.append(plan.predicted)
        return plans

    plans = profiled()
    for number in range(options.rounds):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            plans[kind].save(file)
            said = launched(
                framework,
                [str(HERE), "--framework", framework, "--steps", str(options.steps), "--worker", name, file],
                folder,
            )
            found[kind].measured_s.append(statistics.median(json.loads(said.strip().splitlines()[-1])))
        plans = profiled()
    return found


if __name__ == "__main__":
    sys.exit(main())
