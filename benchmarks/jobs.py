"""Many models on few devices: bound, optimum, closed form, copies and speed of the simulator of jobs.

    python benchmarks/jobs.py [--parts bound optimum gain pipelines copies speed]

Units are tables of seconds, and all figures are simulated, but for those of `speed`, which are of the simulator itself.
`optimum` needs OR-tools (the extra `solver`).
"""

import argparse
import random
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import numpy as np

import shardwright as sw
from shardwright.core.jobs.policies import POLICIES
from shardwright.core.schedule import schedule_names
from tests.core.jobs.by_hand import bound_s, faults_of, hydra_units

Rows = dict[str, float]
FORWARD_S, BACKWARD_S = 1.0, 2.0
MINIBATCHES = 60


def bound(lists: int = 5000) -> Rows:
    """The makespan of Sharded-LRTF over Hydra's bound, for random lists."""
    draw = random.Random(28)
    shares = []
    broken = 0
    for _ in range(lists):
        scales = [draw.choice((0.2, 1.0, 5.0)) for _ in range(draw.randint(2, 40))]
        units = [[scale * draw.uniform(0.05, 2.0) for _ in range(draw.randint(1, 20))] for scale in scales]
        devices = draw.randint(1, 16)
        timeline = sw.simulate_jobs(units, devices)
        broken += bool(faults_of(timeline, units))
        shares.append(timeline.makespan_s / bound_s(units, devices))
    worst, mean = float(np.max(shares)), float(np.mean(shares))
    print(f"| lists | makespan over the bound, worst | mean |\n|---|---|---|\n| {lists} | {worst:.4f} | {mean:.4f} |")
    return {"lists": lists, "worst": worst, "broken": broken}


def optimum(cases: int = 100) -> Rows:
    """Makespans over the proven optimum: 3 or 4 jobs of up to 24 units together on 3 devices."""
    draw = random.Random(7)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(cases):
        jobs = draw.randint(3, 4)
        units = [[draw.randint(1, 16) / 8 for _ in range(draw.randint(2, 24 // jobs))] for _ in range(jobs)]
        best_s = sw.simulate_jobs(units, 3, "optimum").makespan_s
        for policy in POLICIES:
            ratios[policy].append(sw.simulate_jobs(units, 3, policy).makespan_s / best_s)
    print("| policy | cases | over the optimum, worst | mean | share that is optimal |\n|---|---|---|---|---|")
    for policy, found in ratios.items():
        exact = sum(each <= 1 + 1e-5 for each in found) / len(found)
        print(f"| {policy} | {cases} | {max(found):.4f} | {statistics.fmean(found):.4f} | {exact:.0%} |")
    return {f"{policy} {what}": of(found) for policy, found in ratios.items()
            for what, of in (("worst", max), ("least", min), ("mean", statistics.fmean))}  # fmt: skip


def gain() -> Rows:
    """The gain over regular model parallelism, over that of the closed form."""
    errors: Rows = {}
    print("| devices | jobs | shards | keeps activations: formula | simulated | both recompute: formula | simulated |")
    print("|---|---|---|---|---|---|---|")
    for devices, jobs, shards in ((2, 2, 3), (4, 4, 4), (4, 6, 8), (8, 8, 8), (8, 12, 8), (8, 12, 24), (8, 40, 8)):
        once = hydra_units(shards, FORWARD_S, BACKWARD_S)
        pool_s = sw.simulate_jobs([once * MINIBATCHES] * jobs, devices).makespan_s
        keeps_s = jobs * MINIBATCHES * shards * (FORWARD_S + BACKWARD_S)
        formula = devices * shards * (FORWARD_S + BACKWARD_S) / sum(once)
        found, again = keeps_s / pool_s, jobs * MINIBATCHES * sum(once) / pool_s
        print(f"| {devices} | {jobs} | {shards} | {formula:.3f} | {found:.3f} | {devices} | {again:.3f} |")
        errors[f"{devices} devices, {jobs} jobs, {shards} shards"] = found / formula - 1
        errors[f"{devices} devices, {jobs} jobs, {shards} shards, both recompute"] = again / devices - 1
    return errors


def shards_of(kind: str, shards: int) -> list[float]:
    """The forward seconds of the shards of one model: a transformer's alike; a convolutional network's, cut by bytes,
    long at the large images and short behind."""
    return [1.0] * shards if kind == "transformer" else [2.0 * 0.75**shard for shard in range(shards)]


def pipelines() -> Rows:
    """12 models on 8 devices: the pool beside one after another, by layers and by pipelines of m microbatches."""
    models, devices = 12, 8
    wins: Rows = {}
    print("| models | pool over model parallelism | published | over GPipe, m = 8 | over the best schedule, m = 8 "
          "| GPipe wins from m | the best schedule from m | it is |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for kind in ("transformer", "convolutional"):
        shards = shards_of(kind, devices)
        backward = [s * (FORWARD_S + BACKWARD_S) for s in shards]
        once = [
            *shards[:-1],
            backward[-1],
            *reversed(backward[:-1]),
        ]
        pool_s = sw.simulate_jobs([once * MINIBATCHES] * models, devices).makespan_s / MINIBATCHES
        regular = models * sum(backward) / pool_s
        steps = {m: dict(pipeline_steps(shards, devices, m)) for m in range(1, 65)}
        ratio = {m: {name: models * s / pool_s for name, s in found.items()} for m, found in steps.items()}
        gpipe = next((m for m in ratio if ratio[m]["gpipe"] < 1), None)
        best = next((m for m in ratio if min(ratio[m].values()) < 1), None)
        name = min(ratio[best], key=lambda each: ratio[best][each]) if best is not None else "none"
        at_8 = min(ratio[8].values())
        said = "over 7" if regular > 7 else "over 7: the formula forbids it"
        print(f"| {kind} | {regular:.2f} | {said} | {ratio[8]['gpipe']:.2f} | {at_8:.2f} "
              f"| {gpipe or 'over 64'} | {best or 'over 64'} | {name} |")  # fmt: skip
        wins[f"{kind}: over model parallelism"] = regular
        wins[f"{kind}: over GPipe, m = 8"] = ratio[8]["gpipe"]
    return wins


def pipeline_steps(shards: list[float], devices: int, m: int) -> Iterator[tuple[str, float]]:
    """The seconds of one minibatch of a model under every schedule of one stage a rank, its memory not bounded."""
    half = tuple(s * BACKWARD_S / 2 / m for s in shards)
    costs = sw.StageCosts(tuple(s * FORWARD_S / m for s in shards), half, half, (0.0,) * (devices - 1), (1,) * devices)
    for name in schedule_names():
        if name in ("forward-only", "simple", "interleaved"):
            continue
        try:
            schedule = sw.Schedule.build(name, ranks=devices, microbatches=m)
        except sw.ShardwrightError:
            continue
        yield name, sw.simulate(schedule, costs).makespan_s


def copies() -> Rows:
    """The share of the copies that double buffering hides, and the makespan over that of no copies without it."""
    draw = random.Random(4)
    found: Rows = {}
    print("| units | jobs | devices | copies, of a unit | hidden | switched off: times as long | predicted |")
    print("|---|---|---|---|---|---|---|")
    for jobs, devices in ((4, 4), (8, 4), (12, 8), (40, 8)):
        tables = {
            "alike": [[1.0] * 400 for _ in range(jobs)],
            "of models cut alike": [hydra_units(8, FORWARD_S, BACKWARD_S, 30) for _ in range(jobs)],
            "0.8 to 1.2": [[draw.uniform(0.8, 1.2) for _ in range(400)] for _ in range(jobs)],
        }
        for kind, units in tables.items():
            plain = sw.simulate_jobs(units, devices).makespan_s
            for ways, (into, out) in {"1/2 in": (2, 0), "1/4 in, 1/4 out": (4, 4), "1/2 in, 1/2 out": (2, 2)}.items():
                given = {
                    name: [[seconds / parts for seconds in row] for row in units]
                    for name, parts in (("copy_in_s", into), ("copy_out_s", out))
                    if parts
                }
                shown = sw.simulate_jobs(units, devices, **given).makespan_s - plain
                copied = sum(sum(map(sum, rows)) for rows in given.values()) / devices
                loss = sw.simulate_jobs(units, devices, **given, double_buffering=False).makespan_s / plain
                predicted = 1 + (2.0 if ways.startswith("1/2 in, ") else 1.0) / 2
                hidden = 1 - shown / copied
                print(f"| {kind} | {jobs} | {devices} | {ways} | {hidden:.1%} | {loss:.4f} | {predicted} |")
                case = f"units {kind}, {jobs} jobs on {devices}, copies {ways}"
                if predicted == 1.5:  # else the link is as busy as the device, and any unit that is shorter shows
                    found[f"{case}: hidden"] = hidden
                found[f"{case}: loss"] = loss / predicted - 1
    return found


def speed() -> Rows:
    """Processor seconds and memory of 100 jobs of 15,000 units, and of a large schedule in the same engine."""
    draw = random.Random(1)
    units = [[draw.uniform(0.5, 1.5) for _ in range(15_000)] for _ in range(100)]
    figures: Rows = {}
    print("| what | processor seconds | most memory of the process until then, MiB |\n|---|---|---|")
    ways: dict[str, dict[str, Any]] = {"100 jobs of 15,000 units": {}}
    ways["with copies in and out"] = {"copy_in_s": 0.4, "copy_out_s": 0.1}
    for name, given in ways.items():
        began = time.process_time()
        timeline = sw.simulate_jobs(units, 8, **given)
        figures[name] = time.process_time() - began
        assert sum(map(len, timeline.actions)) == 1_500_000
        del timeline
        figures[f"{name}, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"| {name}, 8 devices | {figures[name]:.1f} | {figures[f'{name}, MiB']:.0f} |", flush=True)
    schedule = sw.Schedule.build("zbv", ranks=64, microbatches=512, virtual_stages=2)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        sw.simulate(schedule, sw.StageCosts.uniform(128, transfer_s=0.1))
        seconds.append(time.process_time() - began)
    print(f"| zbv of 64 ranks, 2 virtual stages, 512 microbatches, least of 3 | {min(seconds):.2f} | |")
    return figures


PARTS: dict[str, Callable[[], Rows]] = {
    "speed": speed,  # first, as it shows the most memory
    "bound": bound,
    "optimum": optimum,
    "gain": gain,
    "pipelines": pipelines,
    "copies": copies,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    asked = parser.parse_args().parts
    found = {}
    for part, measure in PARTS.items():
        if part in asked:
            print(f"\n{part}: {(measure.__doc__ or '').strip()}\n", flush=True)
            found[part] = measure()
    judged = claims.jobs(found)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
