"""The published runs that predictions are compared with: read from data files, one value for each run."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True, slots=True)
class Run:
    """One GPT run of Megatron. ``measured_s`` is a step."""

    model: str
    hidden: int
    heads: int
    layers: int
    sequence: int
    pp: int
    dp: int
    tp: int
    batch: int
    microbatch: int
    measured_s: float
    virtual_stages: int = 1

    @property
    def devices(self) -> int:
        return self.pp * self.dp * self.tp


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A row of the selective-recompute table: one model, full recompute against sequence parallelism + selective."""

    full: Run
    selective_s: float
    state_gib: float
    """Parameters, gradients and optimizer states of the layers, on one rank."""
    activations_whole_gib: float
    """Activations on the first pipeline rank without recompute and without sequence parallelism."""
    activations_selective_gib: float


def single_node(path: Path) -> list[Run]:
    """The runs of one node."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        Run(
            model=f"{r['hidden size']} × {r['# layers']}",
            hidden=int(r["hidden size"]),
            heads=int(r["attention heads"]),
            layers=int(r["# layers"]),
            sequence=int(r["sequence length"]),
            pp=int(r["pipeline parallelism"]),
            dp=int(r["data parallelism"]),
            tp=int(r["tensor parallelism"]),
            batch=int(r["global batch"]),
            microbatch=int(r["micro batch"]),
            measured_s=float(r["iteration time (ms)"]) / 1e3,
        )
        for r in rows
    ]


def selective(path: Path, sequence: int = 2048) -> list[Recomputed]:
    """The runs with full recompute and with sequence parallelism and selective recompute."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    found = []
    for r in rows:
        pp, tp, gpus = int(r["pipeline"]), int(r["tensor"]), int(r["gpus"])
        run = Run(
            model=r["model"],
            hidden=int(r["hidden"]),
            heads=int(r["heads"]),
            layers=int(r["layers"]),
            sequence=sequence,
            pp=pp,
            dp=gpus // (pp * tp),
            tp=tp,
            batch=int(r["global_batch"]),
            microbatch=int(r["micro_batch"]),
            measured_s=float(r["full_recompute_s"]),
            virtual_stages=int(r["interleave"]),
        )
        found.append(
            Recomputed(
                run,
                float(r["sp_selective_s"]),
                float(r["params_optimizer_gib"]),
                float(r["activations_none_gib"]),
                float(r["activations_sp_selective_gib"]),
            )
        )
    return found


def unit_times(runs: Sequence[Run]) -> dict[tuple[int, int, int], tuple[float, float]]:
    """Seconds of one microbatch of one layer, full recompute in it, and of embedding and head, by (hidden, tensor
    degree, microbatch): the slope of a step over the number of microbatches, without pipeline, is a straight line over
    the number of layers."""
    steps: dict[tuple[int, int, int], dict[int, dict[int, list[tuple[int, float]]]]] = {}
    for r in runs:
        if r.pp == 1:
            of_shape = steps.setdefault((r.hidden, r.tp, r.microbatch), {})
            of_shape.setdefault(r.layers, {}).setdefault(r.dp, []).append(
                (r.batch // r.dp // r.microbatch, r.measured_s)
            )
    found = {}
    for shape, by_layers in steps.items():
        slopes = {}
        for layers, by_dp in by_layers.items():
            points = sorted(max(by_dp.values(), key=len))
            if len(points) > 1:
                slopes[layers] = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
        if len(slopes) > 1:
            few, many = min(slopes), max(slopes)
            layer_s = (slopes[many] - slopes[few]) / (many - few)
            found[shape] = layer_s, slopes[few] - few * layer_s
    return found


def regrets(
    runs: Sequence[Run], predicted: Sequence[float], chosen: Iterable[int], alike: Callable[[Run], object]
) -> Iterator[float]:
    """Of each group of runs that are alike, how much slower per sample the one predicted to be fastest really is than
    the fastest."""
    groups: dict[object, list[int]] = {}
    for index in chosen:
        groups.setdefault(alike(runs[index]), []).append(index)
    for members in groups.values():
        if len(members) > 1:
            picked = min(members, key=lambda i: predicted[i] / runs[i].batch)
            fastest = min(runs[i].measured_s / runs[i].batch for i in members)
            yield runs[picked].measured_s / runs[picked].batch / fastest - 1


def same_work(run: Run) -> object:
    """What runs have in common that are a choice between plans: model, batch and devices."""
    return run.model, run.batch, run.devices


def held_out(run: Run) -> bool:
    """Whether a run belongs to the fifth that no fit sees: two of the models, whole, one of each width."""
    return run.model in HELD_OUT


HELD_OUT = ("1024 × 20", "2048 × 16")
