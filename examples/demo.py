"""One plan, two frameworks: GPT-2 in PyTorch and in JAX, captured, planned, compared and trained on the CPU.

    python examples/demo.py [--steps 20] [--output demo_output]

Exits with 1 when a planned run's loss differs from its reference run's by more than 1e-5 of it, at any step.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the neighbours, wherever this was started

import twins  # noqa: E402
from rich.console import Console  # noqa: E402

import shardwright as sw  # noqa: E402
from shardwright.core.values.amounts import count_text, seconds_text  # noqa: E402
from shardwright.report import save_perfetto, timeline_svg  # noqa: E402
from shardwright.report.tables import comparison_view  # noqa: E402

TOLERANCE = 1e-5
TIME_LIMIT_S = 300
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="how many to train (default: 20)")
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="where files go (default: demo_output)"
    )
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    stay_on_the_cpu()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended too
    began = time.monotonic()

    graphs = capture_both()
    plans = plan_both(graphs, given.output)
    alike = compare_both(plans)
    draw(plans["torch", "pipeline"], given.output)
    runs = {
        "PyTorch": train_torch(given.output / "torch_pp2_dp2.json", given.steps, given.output),
        "JAX": train_jax(given.output / "jax_dp4_tp2.json", given.steps, given.output),
    }

    headline("Result")
    for framework, run in runs.items():
        far = run.largest_difference
        verdict = "[green]the unsplit model's losses[/]" if far <= TOLERANCE else f"[red]over {TOLERANCE:.0e} apart[/]"
        console.print(f"  {framework:8} {verdict}: at most {far:.1e} apart (relative), over {given.steps} steps")
    between = max(abs(a / b - 1) for a, b in zip(runs["PyTorch"].losses, runs["JAX"].losses, strict=True))
    console.print(f"  PyTorch's planned run and JAX's: at most {between:.1e} apart")
    if not alike:
        console.print("  [red]the twins' plans decide differently[/]")
    console.print(f"  in {given.output}/: {', '.join(sorted(path.name for path in given.output.iterdir()))}")
    console.print(f"  {time.monotonic() - began:.0f} s")
    return int(not alike or any(run.largest_difference > TOLERANCE for run in runs.values()))


@dataclass(frozen=True)
class Run:
    """A planned run beside its reference run."""

    losses: tuple[float, ...]
    largest_difference: float
    """Relative, over all steps."""


def stay_on_the_cpu() -> None:
    """For this process and those that it starts: a machine with one GPU has not the devices that the plans are for. The
    frameworks read this when they are imported, later."""
    os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"


def capture_both() -> dict[str, sw.Graph]:
    """The twins as the core sees them. The weights are the same; capture does not look at them."""
    headline("1  Capture: one small GPT-2, from Hugging Face in PyTorch and written in Flax NNX")
    import gpt2_flax
    import jax
    import jax.numpy as jnp
    from flax import nnx

    tokens = twins.batches(1)[0]
    shapes = {"input_ids": jax.ShapeDtypeStruct(tokens.shape, jnp.int32)}
    given = {
        "torch": lambda: (twins.torch_model(), twins.torch_batch(tokens), None),
        "jax": lambda: (
            nnx.eval_shape(lambda: gpt2_flax.create(twins.flax_config())), shapes, gpt2_flax.next_token_loss
        ),
    }  # fmt: skip
    graphs = {}
    for framework, make in given.items():
        model, sample, loss = make()
        start = time.monotonic()
        graphs[framework] = graph = sw.capture(model, sample, loss)
        parameters = sum(graph.tensors[each.tensor].elements(1) for each in graph.parameters)
        took = seconds_text(time.monotonic() - start)
        console.print(
            f"  {framework:6} {graph.model_name}: {count_text(parameters)} parameters, {len(graph.ops)} ops, {took}"
        )
    return graphs


def plan_both(graphs: dict[str, sw.Graph], output: Path) -> dict[tuple[str, str], sw.Plan]:
    """Both twins for both requests: a pipeline on four devices, and tensor parallelism on eight."""
    headline("2  Plan: the same requests for both")
    requests = {
        "pipeline": (4, {"pp": 2, "dp": 2, "tp": 1}, "pp2_dp2"),
        "tensor": (8, {"pp": 1, "dp": 4, "tp": 2}, "dp4_tp2"),
    }
    plans = {}
    for kind, (devices, degrees, suffix) in requests.items():
        cluster = sw.Cluster("cpu", nodes=1, devices_per_node=devices)
        for framework, graph in graphs.items():
            plan = sw.plan(
                graph, cluster, batch=twins.BATCH, microbatch=twins.MICROBATCH, precision="fp32", recompute="none",
                shard=0, frameworks=list(graphs), **degrees,
            )  # fmt: skip
            plan.save(output / f"{framework}_{suffix}.json")
            plans[framework, kind] = plan
        steps = ", ".join(f"{name} {seconds_text(plans[name, kind].predicted.step_time_s)}" for name in graphs)
        console.print(f"  {plan.summary()}")
        console.print(f"    on {cluster}: predicted step {steps} → {{{','.join(graphs)}}}_{suffix}.json")
    return plans


def compare_both(plans: dict[tuple[str, str], sw.Plan]) -> bool:
    """Whether the twins were planned alike."""
    headline("3  Compare: PyTorch's plan and JAX's, decision by decision")
    same = True
    for kind in ("pipeline", "tensor"):
        comparison = sw.compare(plans["torch", kind], plans["jax", kind])
        same = same and comparison.same_decision and not comparison.unexpected
        console.print(comparison_view(comparison, "torch", "jax"))
    return same


def draw(plan: sw.Plan, output: Path) -> None:
    headline("4  Simulate: the pipeline's timeline")
    timeline = sw.simulate(plan)
    picture, trace = output / "timeline.svg", output / "trace.json"
    picture.write_text(timeline_svg(timeline, title=plan.summary()), encoding="utf-8")
    save_perfetto(timeline, trace)
    console.print(f"  {seconds_text(timeline.makespan_s)}, idle at most {max(timeline.bubble_fraction):.1%}")
    console.print(f"  → {picture}, {trace} (open it at ui.perfetto.dev)")


def train_torch(plan: Path, steps: int, output: Path) -> Run:
    """Four processes under torchrun beside one that runs the unsplit model."""
    headline("5  Train in PyTorch: pp 2 × dp 2, four processes; beside it the unsplit model in one")
    import demo_torch

    expected = list(demo_torch.reference(twins.batches(steps)))
    command = [
        "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "4",
        str(HERE / "demo_torch.py"), str(plan), str(steps),
    ]  # fmt: skip
    rows = ((expected[row["step"]], row["loss"]) for row in lines_of(command, output / "torch.log"))
    return print_losses(rows, "pp 2 × dp 2", steps)


def train_jax(plan: Path, steps: int, output: Path) -> Run:
    """One process with eight virtual devices; the unsplit model on one of them."""
    headline("6  Train in JAX: dp 4 × tp 2, eight virtual devices; beside it the unsplit model on one")
    weights = output / "weights.npz"
    twins.save_weights(twins.torch_model(), weights)
    command = [str(HERE / "demo_jax.py"), str(plan), str(weights), str(steps)]
    rows = ((row["reference"], row["loss"]) for row in lines_of(command, output / "jax.log"))
    return print_losses(rows, "dp 4 × tp 2", steps)


def print_losses(rows: Iterator[tuple[float, float]], name: str, steps: int) -> Run:
    """Print every step, (reference, planned), as it comes."""
    console.print(f"  step   reference   {name:>11}   difference", style="dim")
    losses, largest = [], 0.0
    for step, (expected, loss) in enumerate(rows):
        difference = abs(loss - expected) / abs(expected)
        colour = "green" if difference <= TOLERANCE else "red"
        console.print(f"  {step:4}   {expected:9.6f}   {loss:11.6f}   [{colour}]{difference:10.1e}[/]")
        losses.append(loss)
        largest = max(largest, difference) if math.isfinite(difference) else math.inf
    if len(losses) != steps:
        raise SystemExit(f"{len(losses)} steps came back, {steps} were asked for")
    return Run(tuple(losses), largest)


def lines_of(command: list[str], log: Path) -> Iterator[Any]:
    """The lines of JSON that a Python program prints; what else it says goes to ``log``. The program, and what it
    started, ends when this does, and after a time limit."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
    limit = threading.Timer(TIME_LIMIT_S, end, (process,))
    limit.start()
    try:
        for line in process.stdout or ():
            if line.startswith("{"):
                yield json.loads(line)
        code = process.wait()
    finally:
        limit.cancel()
        end(process)
    if code:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise SystemExit(f"{tail}\n{' '.join(command)} ended with {code}; its messages are in {log}")


def end(process: subprocess.Popen[str]) -> None:
    """End a process and all that it started, if any of it still runs."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:  # torchrun ends its workers when it is asked to end
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
        os.killpg(process.pid, signal.SIGKILL)


def headline(text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


if __name__ == "__main__":
    sys.exit(main())
