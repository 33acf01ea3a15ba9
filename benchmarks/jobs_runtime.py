"""Jobs really run: six models (three learning rates, two batch sizes) on two local ranks, one thread each.

    python benchmarks/jobs_runtime.py [--rounds 3] [--steps 3] [--write benchmarks/results/jobs_runtime.md]

Each is a causal transformer of 8 layers that takes three times a device's budget. First both ranks profile the machine
with this model, as `shardwright profile --model` does, and the jobs are planned by that. Then in one run, in turns: all
six as jobs; one after another on two stages without microbatches, and under 1F1B with 4 and 8 microbatches; and a
process for each model, three on either rank. Times are medians of rounds, each from all ranks ready to the last one
done, without the recording before the first step.

Judged: the measured makespan within 10% of the simulated one, and at least 0.85 of the gain that the closed form says
over two stages without microbatches. What each takes of a device's memory stands beside it.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import jobs_runtime_run as work
from sliced_models import Sizes
from step_launch import Launcher


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for the profile's own measurements")
    parser.add_argument("--others", type=float, default=0.1, help="of the cores, what other work may take meanwhile")
    parser.add_argument("--write", type=Path, help="append the table to this file")
    options = parser.parse_args()
    sizes = Sizes(tokens=options.tokens, width=options.width, heads=4, layers=8, words=1024)
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher("torch", options.others, Path(folder))
        profile = str(Path(folder) / "measured.toml")
        launcher.run(work.RANKS, work.profiled, sizes, options.budget, profile)
        ran = launcher.run(work.RANKS, work.timed, sizes, profile, options.steps, options.rounds)
    times = {name: statistics.median(taken) for name, taken in ran.times.items()}
    lines = [
        f"Simulated {ran.simulated_s:.2f} s, by the passes' own times {ran.by_passes_s:.2f} s; shards: {ran.shards}; "
        f"the closed form's gain {ran.closed_form:.2f}.",
        "",
        "| form | s | rounds | over jobs | MiB on a device |",
        "|---|---|---|---|---|",
    ]
    for name, taken in times.items():
        rounds = ", ".join(f"{each:.2f}" for each in ran.times[name])
        held = "" if name not in ran.device_bytes else f"{ran.device_bytes[name] / 2**20:.1f}"
        lines.append(f"| {name} | {taken:.2f} | {rounds} | {taken / times['jobs']:.2f} | {held} |")
    print("\n".join(lines))
    if options.write is not None:
        with options.write.open("a") as file:
            file.write("\n".join(lines) + "\n")
    judged = claims.jobs_runtime(times, ran.simulated_s, ran.closed_form)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
