"""Six models as KARMA trains them (arXiv 2008.11421, section 4), at a third of the memory that they take.

    python benchmarks/out_of_core.py [--models VGG-16 …] [--times 3] [--write benchmarks/results/out_of_core.md]
    python benchmarks/out_of_core.py --framework jax …      # its part is in `out_of_core_jax.py`

Small widths and images, the published depths; one rank, one microbatch, SGD with momentum, fp32, a thread. The budget
is what a plain step holds at its peak by torch's MemTracker, divided by ``--times``. Four plans of one model: all
kept; every unit recomputed that may be; every unit but the last on the host; and the one that is planned for the budget
with ``offload=True``. Each runs in a process of its own; its peak is the tracker's, which does not count the host store
(a mapped file). Gradients and running statistics are compared with those of the first plan, dropout on. Times are
medians, plans in turn.
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
from out_of_core_table import AWAY, KEPT, MEMORY_BYTES, MIB, PINS, PLANNED, RECOMPUTED, show
from torch import nn

import shardwright as sw
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.errors import PlanError

STEPS = 3


class Bottleneck(nn.Module):
    """He et al., arXiv 1512.03385, figure 5, right; with ``width`` alone the basic block of wide networks."""

    def __init__(self, before: int, width: int, widening: int, stride: int) -> None:
        super().__init__()
        after = width * widening
        sizes = [(1, 1), (3, stride), (1, 1)] if widening > 1 else [(3, stride), (3, 1)]
        channels = [before, width, width, after] if widening > 1 else [before, width, after]
        rows: list[nn.Module] = []
        for number, (size, step) in enumerate(sizes):
            rows += [nn.Conv2d(channels[number], channels[number + 1], size, step, size // 2, bias=False)]
            rows += [nn.BatchNorm2d(channels[number + 1]), nn.ReLU()]
        self.layers = nn.Sequential(*rows[:-1])
        same = stride == 1 and before == after
        self.short = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(x) + self.short(x))


class Classifier(nn.Module):
    """Rows of layers, the mean over places, a head and its loss."""

    def __init__(self, stem: nn.Module, rows: list[nn.Module], width: int) -> None:
        super().__init__()
        self.stem, self.rows, self.head = stem, nn.ModuleList(rows), nn.Linear(width, 10)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        for row in self.rows:
            x = row(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), label)


def residual(depths: list[int], width: int, widening: int) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    rows: list[nn.Module] = []
    before = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            rows.append(Bottleneck(before, width << stage, widening, 2 if stage and not block else 1))
            before = (width << stage) * widening
    return Classifier(stem, rows, before)


def vgg() -> nn.Module:
    """VGG-16 (arXiv 1409.1556): 13 convolutions."""
    plan = [8, 8, 0, 16, 16, 0, 32, 32, 32, 0, 64, 64, 64, 0, 64, 64, 64]
    rows: list[nn.Module] = []
    before = 8
    for width, after in zip(plan[1:], [*plan[2:], 0], strict=True):
        if width:
            made = [nn.Conv2d(before, width, 3, 1, 1), nn.ReLU(), *([nn.MaxPool2d(2)] if after == 0 else [])]
            rows.append(nn.Sequential(*made))
            before = width
    return Classifier(nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU()), rows, before)


class UNet(nn.Module):
    """Ronneberger et al., arXiv 1505.04597: values of the way down are read again on the way up."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList([self.twice(a, b) for a, b in zip([3, *widths[:-2]], widths[:-1], strict=True)])
        self.middle = self.twice(widths[-2], widths[-1])
        self.up = nn.ModuleList([self.twice(a + b, a) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)])
        self.head = nn.Conv2d(width, 1, 1)

    @staticmethod
    def twice(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, 1, 1), nn.BatchNorm2d(after), nn.ReLU(), nn.Conv2d(after, after, 3, 1, 1),
            nn.BatchNorm2d(after), nn.ReLU(),
        )  # fmt: skip

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x, left = image, []
        for block in self.down:
            x = block(x)
            left.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = block(torch.cat([left.pop(), x], 1))
        wanted = label.view(-1, 1, 1, 1).expand(-1, 1, *x.shape[2:]) / 10
        return nn.functional.mse_loss(self.head(x), wanted)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int = 12, width: int = 64, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(layers)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


MODELS = {
    "ResNet-50": lambda: residual([3, 4, 6, 3], 8, 4),
    "ResNet-200": lambda: residual([3, 24, 36, 3], 8, 4),
    "VGG-16": vgg,
    "WRN-28": lambda: residual([4, 4, 4], 32, 1),
    "U-Net": UNet,
    "Transformer": Transformer,
}
PLANNED_MODELS = frozenset(MODELS) - {"VGG-16", "U-Net"}
"""The models that have a plan at a third: of the others the first layers alone are larger."""
BATCH = {"ResNet-200": 8, "Transformer": 16}


def built(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, count = MODELS[name]().train(), BATCH.get(name, 16)
    drawn = torch.Generator().manual_seed(1)
    if name == "Transformer":
        return model, {"tokens": torch.randint(0, 256, (count, 256), generator=drawn)}
    image = torch.randn(count, 3, 64, 64, generator=drawn)
    return model, {"image": image, "label": torch.randint(0, 10, (count,), generator=drawn)}


def planned(name: str, plan: str, budget: int) -> sw.Plan | str:
    """A plan of one model, or why there is none."""
    model, batch = built(name)
    count = len(next(iter(batch.values())))
    graph = sw.capture(model, batch)
    reserved = MEMORY_BYTES - budget if plan == PLANNED else 0
    device = replace(load_profile("cpu").device, memory_bytes=MEMORY_BYTES, reserved_memory_bytes=reserved)
    full = {"recompute": "full"}
    given: dict[str, Any] = {KEPT: {"recompute": "none"}, RECOMPUTED: full, AWAY: full, PLANNED: {"offload": True}}[
        plan
    ]
    asked: dict[str, Any] = {"batch": count, "microbatch": count, **PINS, **given}
    if plan == AWAY:
        units = len(sw.plan(graph, sw.Cluster(device), **asked).model.unit_classes)
        asked["offloaded_units"] = range(units - 1)
    try:
        return sw.plan(graph, sw.Cluster(device), **asked)
    except PlanError as error:
        return str(error)


def run(name: str, file: str, out: str) -> None:
    """One process: a plan's peak by the tracker, its gradients and buffers, and the times of its steps, asked for by a
    line on standard input each."""
    import shardwright.torch as swt

    swt.init(plan=file)
    swt.set_seed(3)
    made, batch = built(name)
    model = swt.DistributedModel(made)
    optimizer = swt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False))

    @swt.step
    def train_step(model: Any, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(**batch)
        model.backward(loss)
        return loss

    def step() -> float:
        optimizer.zero_grad()
        begun = time.perf_counter()
        train_step(model, **batch)
        optimizer.step()
        return time.perf_counter() - begun

    for _ in range(2):
        step()
    optimizer.zero_grad()
    with tracked.tracking(tracked.held_by(model.runtime), optimizer, batch.values()) as tracker:
        train_step(model, **batch)
        optimizer.step()
        peak = tracker.peak_bytes()
    torch.save({"gradients": [p.grad for p in model.parameters()], "buffers": list(made.buffers())}, out)
    print(json.dumps({"peak": peak}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"seconds": statistics.median(step() for _ in range(STEPS))}), flush=True)


class Ranks:
    """The processes of one model's plans."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.plans: dict[str, sw.Plan] = {}
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.peaks: dict[str, int] = {}

    def start(self, label: str, plan: sw.Plan) -> None:
        number = len(self.running)
        file, out = self.folder / f"{number}.json", self.folder / f"{number}.pt"
        plan.save(file)
        command = [sys.executable, __file__, "--run", self.name, str(file), str(out)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}
        running = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )  # fmt: skip
        self.plans[label], self.running[label] = plan, running
        self.peaks[label] = self._told(label)["peak"]

    def _told(self, label: str) -> dict[str, Any]:
        out = self.running[label].stdout
        assert out is not None
        for line in out:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"{self.name}, {label}: the process ended")

    def step_s(self, label: str) -> float:
        given = self.running[label].stdin
        assert given is not None
        given.write("step\n")
        given.flush()
        return float(self._told(label)["seconds"])

    def differs(self, label: str) -> float:
        """By how much gradients and buffers are others than those of the first plan, as a share of their size."""
        number = list(self.running).index(label)
        one, other = (torch.load(self.folder / f"{n}.pt") for n in (0, number))
        pairs = [
            *zip(one["gradients"], other["gradients"], strict=True),
            *zip(one["buffers"], other["buffers"], strict=True),
        ]
        return max(float((a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-9)) for a, b in pairs)

    def close(self) -> None:
        for running in self.running.values():
            running.kill()
            running.wait()


def measured(name: str, times: float, rounds: int) -> list[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder), name)
        try:
            whole = planned(name, KEPT, 0)
            assert isinstance(whole, sw.Plan), whole
            ranks.start(KEPT, whole)
            budget = int(ranks.peaks[KEPT] / times)
            for label in (RECOMPUTED, AWAY, PLANNED):
                plan = planned(name, label, budget)
                if isinstance(plan, sw.Plan):
                    ranks.start(label, plan)
                else:
                    print(f"{name}, {label}: {plan}", file=sys.stderr)
            seconds = {label: [] for label in ranks.running}
            for _ in range(rounds):
                for label in seconds:
                    seconds[label].append(ranks.step_s(label))
            rows = []
            first = statistics.median(seconds[KEPT])
            for label, plan in ranks.plans.items():
                modes, peak = plan.unit_modes, ranks.peaks[label]
                ratio = plan.predicted.peak_memory_bytes[0] / peak
                holds = label != PLANNED or (peak <= budget and 1 <= ratio <= 1.03)
                rows.append(
                    [name, label, f"{modes.count('none')}, {modes.count('full')}, {modes.count('offload')}",
                     f"{peak / MIB:.1f}", f"{budget / MIB:.1f}", f"{ratio:.3f}", "yes" if peak <= budget else "no",
                     f"{statistics.median(seconds[label]) / first:.2f}",
                     f"{plan.predicted.step_time_s / whole.predicted.step_time_s:.2f}", f"{ranks.differs(label):.1e}",
                     "yes" if holds else "**no**"]
                )  # fmt: skip
            if PLANNED not in ranks.plans:
                rows.append([name, PLANNED, "no plan", "", f"{budget / MIB:.1f}", *[""] * 5, "**no**"])
            return rows
        finally:
            ranks.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--times", type=float, default=3.0, help="of the budget, what a plain step takes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.framework == "jax":
        import out_of_core_jax

        return out_of_core_jax.run(options.models, options.times, options.rounds, options.write)
    rows = [row for name in options.models for row in measured(name, options.times, options.rounds)]
    header = ["model", "plan", "units kept, recomputed, offloaded", "peak, MiB", "budget", "predicted / peak",
              "within", "time of all kept", "as predicted", "differs by", "holds"]  # fmt: skip
    show(header, rows, options.write)
    found = {row[0]: (float(row[3]) / float(row[4]), float(row[9])) for row in rows if row[1] == PLANNED and row[9]}
    judged = claims.out_of_core(found, len(PLANNED_MODELS.intersection(options.models)))
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(*sys.argv[2:5])
    else:
        sys.exit(main())
