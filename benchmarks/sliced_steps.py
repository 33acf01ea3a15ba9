"""Slices of one sequence, really run: two local ranks of one thread, one sequence, beside the same pipeline unsliced.

    python benchmarks/sliced_steps.py [--rounds 9] [--write benchmarks/results/token_slices.md]
    python benchmarks/sliced_steps.py --framework jax

A causal transformer of 8 layers, width 384, on two stages; one sequence of 1,024 tokens, so one microbatch. First both
ranks profile the machine with this model, as `shardwright profile --model` does (``--priors``: not), and plans are made
by that. Then in one run, a round of one step of each after the other: whole sequences; one slice, which is the same;
the planner's lengths; ten other ways to cut it; in PyTorch torch's own pipeline with the one microbatch that it can
have. Figures are medians of rounds, a step ends when the slower rank ends, and the first gradients of every form are
held against those of whole sequences. In JAX a step has its optimizer (SGD).
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import sliced_run
from sliced_models import Sizes
from step_launch import Launcher

OTHERS = (
    (512, 512), (256,) * 4, (128,) * 8, (64,) * 16, (342, 341, 341), (640, 384), (384, 640), (400, 300, 200, 124),
    (320, 256, 192, 160, 96), (205, 205, 205, 205, 204),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for the profile's own measurements")
    parser.add_argument("--priors", action="store_true", help="plan by the priors of a CPU, without a profile")
    parser.add_argument("--others", type=float, default=0.1, help="of the cores, what other work may take meanwhile")
    parser.add_argument("--write", type=Path, help="append the table to this file")
    options = parser.parse_args()
    sizes = Sizes()
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(options.framework, options.others, Path(folder))
        profile = None if options.priors else str(Path(folder) / "measured.toml")
        if profile is not None:
            launcher.run(sliced_run.RANKS, sliced_run.profiled, sizes, options.budget, profile)
        ran = launcher.run(sliced_run.RANKS, sliced_run.timed, sizes, profile, OTHERS, options.rounds)
    times = {name: statistics.median(taken) for name, taken in ran.times.items()}
    lines = ["| slices | step, ms | whole over it | predicted, ms | error |", "|---|---|---|---|---|"]
    for name, taken in times.items():
        said = f"{name}: {' + '.join(map(str, ran.chosen)) or 'whole'}" if name == "the planner's" else name
        expected = ran.predicted.get(name)
        cells = ("", "") if expected is None else (f"{expected * 1e3:.1f}", f"{expected / taken - 1:+.1%}")
        lines.append(f"| {said} | {taken * 1e3:.1f} | {times['whole'] / taken:.2f} | {' | '.join(cells)} |")
    print("\n".join(lines))
    if options.write is not None:
        with options.write.open("a") as file:
            file.write("\n".join(lines) + "\n")
    judged = claims.sliced_steps(times, ran.predicted)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
