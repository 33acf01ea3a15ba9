"""Predicted and measured steps of a GPT on 16 T4: four nodes of four, PCI Express inside, Ethernet of 50 Gb/s between.

    python benchmarks/t4_cluster.py [--data FOLDER] [--write benchmarks/results/t4_cluster.md]

The 47 published steps (`t4_16_gpt_medium.csv`) ran under DeepSpeed: pp outermost, then dp, tp innermost; messages of
the pipeline in turn with computing; gradients reduced in fp32 at the end. Everything is pinned. Four constants, three
of the T4 profile and one of its link, were fitted on this file, as their origins say: this is no test on unseen runs.
The exit status is 1 where the rank correlation is below 0.95.
"""

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from predict import graph_of
from published import DATA
from scipy.stats import spearmanr

import shardwright as sw

BATCH, LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY = 32, 24, 1024, 16, 1024, 52256
BEFORE_LAYERS = 2
"""What the file counts before the first layer: the embedding and a lambda."""
LEAST_CORRELATION = 0.95


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured step. ``starts``: the first unit of each stage, the embedding being unit 0 and the head the last."""

    tp: int
    dp: int
    pp: int
    microbatch: int
    starts: tuple[int, ...]
    measured_s: float


def trials(path: Path) -> list[Trial]:
    """The rows of the file."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        Trial(
            *(int(row[name]) for name in ("tp", "dp", "pp", "microbatch")),
            starts=tuple(unit_of(int(cut)) for cut in row["layer_cuts"].split()[:-1]),
            measured_s=float(row["step_s"]),
        )
        for row in rows
    ]


def unit_of(cut: int) -> int:
    """The unit that begins where the file cuts: the layers follow the embedding and what stands before them."""
    return 0 if cut < BEFORE_LAYERS else min(1 + cut - BEFORE_LAYERS, LAYERS + 1)


def plan_of(trial: Trial, cluster: sw.Cluster) -> sw.Plan:
    """The plan that a trial followed."""
    return sw.plan(
        graph_of(HIDDEN, HEADS, LAYERS, SEQUENCE, VOCABULARY),
        cluster,
        batch=BATCH,
        pp=trial.pp,
        dp=trial.dp,
        tp=trial.tp,
        microbatch=trial.microbatch,
        virtual_stages=1,
        schedule="1f1b",
        recompute="none",
        shard=0,
        precision="fp16",
        gradient_precision="fp32",
        placement_order="PDT",
        stage_starts=trial.starts,
        like="deepspeed",
    )


def cluster() -> sw.Cluster:
    """The links are those of the T4's profile."""
    return sw.Cluster("t4", nodes=4, devices_per_node=4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    found, where = trials(options.data / "t4_16_gpt_medium.csv"), cluster()
    lines = [
        "# Steps of a GPT on 16 T4",
        "",
        "    python benchmarks/t4_cluster.py",
        "",
        "| tp | dp | pp | microbatch | measured s | predicted s | predicted / measured | pipeline | gradients "
        "| optimizer |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    ratios, predicted = [], []
    for trial in found:
        step = plan_of(trial, where).predicted
        predicted.append(step.step_time_s)
        ratios.append(step.step_time_s / trial.measured_s)
        lines.append(
            f"| {trial.tp} | {trial.dp} | {trial.pp} | {trial.microbatch} | {trial.measured_s:.2f} "
            f"| {step.step_time_s:.2f} | {ratios[-1]:.2f} | {step.pipeline_s:.2f} | {step.data_parallel_s:.2f} "
            f"| {step.optimizer_s:.2f} |"
        )
    correlation = float(spearmanr(predicted, [trial.measured_s for trial in found]).statistic)
    error = np.abs(np.array(ratios) - 1)
    lines += [
        "",
        f"{len(found)} steps: MAPE {error.mean():.1%}, bias {np.mean(ratios) - 1:+.1%}, largest {error.max():.1%}, "
        f"Spearman {correlation:.3f}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        options.write.write_text(text)
    return 0 if correlation >= LEAST_CORRELATION else 1


if __name__ == "__main__":
    sys.exit(main())
