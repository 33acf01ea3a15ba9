"""Memory of pipelines whose sequences run in slices: predicted at 32 thousand tokens, and tracked on what runs here.

    python benchmarks/sliced_memory.py [--write benchmarks/results/token_slices.md]
    python benchmarks/sliced_memory.py --parts predicted
    python benchmarks/sliced_memory.py --parts "hugging face" --ranks 2

*Predicted*: a causal transformer of 32 layers, width 4,096, sequences of 32,768 tokens, on one node of eight A100 of
80 GB, eight stages, microbatches of one sequence, 1F1B: whole sequences, whole under full recompute, and slices. The
activations are those that ranks hold at their peak; keys, values and their gradients are among the buffers, which are
shown with them.

*Tracked*: the same model of 8 layers, width 128, 512 tokens, on two and four local ranks, by torch's own MemTracker:
all live storages at the peak of a step with its optimizer, gradients made anew, and what was predicted of it.

*Hugging Face*: GPT-2 and Llama of two layers a stage, at least 4, width 128, 256 tokens, the same way: schedules,
recompute, slices of unequal lengths, replicas with divided state, the tensor axis.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
from sliced_models import Sizes, hugging_face, torch_model
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
PARTS = ("predicted", "tracked", "hugging face")
TINY = Sizes(tokens=256, width=128, heads=4, layers=4, words=256)
FOUR = (64, 64, 64, 64)


class Case(NamedTuple):
    """A model of Hugging Face under a plan, on as many ranks as the degrees multiply to."""

    model: str
    pp: int
    dp: int
    tp: int
    schedule: str
    lengths: tuple[int, ...] = FOUR
    recompute: str = "none"
    shard: int = 0

    @property
    def sizes(self) -> Sizes:
        return replace(TINY, layers=max(TINY.layers, 2 * self.pp))

    @property
    def name(self) -> str:
        degrees = f"pp {self.pp}, dp {self.dp}, tp {self.tp}"
        said = f"{self.model}, {degrees}, {self.schedule}, {'+'.join(map(str, self.lengths))}"
        said += f", {self.recompute}" if self.recompute != "none" else ""
        return f"{said}, shard {self.shard}" if self.shard else said


GPT2, LLAMA, ONE_KEY = "gpt2", "llama", "llama, one key head"
CASES = (
    Case(GPT2, 2, 1, 1, "1f1b"),
    Case(GPT2, 2, 1, 1, "gpipe"),
    Case(GPT2, 2, 1, 1, "zb-h1"),
    Case(GPT2, 2, 1, 1, "1f1b", recompute="full"),
    Case(LLAMA, 2, 1, 1, "1f1b"),
    Case(LLAMA, 2, 1, 1, "1f1b", (256,)),
    Case(LLAMA, 2, 1, 1, "1f1b", (160, 96)),
    Case(LLAMA, 2, 1, 1, "1f1b", (110, 86, 60)),
    Case(LLAMA, 2, 1, 1, "1f1b", (80, 64, 48, 40, 24)),
    Case(LLAMA, 2, 1, 1, "1f1b", recompute="elementwise"),
    Case(LLAMA, 2, 1, 1, "zb-h1", recompute="full"),
    Case(ONE_KEY, 2, 1, 1, "1f1b"),
    Case(ONE_KEY, 2, 1, 1, "1f1b", recompute="full"),
    Case(LLAMA, 1, 1, 2, "gpipe"),
    Case(ONE_KEY, 1, 1, 2, "gpipe"),
    *(Case(GPT2, 1, 2, 1, "gpipe", shard=shard) for shard in range(4)),
    Case(GPT2, 4, 1, 1, "1f1b"),
    Case(LLAMA, 4, 1, 1, "1f1b", recompute="full"),
    Case(LLAMA, 2, 1, 2, "1f1b"),
    *(Case(LLAMA, 2, 2, 1, "1f1b", shard=shard) for shard in range(4)),
)


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


def tracked_peaks(_framework: str, file: str, kind: str | None = None, sizes: Sizes = SMALL) -> list[int]:
    """What every rank of a plan holds at its peak. ``kind``: of a model of Hugging Face."""
    import step_run
    import torch

    from shardwright.backends import registry

    torch.set_num_threads(1)
    plan = sw.Plan.load(file)
    model = torch_model(sizes) if kind is None else hugging_face(kind, sizes)
    running: Any = registry.load("torch").compile(plan, model)
    tokens = torch.randint(0, sizes.words, (plan.decision.batch // plan.decision.dp, sizes.tokens))
    batch = {"tokens": tokens, "wanted": tokens} if kind is None else {"input_ids": tokens, "labels": tokens}
    for _ in range(2):
        running.step(batch)
    return step_run.torch_peak_bytes(running, plan, batch)


def line_of(name: str, peaks: Sequence[int], said: Sequence[int]) -> tuple[str, list[float]]:
    """A line of a table of what ranks held, and predicted over tracked bytes."""
    ratios = [p / m for p, m in zip(said, peaks, strict=True)]
    cells = [" ".join(f"{size / 2**20:.2f}" for size in sizes) for sizes in (peaks, said)]
    line = f"| {name} | {' | '.join(cells)} | {' '.join(f'{ratio:.3f}' for ratio in ratios)} |"
    print(line, flush=True)
    return line, ratios


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
                peaks = launcher.run(ranks, tracked_peaks, file)
                line, ratios[name] = line_of(name, peaks, plan.predicted.peak_memory_bytes)
                lines.append(line)
    return lines, ratios


def of_hugging_face(every: Sequence[int]) -> tuple[list[str], dict[str, Sequence[float]]]:
    import torch

    lines = ["| 256 tokens | tracked, MiB, by rank | predicted | predicted / tracked |", "|---|---|---|---|"]
    ratios: dict[str, Sequence[float]] = {}
    graphs: dict[tuple[str, Sizes], sw.Graph] = {}
    tokens = torch.zeros(1, TINY.tokens, dtype=torch.long)
    with tempfile.TemporaryDirectory() as folder:
        launcher, file = Launcher("torch", 1.0, Path(folder)), str(Path(folder) / "plan.json")
        for case in CASES:
            ranks = case.pp * case.dp * case.tp
            if ranks not in every:
                continue
            key = case.model, case.sizes
            if key not in graphs:
                with torch.device("meta"):
                    model = hugging_face(*key)
                graphs[key] = sw.capture(model, {"input_ids": tokens, "labels": tokens})
            pins: dict[str, Any] = {"slices": 1} if len(case.lengths) == 1 else {"slice_lengths": [*case.lengths]}
            plan = sw.plan(
                graphs[key], sw.Cluster("cpu", devices_per_node=ranks), batch=SAMPLES * case.dp, microbatch=1,
                pp=case.pp, dp=case.dp, tp=case.tp, schedule=case.schedule, recompute=case.recompute, shard=case.shard,
                headroom=0.0, precision="fp32", **pins,
            )  # fmt: skip
            plan.save(file)
            peaks = launcher.run(ranks, tracked_peaks, file, *key)
            line, ratios[case.name] = line_of(case.name, peaks, plan.predicted.peak_memory_bytes)
            lines.append(line)
    return lines, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--ranks", type=int, nargs="+", choices=RANKS, default=RANKS, help="that are tracked")
    parser.add_argument("--write", type=Path, help="append the tables to this file")
    options = parser.parse_args()
    lines: list[str] = []
    lowered, ratios = float("nan"), dict[str, Sequence[float]]()
    if "predicted" in options.parts:
        lines, lowered = predicted()
    for part, measure in (("tracked", measured), ("hugging face", of_hugging_face)):
        if part in options.parts:
            more, found = measure(options.ranks)
            ratios |= found
            lines += ["", *more]
    if options.write is not None:
        with options.write.open("a") as file:
            file.write("\n".join(lines) + "\n")
    judged = claims.sliced_memory(ratios, lowered)
    print(judged.verdict())
    sys.exit(judged.exit_code)


if __name__ == "__main__":
    main()
