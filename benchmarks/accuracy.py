"""How far predictions are from published measurements.

    python benchmarks/accuracy.py [--composed] [--data FOLDER] [--write benchmarks/results/accuracy.md]

Every prediction is a plan with its degrees, cut, recompute and precision pinned, as a user would make it; nothing is
fitted here. `fit_cost_model.py` fitted the efficiencies, without the models held out. Measured: MAPE, Spearman's rank
correlation inside a model, and top-1 regret: how much slower what is ranked first really is than the fastest measured:
of a model, among all of its runs by samples per second; and the same among runs of equal model, batch and devices.
``--composed`` shows one node alone, its steps composed in closed form as for the fit: in seconds, not in minutes.
"""

import argparse
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import claims
import numpy as np
from fit_cost_model import Machine, predicted_s
from horovod import horovod_lines
from predict import plan_of
from published import DATA, Run, held_out, regrets, same_work, selective, single_node
from sagemaker import sagemaker_lines
from scipy.stats import spearmanr

import shardwright as sw
from shardwright.core.cluster.hardware import load_profile

GIB = 2**30
FAULTY = 3.5
"""A run is suspect when its error is that many scaled median deviations away from the median error."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--composed", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    lines = ["# Predictions against published measurements", "", "    python benchmarks/accuracy.py", ""]
    runs = single_node(options.data / "a100_single_node_gpt.csv")
    one_node, errors = one_node_lines(runs, composed(runs) if options.composed else planned(runs))
    if options.composed:
        print("\n".join(one_node))
        return 0
    lines += one_node
    lines += selective_lines(options.data / "a100_selective_recompute.csv")
    lines += [*sagemaker_lines(), "", *horovod_lines()]
    lines += ["", f"Whole benchmark: {time.perf_counter() - started:.0f} s."]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text)
    verdict = claims.accuracy(errors)
    print(verdict.verdict())
    return verdict.exit_code


def planned(runs: Sequence[Run]) -> np.ndarray:
    """The step of each run in seconds, by the plan that it followed."""
    clusters = {n: sw.Cluster("a100-80gb", devices_per_node=n) for n in {run.devices for run in runs}}
    return np.array([plan_of(run, clusters[run.devices]).predicted.step_time_s for run in runs])


def composed(runs: Sequence[Run]) -> np.ndarray:
    """The same in closed form."""
    profile = load_profile("a100-80gb")
    machine = Machine(profile.device, profile.intra_node)
    return np.array([predicted_s(run, machine) for run in runs])


def one_node_lines(runs: Sequence[Run], predicted: np.ndarray) -> tuple[list[str], dict[str, float]]:
    """What is said of the runs of one node; and the mean relative error of all, and of those held out."""
    measured = np.array([run.measured_s for run in runs])
    ratio = np.log(predicted / measured)
    spread = 1.4826 * np.median(np.abs(ratio - np.median(ratio)))
    sound = np.abs(ratio - np.median(ratio)) <= FAULTY * spread
    held = np.array([held_out(run) for run in runs])
    lines = [
        f"## One node of A100-80GB: {len(runs)} runs of GPT, full recompute, fp16",
        "",
        "| runs | n | MAPE | bias | Spearman, median over models | worst model | regret of a model, mean | worst "
        "| regret at equal batch and devices, mean | worst |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    everything = np.ones(len(runs), dtype=bool)
    for name, chosen in (
        ("all", everything),
        ("fitted on", ~held),
        ("held out: 2 of 8 models", held),
        ("all without suspects", sound),
    ):
        lines.append(_row(name, runs, predicted, measured, chosen))
    lines += ["", f"Suspects, named and counted above: {int((~sound).sum())}", ""]
    for index in np.flatnonzero(~sound):
        r = runs[index]
        lines.append(
            f"- {r.model}, pp {r.pp} dp {r.dp} tp {r.tp}, batch {r.batch}, microbatch {r.microbatch}: measured "
            f"{measured[index] * 1e3:.0f} ms, predicted {predicted[index] * 1e3:.0f} ms"
        )
    lines += [
        "",
        "By tensor degree and microbatch, mean signed error:",
        "",
        "| tp | 1 | 2 | 4 | 8 |",
        "|---|---|---|---|---|",
    ]
    for tp in (1, 2, 4, 8):
        cells = []
        for microbatch in (1, 2, 4, 8):
            chosen = np.array([r.tp == tp and r.microbatch == microbatch for r in runs])
            cells.append(f"{np.mean(predicted[chosen] / measured[chosen] - 1):+.1%}" if chosen.any() else "")
        lines.append(f"| {tp} | {' | '.join(cells)} |")
    straight = _straightness(runs)
    lines += [*regret_lines(runs, predicted, measured)]
    lines += [
        "",
        f"A property of the file: among runs that differ in the number of microbatches alone, the step is a straight "
        f"line to within {straight:.0e} of its slope, and the slope is the same for every data degree. Measured "
        f"iterations scatter; these are composed from measured parts.",
        "",
    ]
    error = np.abs(predicted / measured - 1)
    return lines, {"all": float(error.mean()), "held out": float(error[held].mean())}


def regret_lines(runs: Sequence[Run], predicted: np.ndarray, measured: np.ndarray) -> list[str]:
    """Where regret at equal batch and devices comes from: what was ranked first, and what is the fastest."""
    groups: dict[object, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        groups[same_work(run)].append(index)
    found: dict[tuple[str, str, str], list[tuple[float, int, int]]] = defaultdict(list)
    for members in groups.values():
        picked, fastest = (min(members, key=lambda i: seconds[i]) for seconds in (predicted, measured))
        if picked != fastest:
            key = runs[picked].model.split()[0], _said(runs[picked]), _said(runs[fastest])
            found[key].append((measured[picked] / measured[fastest] - 1, picked, fastest))
    whole = sum(each for row in found.values() for each, _, _ in row)
    wrong = sum(map(len, found.values()))
    lines = [
        "",
        f"Where regret at equal batch and devices comes from, {wrong} of {len(groups)} choices:",
        "",
        "| width | ranked first | fastest | choices | share of all regret | regret, mean | error of the first "
        "| of the fastest | measured s of its microbatch over those of half of it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    halves, quicker = _over_half(runs), 0.0
    for key, row in sorted(found.items(), key=lambda item: -sum(each for each, _, _ in item[1])):
        first, second = (
            np.mean([predicted[i] / measured[i] - 1 for i in indices])
            for indices in ([i for _, i, _ in row], [i for _, _, i in row])
        )
        over = [halves[i] for _, _, i in row if i in halves]
        quicker += sum(each for each, _, i in row if halves.get(i, 1.0) < 1.0)
        cells = [str(len(row)), f"{sum(e for e, _, _ in row) / whole:.0%}", f"{np.mean([e for e, _, _ in row]):.1%}"]
        cells += [f"{first:+.1%}", f"{second:+.1%}", f"{np.mean(over):.2f}" if over else "–"]
        lines.append(f"| {' | '.join((*key, *cells))} |")
    return [
        *lines,
        "",
        f"{quicker / whole:.0%} of the regret is of choices whose fastest has microbatches that were measured to take "
        "less time than those of half as many samples on the same ranks, which no count of work gives. Mechanisms "
        "that were tried for them, and the least regret of a model without them: [table](tried_mechanisms.md) "
        "(`python benchmarks/tried_mechanisms.py`).",
    ]


def _said(run: Run) -> str:
    return f"tp {run.tp}, microbatch {run.microbatch}"


def _over_half(runs: Sequence[Run]) -> dict[int, float]:
    """Run → the measured seconds of one of its microbatches over those of one of half as many samples. Steps are
    straight lines in the number of microbatches, of one slope for every data degree."""
    steps: dict[tuple[object, int], dict[int, float]] = defaultdict(dict)

    def key(run: Run, microbatch: int) -> object:
        return run.model, run.pp, run.tp, microbatch

    for run in runs:
        steps[key(run, run.microbatch), run.dp][run.batch // (run.dp * run.microbatch)] = run.measured_s
    slopes = {
        which: (line[max(line)] - line[min(line)]) / (max(line) - min(line))
        for (which, _), line in steps.items()
        if len(line) > 1
    }
    found = {}
    for index, run in enumerate(runs):
        own, half = (slopes.get(key(run, size)) for size in (run.microbatch, run.microbatch // 2))
        if own is not None and half is not None:
            found[index] = own / half
    return found


def _row(name: str, runs: Sequence[Run], predicted: np.ndarray, measured: np.ndarray, chosen: np.ndarray) -> str:
    error = predicted[chosen] / measured[chosen] - 1
    ranks = []
    for model in sorted({run.model for run in runs}):
        own = chosen & np.array([run.model == model for run in runs])
        if own.sum() > 2:
            ranks.append(float(spearmanr(predicted[own], measured[own]).statistic))
    indices = [int(index) for index in np.flatnonzero(chosen)]
    by_model = list(regrets(runs, predicted, indices, lambda r: r.model))
    by_work = list(regrets(runs, predicted, indices, same_work))
    return (
        f"| {name} | {int(chosen.sum())} | {np.mean(np.abs(error)):.1%} | {np.mean(error):+.1%} "
        f"| {np.median(ranks):.3f} | {min(ranks):.3f} | {np.mean(by_model):.1%} | {max(by_model):.1%} "
        f"| {np.mean(by_work):.1%} | {max(by_work):.1%} |"
    )


def _straightness(runs: Sequence[Run]) -> float:
    """The largest relative difference between slopes, of the runs that differ in the batch alone."""
    lines: dict[object, list[tuple[int, float]]] = defaultdict(list)
    for r in runs:
        lines[r.model, r.microbatch, r.tp, r.pp, r.dp].append((r.batch // (r.dp * r.microbatch), r.measured_s))
    worst = 0.0
    for points in lines.values():
        points.sort()
        slopes = [(t2 - t1) / (m2 - m1) for (m1, t1), (m2, t2) in itertools.pairwise(points)]
        if len(slopes) > 1:
            worst = max(worst, (max(slopes) - min(slopes)) / slopes[0])
    return worst


def selective_lines(path: Path) -> list[str]:
    """Full recompute against sequence parallelism with selective recompute: seconds and bytes."""
    lines = [
        "## 22B to 1T on up to 512 A100-80GB: full recompute, and sequence parallelism + selective recompute",
        "",
        "Full recompute was fitted on; the other columns were not.",
        "",
        "| model | full recompute s | predicted | | selective s | predicted | |",
        "|---|---|---|---|---|---|---|",
    ]
    memory = [
        "",
        "| model | state GiB | predicted | | activations GiB, no recompute | predicted | | selective | predicted | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in selective(path):
        run = row.full
        cluster = sw.Cluster("a100-80gb", nodes=run.devices // 8, devices_per_node=8)
        full = plan_of(run, cluster, gradient_precision="fp32").predicted
        saved = plan_of(run, cluster, "selective", sequence_parallel=True, gradient_precision="fp32").predicted
        times = (_beside(run.measured_s, full.step_time_s), _beside(row.selective_s, saved.step_time_s))
        lines.append(f"| {run.model} | {times[0]} | {times[1]} |")
        roomy = sw.Cluster(_roomy(cluster.device(0)), nodes=cluster.nodes, devices_per_node=8)
        whole = plan_of(run, roomy, "none", gradient_precision="fp32").predicted
        # The table counts layers: a rank in the middle of the pipeline holds nothing else.
        middle = saved.memory_by_stage_rank[run.pp // 2]
        state = middle.parameters_bytes + middle.gradients_bytes + middle.optimizer_bytes
        memory.append(
            f"| {run.model} | {_beside(row.state_gib, state / GIB)} "
            f"| {_beside(row.activations_whole_gib, whole.memory_by_stage_rank[0].activations_bytes / GIB)} "
            f"| {_beside(row.activations_selective_gib, saved.memory_by_stage_rank[0].activations_bytes / GIB)} |"
        )
    return lines + memory + [""]


def _roomy(device: object) -> object:
    """The same device with memory for what the table only computes."""
    from dataclasses import replace

    return replace(device, memory_bytes=1 << 40)  # type: ignore[type-var]


def _beside(measured: float, predicted: float) -> str:
    return f"{measured:.2f} | {predicted:.2f} | {predicted / measured - 1:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
