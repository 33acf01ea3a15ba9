"""Figures of the schedule room: how short `auto` gets, how near to proven optima, and how fast everything is.

    python benchmarks/schedules.py gain --memory 1f1b --seeds 200     # auto against the best named schedule
    python benchmarks/schedules.py gain --memory equal --seeds 200
    python benchmarks/schedules.py optimum                            # auto against CP-SAT (extra: dev)
    python benchmarks/schedules.py speed                              # building and simulating

`gain` takes stage times from a lognormal of sigma 0.25, each of f, b and w on its own, and transfers uniform between 0
and 20% of a mean forward. `--memory 1f1b` gives each rank what 1F1B needs there, min(m, p - i) activations on rank i;
`--memory equal` gives every rank what 1F1B needs on its fullest. Finished cases are kept in `--log`, so that a run that
was cut short goes on where it stopped.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Schedule, StageCosts, schedule_names
from shardwright.core.schedule.auto.problem import Problem
from shardwright.core.schedule.simulate import simulate

SIGMA, MOST_TRANSFER = 0.25, 0.2
RANKS, ROUNDS = (4, 8, 16), (1, 2, 4)


def draw_costs(stages: int, seed: int) -> StageCosts:
    draw = np.random.default_rng(seed)
    times = draw.lognormal(0.0, SIGMA, (3, stages))
    transfer = draw.uniform(0.0, MOST_TRANSFER, stages - 1)
    return StageCosts(*(tuple(row.tolist()) for row in times), tuple(transfer.tolist()), (1,) * stages)


def memory(kind: str, p: int, m: int) -> list[int]:
    return [min(m, p - i) for i in range(p)] if kind == "1f1b" else [min(m, p)] * p


def best_named(p: int, m: int, costs: StageCosts, limits: list[int]) -> tuple[float, str]:
    """The shortest named schedule that fits; SageMaker's two with several bounds on active microbatches."""
    found = []
    for name in schedule_names():
        if name == "forward-only":
            continue
        bounds = sorted({1, p // 2, p - 1, p, min(m, p + 2)}) if name in ("simple", "interleaved") else [None]
        for active in bounds:
            try:
                schedule = Schedule.build(
                    name, ranks=p, microbatches=m, costs=costs, memory_limit_bytes=limits, active_microbatches=active
                )
            except ScheduleError:
                continue
            found.append((simulate(schedule, costs).makespan_s, name))
    return min(found)


def one_gain(kind: str, p: int, m: int, seed: int) -> dict[str, object]:
    costs, limits = draw_costs(p, seed), memory(kind, p, m)
    named_s, name = best_named(p, m, costs, limits)
    began = time.process_time()
    auto = Schedule.build("auto", ranks=p, microbatches=m, costs=costs, memory_limit_bytes=limits)
    build_s = time.process_time() - began
    auto_s = simulate(auto, costs).makespan_s
    bound_s = Problem.of(auto.placement, m, costs, limits).lower_bound_s()
    if auto_s > named_s:
        raise SystemExit(f"auto is longer than {name}: {auto_s} > {named_s} (p={p}, m={m}, seed={seed}, {kind})")
    return {"memory": kind, "p": p, "m": m, "seed": seed, "named_s": named_s, "name": name, "auto_s": auto_s,
            "bound_s": bound_s, "build_s": build_s}  # fmt: skip


def gain(kind: str, seeds: int, log: Path) -> None:
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {(row["memory"], row["p"], row["m"], row["seed"]) for row in rows}
    with log.open("a") as file:
        for seed, p, rounds in product(range(seeds), RANKS, ROUNDS):
            if (kind, p, p * rounds, seed) not in done:
                rows.append(one_gain(kind, p, p * rounds, seed))
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
    rows = [row for row in rows if row["memory"] == kind and row["seed"] < seeds]
    print(f"memory: {kind}; {len(rows)} cases")
    print("| p | m | cases | median gain | 10% to 90% | least to most | most possible (median) | share of gap closed "
          "| best named, most often | build_s median (most) |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for p, rounds in product(RANKS, ROUNDS):
        print(gain_line([row for row in rows if (row["p"], row["m"]) == (p, p * rounds)], f"{p} | {p * rounds}"))
    print(gain_line(rows, "all | all"))


def gain_line(rows: list[dict[str, float]], label: str) -> str:
    """One row of the table. The gap is between the best named schedule and the lower bound."""
    gains = [1 - row["auto_s"] / row["named_s"] for row in rows]
    possible = [1 - row["bound_s"] / row["named_s"] for row in rows]
    closed = [g / q for g, q in zip(gains, possible, strict=True) if q > 1e-9]
    low, high = np.quantile(gains, [0.1, 0.9])
    names = [str(row["name"]) for row in rows]
    builds = [row["build_s"] for row in rows]
    return (
        f"| {label} | {len(rows)} | {statistics.median(gains):.1%} | {low:.1%} to {high:.1%} | "
        f"{min(gains):.1%} to {max(gains):.1%} | {statistics.median(possible):.1%} | "
        f"{statistics.median(closed) if closed else 1:.0%} | {statistics.mode(names)} | "
        f"{statistics.median(builds):.2f} ({max(builds):.2f}) |"
    )


def optimum(seeds: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.core.schedule.exact import solve

    print("| memory | p | m | cases | proven | auto / optimum: mean | most | over 1% |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, p, m in product(("1f1b", "equal", "two"), (2, 3, 4), (2, 3, 4, 5, 6)):
        ratios, proven = [], 0
        for seed in range(seeds):
            costs = draw_costs(p, seed)
            limits = [2] * p if kind == "two" else memory(kind, p, m)
            auto = Schedule.build("auto", ranks=p, microbatches=m, costs=costs, memory_limit_bytes=limits)
            problem = Problem.of(auto.placement, m, costs, limits)
            answer = solve(problem, problem.words(auto.table))
            proven += answer.proven
            ratios.append(simulate(auto, costs).makespan_s / answer.bound_s)
        over = sum(ratio > 1.01 for ratio in ratios)
        print(
            f"| {kind} | {p} | {m} | {seeds} | {proven} | {np.mean(ratios):.5f} | {max(ratios):.5f} | {over} |",
            flush=True,
        )


def speed() -> None:
    print("| what | cpu seconds |")
    print("|---|---|")
    for name in ("zbv", "interleaved-1f1b", "interleaved-zb", "v-half"):
        began = time.process_time()
        schedule = Schedule.build(name, ranks=64, microbatches=512, virtual_stages=2)
        built = time.process_time()
        timeline = simulate(schedule, StageCosts.uniform(128, transfer_s=0.1))
        ended = time.process_time()
        actions = sum(len(order) for order in schedule.table)
        print(f"| build {name}, p=64, v=2, m=512 ({actions} actions) | {built - began:.2f} |")
        print(f"| simulate it (makespan {timeline.makespan_s:.1f} s) | {ended - built:.2f} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"| most memory of the process in all of these | {peak:.0f} MiB |")
    for p, m, v in ((8, 32, 1), (8, 32, 2), (32, 256, 1), (32, 256, 2)):
        began = time.process_time()
        Schedule.build(
            "auto", ranks=p, microbatches=m, virtual_stages=v, costs=draw_costs(p * v, 0), memory_limit_bytes=p * v
        )
        print(f"| build auto, p={p}, m={m}, v={v} | {time.process_time() - began:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gain", "optimum", "speed"))
    parser.add_argument("--memory", choices=("1f1b", "equal"), default="1f1b")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--log", type=Path, default=Path("build/schedules-gain.jsonl"))
    arguments = parser.parse_args()
    if arguments.what == "gain":
        arguments.log.parent.mkdir(parents=True, exist_ok=True)
        gain(arguments.memory, arguments.seeds, arguments.log)
    elif arguments.what == "optimum":
        optimum(arguments.seeds)
    else:
        speed()


if __name__ == "__main__":
    main()
