"""Memory of pipelines whose sequences run in slices: predicted at 32 thousand tokens, and tracked on what runs here.

    python benchmarks/sliced_memory.py [--write benchmarks/results/token_slices.md]
    python benchmarks/sliced_memory.py --parts predicted

*Predicted*: a causal transformer of 32 layers, width 4,096, sequences of 32,768 tokens, on one node of eight A100 of
80 GB, eight stages, microbatches of one sequence, 1F1B: whole sequences, whole under full recompute, and slices. The
activations are those that ranks hold at their peak; keys, values and their gradients are among the buffers, which are
shown with them.

*Tracked*: the same model of 8 layers, width 128, 512 tokens, on two and four local ranks, by torch's own MemTracker:
all live storages at the peak of a step with its optimizer, gradients made anew, and what was predicted of it.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
from sliced_models import Sizes, torch_model
from step_launch import Launcher

import shardwright as sw
from shardwright.core.cluster.hardware import load_profile

LARGE = Sizes(tokens=32768, width=4096, heads=32, layers=32, words=32000)
SMALL = Sizes(tokens=512, width=128, heads=4, layers=8, words=512)
STAGES, BATCH = 8, 16
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("whole", {}),
    ("whole, recomputed", {"recompute": "full"}),
    ("4 slices", {"slice_lengths": 4}),
    ("16 slices", {"slice_lengths": 16}),
    ("16 slices, recomputed", {"slice_lengths": 16, "recompute": "full"}),
)
RANKS, SAMPLES = (2, 4), 4


def graph_of(sizes: Sizes) -> sw.Graph:
    import torch

    with torch.device("meta"):
        model = torch_model(sizes)
    tokens = torch.zeros(1, sizes.tokens, dtype=torch.long)
    return sw.capture(model, {"tokens": tokens, "wanted": tokens})


def planned(graph: sw.Graph, cluster: sw.Cluster, sizes: Sizes, pp: int, batch: int, **pins: Any) -> sw.Plan:
    number = pins.pop("slice_lengths", 1)
    if number > 1:
        pins["slice_lengths"] = [sizes.tokens // number] * number
    usual: dict[str, Any] = {"recompute": "none", "schedule": "1f1b", "headroom": 0.0}
    return sw.plan(graph, cluster, batch=batch, microbatch=1, pp=pp, tp=1, dp=1, **usual | pins)


def predicted() -> tuple[list[str], float]:
    """The table, and the activations of the fullest rank in 16 slices over those of whole sequences."""
    graph = graph_of(LARGE)
    # So much memory that all forms are counted, whether or not they fit.
    device = replace(load_profile("a100-80gb").device, memory_bytes=2**43)
    cluster = sw.Cluster(device, devices_per_node=STAGES)
    lines = [
        "| 32,768 tokens, 8 stages | activations, GiB, by rank | with buffers, fullest | total, fullest | step, s |",
        "|---|---|---|---|---|",
    ]
    fullest = {}
    for name, pins in FORMS:
        plan = planned(graph, cluster, LARGE, STAGES, BATCH, precision="bf16", **pins)
        uses = plan.predicted.memory_by_stage_rank
        fullest[name] = max(use.activations_bytes for use in uses)
        held = ", ".join(f"{use.activations_bytes / 2**30:.1f}" for use in uses)
        both = max(use.activations_bytes + use.buffers_bytes for use in uses)
        total = max(use.total_bytes for use in uses)
        cells = (held, f"{both / 2**30:.1f}", f"{total / 2**30:.1f}", f"{plan.predicted.step_time_s:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines, fullest["16 slices"] / fullest["whole"]


def tracked_peaks(_framework: str, file: str) -> list[int]:
    """What every rank of a plan holds at its peak."""
    import step_run
    import torch

    from shardwright.backends import registry

    torch.set_num_threads(1)
    plan = sw.Plan.load(file)
    running: Any = registry.load("torch").compile(plan, torch_model(SMALL))
    tokens = torch.randint(0, SMALL.words, (plan.decision.batch, SMALL.tokens))
    batch = {"tokens": tokens, "wanted": tokens}
    for _ in range(2):
        running.step(batch)
    return step_run.torch_peak_bytes(running, plan, batch)


def measured(every: Sequence[int]) -> tuple[list[str], dict[str, Sequence[float]]]:
    graph = graph_of(SMALL)
    lines = ["| 512 tokens | tracked, MiB, by rank | predicted | predicted / tracked |", "|---|---|---|---|"]
    ratios: dict[str, Sequence[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher("torch", 1.0, Path(folder))
        for ranks in every:
            cluster = sw.Cluster("cpu", devices_per_node=ranks)
            for form, pins in FORMS:
                name, file = f"pp {ranks}, {form}", str(Path(folder) / "plan.json")
                plan = planned(graph, cluster, SMALL, ranks, SAMPLES, precision="fp32", **pins)
                plan.save(file)
                peaks, said = launcher.run(ranks, tracked_peaks, file), plan.predicted.peak_memory_bytes
                ratios[name] = [p / m for p, m in zip(said, peaks, strict=True)]
                cells = [" ".join(f"{size / 2**20:.2f}" for size in sizes) for sizes in (peaks, said)]
                lines.append(f"| {name} | {' | '.join(cells)} | {' '.join(f'{r:.3f}' for r in ratios[name])} |")
                print(lines[-1], flush=True)
    return lines, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("predicted", "tracked"), default=["predicted", "tracked"])
    parser.add_argument("--ranks", type=int, nargs="+", choices=RANKS, default=RANKS, help="that are tracked")
    parser.add_argument("--write", type=Path, help="append the tables to this file")
    options = parser.parse_args()
    lines: list[str] = []
    lowered, ratios = float("nan"), dict[str, Sequence[float]]()
    if "predicted" in options.parts:
        lines, lowered = predicted()
    if "tracked" in options.parts:
        more, ratios = measured(options.ranks)
        lines += ["", *more]
    if options.write is not None:
        with options.write.open("a") as file:
            file.write("\n".join(lines) + "\n")
    judged = claims.sliced_memory(ratios, lowered)
    print(judged.verdict())
    sys.exit(judged.exit_code)


if __name__ == "__main__":
    main()
