"""Models whose states are on the host, in PyTorch: one rank at a quarter of the memory, two ranks beside a hybrid plan.

    python benchmarks/host_states.py [--parts alone ranks] [--steps 200] [--write benchmarks/results/host_states.md]

A transformer of 12 layers with AdamW in fp32, small batches, a thread for each rank. *alone*: the budget is what a
plain step holds at its peak by torch's MemTracker, divided by 4; the plan is searched with ``offload=True``; both are
trained for as many steps, with dropout, and their losses compared. *ranks*: on two ranks, parameters on the host over
two replicas (KARMA's data-parallel form, arXiv 2008.11421, section III-C) beside what two ranks do without the host:
shard 3, a pipeline, a tensor axis. Peaks are the tracker's, which does not count the host store (a mapped file); times
are medians of the steps behind the first ten.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import claims
import torch
import tracked
from out_of_core import Transformer
from out_of_core_table import MEMORY_BYTES, MIB, PINS

import shardwright as sw
from shardwright.core.cluster.hardware import load_profile

TIMES = 4.0
SETTLED = 10
"""The steps before times count."""
RANKS: dict[str, dict[str, Any]] = {
    "dp 2, shard 3, parameters on the host": {"dp": 2, "shard": 3, "offload_states": "parameters"},
    "dp 2, shard 2, optimizer on the host": {"dp": 2, "shard": 2, "offload_states": "optimizer"},
    "dp 2, shard 3": {"dp": 2, "shard": 3},
    "pp 2": {"pp": 2, "shard": 0},
    "tp 2": {"tp": 2, "shard": 0},
}
WHOLE_BATCH, MICROBATCH, LENGTH = 8, 2, 64


def built() -> torch.nn.Module:
    torch.manual_seed(0)
    return Transformer(layers=12, width=256, vocabulary=512).train()


def tokens(step: int, count: int = WHOLE_BATCH) -> torch.Tensor:
    """Sequences that count upwards by steps of their own, so that there is something to learn."""
    drawn = torch.Generator().manual_seed(step)
    begin, by = (torch.randint(1, 512, (count, 1), generator=drawn) for _ in range(2))
    return (begin + by % 7 * torch.arange(LENGTH)) % 512


def planned(ranks: int, budget: int | None, **pins: Any) -> sw.Plan:
    reserved = 0 if budget is None else MEMORY_BYTES - budget
    device = replace(load_profile("cpu").device, memory_bytes=MEMORY_BYTES, reserved_memory_bytes=reserved)
    graph = sw.capture(built(), {"tokens": tokens(0, MICROBATCH)})
    asked = PINS | {"batch": WHOLE_BATCH, "microbatch": MICROBATCH, "optimizer": "adamw"} | pins
    return sw.plan(graph, sw.Cluster(device, devices_per_node=ranks), **asked)


def run(file: str, steps: int, out: str) -> None:
    """One rank: losses of all steps, the peak of one, and the median of the others' times."""
    import shardwright.torch as swt

    swt.init(plan=file, log_every=0)
    swt.set_seed(3)
    model = swt.DistributedModel(built())
    optimizer = swt.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))
    dp, own = model.session.bound.size("dp"), model.session.bound.coordinate("dp")

    @swt.step
    def train_step(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens=tokens)
        model.backward(loss)
        return loss

    losses, times, peak = [], [], 0
    for step in range(steps):
        share = tokens(step).chunk(dp)[own]
        optimizer.zero_grad()
        begun = time.perf_counter()
        if step == 3:
            with tracked.tracking(tracked.held_by(model.runtime), optimizer.optimizer, [share]) as tracker:
                loss = train_step(model, share)
                optimizer.step()
                peak = tracker.peak_bytes()
        else:
            loss = train_step(model, share)
            optimizer.step()
        times.append(time.perf_counter() - begun)
        losses.append(float(loss.all_reduce_mean()))
    peaks: list[Any] = [None] * swt.size()
    torch.distributed.all_gather_object(peaks, peak)
    if swt.rank() == 0:
        seconds = statistics.median(times[min(SETTLED, steps // 2) :])
        Path(out).write_text(json.dumps({"losses": losses, "peaks": peaks, "seconds": seconds}), encoding="utf-8")
    swt.shutdown()


def measured(plan: sw.Plan, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "plan.json", Path(folder) / "found.json"
        plan.save(file)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.mesh.size),
            __file__, "--rank-of", str(file), str(steps), str(out),
        ]  # fmt: skip
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder}, check=False)
        if done.returncode:
            raise SystemExit(f"the run of {plan.summary()} failed")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def row(title: str, plan: sw.Plan, found: dict[str, Any], first: dict[str, Any], first_plan: sw.Plan) -> list[str]:
    ratios = [a / b for a, b in zip(plan.predicted.peak_memory_bytes, found["peaks"], strict=True)]
    host = max(use.host_bytes for use in plan.predicted.memory)
    return [
        title, plan.summary(), " ".join(f"{peak / MIB:.1f}" for peak in found["peaks"]),
        " ".join(f"{ratio:.3f}" for ratio in ratios), f"{host / MIB:.1f}", f"{found['seconds'] / first['seconds']:.2f}",
        f"{plan.predicted.step_time_s / first_plan.predicted.step_time_s:.2f}", f"{apart(found, first):.1e}",
    ]  # fmt: skip


def apart(found: dict[str, Any], first: dict[str, Any]) -> float:
    """The largest relative difference of losses; training brings roundings far apart, so of the first ten steps."""
    pairs = zip(found["losses"][:10], first["losses"][:10], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("alone", "ranks"), default=["alone", "ranks"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    rows: list[list[str]] = []
    alone: dict[str, float] = {}
    ranks: dict[str, tuple[float, float]] = {}
    if "alone" in options.parts:
        plain = planned(1, None, recompute="none", shard=0)
        first = measured(plain, options.steps)
        budget = int(first["peaks"][0] / TIMES)
        plan = planned(1, budget, offload=True)
        found = measured(plan, options.steps)
        rows += [row("all on the device", plain, first, first, plain), row("planned", plan, found, first, plain)]
        last, own = first["losses"][-1], found["losses"][-1]
        print(f"losses: {first['losses'][0]:.3f} to {last:.3f} on the device, {own:.3f} with the host")
        alone = {
            "peak over budget": found["peaks"][0] / budget, "first losses apart": apart(found, first),
            "last loss over the first": own / first["losses"][0], "last apart": abs(own - last) / last,
        }  # fmt: skip
    if "ranks" in options.parts:
        plans = {label: planned(2, None, recompute="none", **pins) for label, pins in RANKS.items()}
        every = {label: measured(plan, max(SETTLED * 3, options.steps // 5)) for label, plan in plans.items()}
        base = "dp 2, shard 3"
        rows += [row(label, plans[label], found, every[base], plans[base]) for label, found in every.items()]
        most = max(every[base]["peaks"])
        ranks = {label: (max(found["peaks"]) / most, apart(found, every[base])) for label, found in every.items()}
    header = ["what", "plan", "peak, MiB by rank", "predicted / peak", "on the host, MiB", "time", "as predicted",
              "losses differ by"]  # fmt: skip
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    print("\n".join(lines))
    if options.write:
        with options.write.open("a", encoding="utf-8") as file:
            file.write("\n" + "\n".join(lines) + "\n")
    judged = claims.host_states(alone, ranks)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        run(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        sys.exit(main())
