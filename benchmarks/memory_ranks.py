"""Peak memory of every rank of PyTorch plans against prediction, by torch's own MemTracker.

    python benchmarks/memory_ranks.py [--models gpt2 bert] [--plans "pp 2"] [--write benchmarks/results/memory_ranks.md]

One process of one thread for each rank, over Gloo; AdamW, fp32, gradients made anew in every step. Two ranks: the five
models of `memory.py` and one that is frozen but for maps of low rank, 4 microbatches on each replica; where asked for,
those of `step_models.py`, on four ranks too. Four, and eight: the GPT-2 of `found_plans.py`. Aim: measured ≤ predicted
≤ 1.03 × measured, on every rank. The last columns hold `memory_over_time` against the tracker, action by action.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import claims
import found_plans
import memory
import step_models
import torch
import tracked

import shardwright as sw
from shardwright.backends.capabilities import TORCH_MEMORY
from shardwright.backends.torch.pipeline.action_times import Recorder
from shardwright.backends.torch.training import recorded
from shardwright.core.plan.memory_over_time import memory_over_time
from shardwright.core.schedule.actions import Kind
from tests.models.low_rank import adapted

DEEP = "gpt2, 8 layers of 128"
FROZEN = "gpt2, frozen, low-rank maps beside"
USUAL: dict[str, Any] = {"recompute": "none", "shard": 0, "precision": "fp32", "pp": 1, "dp": 1, "tp": 1,
                         "loss_scope": "replica"}  # fmt: skip
TWO: dict[str, dict[str, Any]] = {
    "pp 2": {"pp": 2, "schedule": "1f1b"},
    "dp 2": {"dp": 2},
    "tp 2": {"tp": 2},
    "dp 2, shard 1": {"dp": 2, "shard": 1},
    "dp 2, shard 2": {"dp": 2, "shard": 2},
    "dp 2, shard 3": {"dp": 2, "shard": 3},
    "dp 2, shard 3, sums at the end": {"dp": 2, "shard": 3, "reduce_after": "last"},
    "dp 2, shard 3, whole": {"dp": 2, "shard": 3, "gathered_stages": 1, "reduce_after": "last"},
    "dp 2, recomputed": {"dp": 2, "recompute": "full"},
    "dp 2, products kept": {"dp": 2, "recompute": "elementwise"},
    "dp 2, half of the products kept": {"dp": 2, "recompute": "alternate"},
    "dp 2, offloaded": {"dp": 2, "recompute": "full", "offloaded_units": "every"},
    "pp 2, recomputed": {"pp": 2, "recompute": "full"},
    "pp 2, products kept": {"pp": 2, "recompute": "elementwise"},
    "pp 2, offloaded": {"pp": 2, "recompute": "full", "offloaded_units": "every"},
    "pp 2, zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "pp 2, zb-h1, recomputed": {"pp": 2, "schedule": "zb-h1", "recompute": "full"},
    "pp 2, zb-h1, products kept": {"pp": 2, "schedule": "zb-h1", "recompute": "elementwise"},
    "pp 2, zb-h1, offloaded": {"pp": 2, "schedule": "zb-h1", "recompute": "full", "offloaded_units": "every"},
    "dp 2, bf16": {"dp": 2, "precision": "bf16"},
    "dp 2, shard 3, bf16": {"dp": 2, "shard": 3, "precision": "bf16"},
    "dp 2, optimizer on the host": {"dp": 2, "shard": 2, "offload_states": "optimizer"},
    "dp 2, parameters on the host": {"dp": 2, "shard": 3, "offload_states": "parameters"},
    "pp 2, optimizer on the host": {"pp": 2, "shard": 2, "offload_states": "optimizer"},
    "pp 2, parameters on the host": {"pp": 2, "shard": 3, "offload_states": "parameters"},
    "pp 2, parameters on the host, recomputed, bf16": {
        "pp": 2,
        "shard": 3,
        "offload_states": "parameters",
        "recompute": "full",
        "precision": "bf16",
    },
}
SLICED: dict[str, dict[str, Any]] = {
    "pp 2, 4 slices": {"pp": 2, "schedule": "1f1b", "slices": 4},
    "pp 2, 4 slices, recomputed": {"pp": 2, "schedule": "1f1b", "slices": 4, "recompute": "full"},
}
"""Of causal models alone, and only where they are asked for."""
FOUR: dict[str, dict[str, Any]] = {
    "pp 4, 1f1b": {"pp": 4, "schedule": "1f1b"},
    "pp 4, gpipe": {"pp": 4, "schedule": "gpipe"},
    "pp 4, zb-h1": {"pp": 4, "schedule": "zb-h1"},
    "pp 4, zb-h1, recomputed": {"pp": 4, "schedule": "zb-h1", "recompute": "full"},
    "pp 4, zb-h1, offloaded": {"pp": 4, "schedule": "zb-h1", "recompute": "full", "offloaded_units": "every"},
    "pp 4, zbv, recomputed": {"pp": 4, "schedule": "zbv", "virtual_stages": 2, "recompute": "full"},
    "pp 2 × dp 2, 1f1b": {"pp": 2, "dp": 2, "schedule": "1f1b"},
    "pp 2 × dp 2, interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2},
    "pp 2 × dp 2, shard 3, 2 of 4 stages": {
        "pp": 2,
        "dp": 2,
        "schedule": "looped-bfs",
        "virtual_stages": 4,
        "shard": 3,
        "gathered_stages": 2,
        "reduce_after": "last",
    },
    "pp 2 × dp 2, shard 3, 1 of 4 stages": {
        "pp": 2,
        "dp": 2,
        "schedule": "interleaved-1f1b",
        "virtual_stages": 4,
        "shard": 3,
        "gathered_stages": 1,
        "reduce_after": "each",
    },
    "pp 2 × tp 2, 1f1b": {"pp": 2, "tp": 2, "schedule": "1f1b"},
    "dp 2 × tp 2": {"dp": 2, "tp": 2},
}
EIGHT: dict[str, dict[str, Any]] = {
    f"pp 2 × dp 2 × tp 2, shard 2, {schedule}, {said}": {
        "pp": 2, "dp": 2, "tp": 2, "shard": 2, "schedule": schedule, "recompute": recompute,
        "stage_starts": [0, 5],
    }
    for schedule in ("1f1b", "zb-h1")
    for said, recompute in (
        ("recomputed", "full"),
        ("recomputed and offloaded", {"transformer.h.[0145]": "offload", "transformer.h.*": "full"}),
    )
}  # fmt: skip
MICROBATCHES, STEPS = 4, 3
LOSSES = ("mixer", "lstm")
"""The models that return their loss."""


def model_and_microbatch(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    if name == FROZEN:
        return adapted(memory.BUILDERS["gpt2"]()).train(), memory.batch_of("gpt2")
    if name in step_models.MORE:
        model, sample = step_models.made(name)
        return model.train(), sample
    if name != DEEP:
        return memory.BUILDERS[name]().train(), memory.batch_of(name)
    tokens = torch.randint(0, found_plans.VOCABULARY, (2, found_plans.LENGTH))
    return found_plans.torch_model(), {"input_ids": tokens, "labels": tokens}


def plans_of(name: str) -> dict[str, dict[str, Any]]:
    if name == DEEP:
        return FOUR | EIGHT
    if name in step_models.MORE:
        return TWO | (SLICED if name == "llama" else {}) | {"pp 4, 1f1b": FOUR["pp 4, 1f1b"]}
    return TWO | SLICED if "gpt2" in name else TWO


def planned(name: str, pins: dict[str, Any]) -> Any:
    model, sample = model_and_microbatch(name)
    pins = USUAL | {"virtual_stages": 1} | pins
    size = len(next(iter(sample.values())))
    cluster = sw.Cluster("cpu", devices_per_node=pins["pp"] * pins["dp"] * pins["tp"])
    count = (8 if name == DEEP else MICROBATCHES * pins["dp"]) * size
    graph, every = sw.capture(model, sample), pins.pop("offloaded_units", None)
    plan = sw.plan(graph, cluster, batch=count, microbatch=size, **pins)
    if every is None:
        return plan
    pins |= {"offloaded_units": plan.recomputed_units, "stage_starts": plan.decision.stage_starts}
    return sw.plan(graph, cluster, batch=count, microbatch=size, **pins)


class Sampler(Recorder):
    """In place of the recorder of times: what is there when actions end, and the most while they ran."""

    tracker: tracked.LiveStorages
    parameters: list[torch.nn.Parameter]
    samples: list[dict[str, int]]

    def start(self, action: Any) -> None:
        super().start(action)
        self.tracker.restart()

    def end(self) -> None:
        super().end()
        made = sum(p.grad.nbytes for p in self.parameters if p.grad is not None)
        self.samples.append({"peak": self.tracker.peak_bytes(), "now": self.tracker.now_bytes(), "gradients": made})


def rank(name: str, plan: str) -> None:
    """What every rank runs: rank 0 prints every rank's peak, and what was there after every action of another step."""
    import shardwright.torch as swt

    swt.init(plan=plan)
    built, sample = model_and_microbatch(name)
    model = swt.DistributedModel(built)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    optimizer = swt.DistributedOptimizer(plain)

    @swt.step
    def train_step(model: Any, **batch: torch.Tensor) -> torch.Tensor:
        given: Any = model(**batch)
        loss: torch.Tensor = given if name in LOSSES else given.loss
        model.backward(loss)
        return loss

    count = sw.Plan.load(plan).microbatches
    batch = {key: torch.cat([value] * count) for key, value in sample.items()}
    del built, sample
    for _ in range(STEPS):
        optimizer.zero_grad()
        there = tracked.held_by(model.runtime)
        with tracked.tracking(there, plain, batch.values()) as tracker:
            train_step(model, **batch)
            optimizer.step()
    peak = tracker.peak_bytes()
    optimizer.zero_grad()
    held = [p for _, p in model.local_named_parameters()]
    recorded.Recorder, model.runtime.split_model.recorders = Sampler, []  # type: ignore[misc]
    with tracked.tracking(there, plain, batch.values()) as tracker:
        Sampler.tracker, Sampler.parameters, Sampler.samples = tracker, held, []
        train_step(model, **batch)
    everyone: list[Any] = [None] * swt.size()
    torch.distributed.all_gather_object(everyone, (peak, Sampler.samples))
    if swt.rank() == 0:
        print(json.dumps(everyone), flush=True)
    swt.shutdown()


def measured(name: str, plan: Any) -> list[tuple[int, list[dict[str, int]]]]:
    """Of every rank the peak, and what was there action by action."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(plan.mesh.size), __file__, "--rank-of", name, "--plan", str(path),
        ]  # fmt: skip
        paths = os.pathsep.join(p for p in (str(found_plans.ROOT), os.environ.get("PYTHONPATH", "")) if p)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-6000:])
    found: list[tuple[int, list[dict[str, int]]]] = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("["))
    )
    return found


def over_time(plan: Any, samples: list[list[dict[str, int]]]) -> tuple[str, str, str]:
    """Predicted over measured, least and most of all actions of all ranks: the fullest moment while it ran; gradients
    when it had ended; after forwards what lies beside parameters, gradients, states and batch."""
    fullest, gradients, activations = [], [], []
    every = memory_over_time(plan, TORCH_MEMORY)
    timeline = sw.simulate(plan)
    for device, found in enumerate(samples):
        number = plan.mesh.coordinates(device)["pp"]
        until = {moment.end_s: moment.memory for moment in every[number]}
        ran = zip(timeline.actions[number], timeline.end_s[number], strict=True)
        computed = [(action, end_s) for action, end_s in ran if action.kind.is_compute]
        for (action, end_s), there in zip(computed, found, strict=True):
            use = until[float(end_s)]
            stays = use.parameters_bytes + use.optimizer_bytes + use.batch_bytes + use.model_buffers_bytes
            fullest.append(use.total_bytes / there["peak"])
            if there["gradients"]:
                gradients.append(use.gradients_bytes / there["gradients"])
            if action.kind is Kind.FORWARD:
                activations.append(use.activations_bytes / max(1, there["now"] - there["gradients"] - stays))
    rows = (fullest, gradients, activations)
    return tuple(f"{min(row):.3f} to {max(row):.3f}" if row else "–" for row in rows)  # type: ignore[return-value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [*memory.BUILDERS, FROZEN, DEEP]
    parser.add_argument("--models", nargs="+", choices=(*usual, *step_models.MORE), default=usual)
    parser.add_argument("--plans", nargs="+", choices=(*TWO, *SLICED, *FOUR, *EIGHT), default=[*TWO, *FOUR, *EIGHT])
    parser.add_argument("--write", type=Path, help="append the table to this file")
    for hidden in ("--rank-of", "--plan"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank(options.rank_of, options.plan)
        return 0
    lines = [
        "| model | plan | measured, MiB by rank | predicted | predicted / measured | fullest moment of each action | "
        "gradients after it | activations after forwards |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    judged: dict[str, list[float]] = {}
    for name in options.models:
        for kind, pins in plans_of(name).items():
            if kind not in options.plans or (name == "resnet" and "bf16" in kind):
                continue  # torch has no batch norm in bf16 beside float32 statistics on CPUs
            plan = planned(name, pins)
            found = measured(name, plan)
            peaks, predicted = [peak for peak, _ in found], plan.predicted.peak_memory_bytes
            ratios = [p / m for p, m in zip(predicted, peaks, strict=True)]
            judged[f"{name}, {kind}"] = ratios
            cells = (" ".join(f"{size / 2**20:.2f}" for size in sizes) for sizes in (peaks, predicted))
            said = " ".join(f"{ratio:.3f}" for ratio in ratios)
            cells = (*cells, said, *over_time(plan, [samples for _, samples in found]))
            lines.append(f"| {name} | {kind} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if options.write:
        with options.write.open("a") as file:
            file.write("\n" + "\n".join(lines) + "\n")
    verdict = claims.memory_ranks(judged)
    print(verdict.verdict())
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
