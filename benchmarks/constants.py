"""Every constant of the time model: its value, mechanism, origin, and the error on published runs without it.

    python benchmarks/constants.py [--planned] [--only TEXT] [--data FOLDER] [--write benchmarks/results/constants.md]

The steps of A100 are composed in closed form, as in `fit_cost_model.py`; ``--planned`` adds tables whose steps are
planned and simulated, which takes long: those of T4, and of systems that overlap and eager kernels. ``--only`` shows
the constants whose names have a text in them, and judges nothing.
Without: the constant is set to what switches its mechanism off, on every device and link of the tables, and nothing is
fitted again. An error that falls means that the mechanism errs on that table, or that others were fitted around it.
Exits with 1 where a constant has no origin, or an error with all of them is above what `claims.constants` allows.
"""

import argparse
import ast
import csv
import inspect
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import claims
import fit_cost_model
import large_runs
import numpy as np
import t4_cluster
from published import DATA, Run, held_out, regrets, same_work, selective, single_node, unit_times
from scipy.stats import spearmanr

import shardwright as sw
from shardwright.core import execution
from shardwright.core.cluster import groups
from shardwright.core.cluster.hardware import Device, Link, load_profile
from shardwright.core.cluster.hardware.protocol import protocols_of
from shardwright.core.cluster.hardware.template import MEANINGS
from shardwright.core.cost import fp8_casts, handwritten_kernels, matrix_products, unit_count, unit_seconds
from shardwright.core.search import exchanges, search
from shardwright.core.tables import graph_reading, update_seconds

COMPOSED = (
    ("one node", "`a100_single_node_gpt.csv`: 1,440 runs on one node of A100-80GB, MAPE"),
    ("held out", "the two of its eight models that no fit saw, MAPE"),
    ("22B to 1T", "`a100_selective_recompute.csv`: four runs with full recompute on 8 to 512 A100, MAPE"),
)
PLANNED = (
    ("T4", "`t4_16_gpt_medium.csv`: 47 steps on 16 T4, MAPE"),
    ("T4 ranks", "the same, Spearman's rank correlation"),
    ("large", "`published_large_runs.csv`: its five rows of which all was published (ZeRO-3, FSDP2), MAPE"),
)
OTHERS_SEEN = (
    "`published_large_runs.csv`: its four rows of Megatron-Core on H100, as ranges (`benchmarks/large_runs.py`)",
    "the other columns of `a100_selective_recompute.csv`: selective recompute, and memory (`benchmarks/accuracy.py`)",
    "SageMaker's figures (arXiv 2111.05972 and its documentation: 175B, 30B and 10B on A100) and Horovod's scaling "
    "(arXiv 1905.04035), beside `benchmarks/accuracy.py`; no number is fitted on them, but which code of "
    "DeepSpeed the 30B row is held against, with lists of ranks or without. Horovod's time of one reduction, "
    "of the same paper, is the rate of the port in `benchmarks/horovod.py`, and in no other table",
    "NCCL 2.28, src/graph/tuning.cc: latencies and bandwidths of its protocols, taken over as origins say",
    "nccl-tests of 16 A100 on 2 p4de (AWS EFA workshop) and of V100 on 2 to 8 p3dn (AWS deep-learning AMI guide): EFA "
    "links and protocols alone, in none of the tables here",
    "this library's own measurements of tiny models on a CPU (`benchmarks/host_time.py`)",
)


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant, or a group of those of one mechanism.

    place: "device", "inside" or "outside" (links within a node and between nodes), or the module that holds it.
    off: the value that switches the mechanism off.
    measured_by: the microbenchmark that could measure it.
    """

    name: str
    place: str | ModuleType
    off: object
    measured_by: str


_LARGE = "nccl-tests, large messages"
CONSTANTS = (
    Constant("matmul_efficiency", "device", 1.0, "a product of 8192 × 8192 × 8192 against the peak"),
    Constant("compute_units", "device", None, "products of n × n by n, n rising: the steps between waves of tiles"),
    Constant("tile_depth", "device", None, "products of equal m and n, k rising: the intercept over k"),
    Constant("TILES", matrix_products, tuple((m, n, 1.0) for m, n, _ in matrix_products.TILES),
             "cuBLAS with each tile shape forced, by its profiler"),
    Constant("SPLITS", matrix_products, (1,), "products of small m and n and large k, split-k forced and forbidden"),
    Constant("memory_efficiency", "device", 1.0, "a copy of 1 GiB against the data sheet's bandwidth"),
    Constant("vector_efficiency", "device", None, "bias with dropout and residual, GELU and softmax kernels, large"),
    Constant("FUSED_ATTENTION_EFFICIENCY", unit_seconds, 1.0, "an attention kernel against a large product"),
    Constant("kernel_launch_s", "device", 0.0, "a stream of empty kernels"),
    Constant("dispatch_s", "device", 0.0, "a layer of width 64, timed on the host without waiting for the device"),
    Constant("BACKWARD_DISPATCH", unit_seconds, 1.0, "the same layer's backward over its forward"),
    Constant("COLLECTIVE_DISPATCH", unit_seconds, 0.0, "the same layer with an all-reduce in a group of one rank"),
    Constant("EAGER_OP_DISPATCH", unit_seconds, 1.0, "a chain of elementwise ops on one entry, over a linear layer"),
    Constant("COMPILED_DISPATCH", execution, 1.0, "the same chain's kernels from a compiler, over eager ones"),
    Constant("ISSUED", fp8_casts, 0.0, "the kernels that scale and cast one operand, timed on the host"),
    Constant("OVERLAP_POWER", unit_seconds, math.inf, "layers of rising width through the point where host and device "
             "take as long"),
    Constant("SOFTMAX_OPS", handwritten_kernels, 0, "attention with 2 and with 4 heads × samples under a profiler"),
    Constant("the loss op by op (no constant)", unit_count, None, "a loss over 51,200 words under a profiler"),
    Constant("latency_s inside", "inside", 0.0, "nccl-tests of 8 bytes over the number of ranks of a node"),
    Constant("efficiency inside", "inside", 1.0, f"{_LARGE}, the ranks of a node"),
    Constant("transport inside", "inside", "", "nccl-tests of 1 KiB to 1 GiB with NCCL_PROTO set to each"),
    Constant("latency_s outside", "outside", 0.0, "nccl-tests of 8 bytes over the number of nodes"),
    Constant("efficiency outside", "outside", 1.0, f"{_LARGE}, one rank a node"),
    Constant("transport outside", "outside", "", "nccl-tests of 1 KiB to 1 GiB with NCCL_PROTO set to each"),
    Constant("TREE_BANDWIDTH", groups, 1.0, f"{_LARGE}, one rank a node, with NCCL_ALGO=Tree over Ring"),
    Constant("TREE_INSIDE", groups, 1.0, f"{_LARGE}, two full nodes, with NCCL_ALGO=Tree over Ring"),
    Constant("RING_PLATEAU", groups, 1.0, "nccl-tests of 64 KiB to 1 MiB, NCCL_ALGO=Ring and NCCL_PROTO=Simple"),
    Constant("PIPELINE_MESSAGE_S", execution, 0.0, "a pipeline of tiny stages, less the thread time of its passes"),
    Constant("HOST_UPDATE_BYTES_PER_S", update_seconds, math.inf, "an optimizer's step on the host, large parameters"),
    Constant("SLOWED_BY_COLLECTIVE", unit_seconds, 0.0, "a product alone, and beside an all-reduce of another stream"),
    Constant("SLOWED", exchanges, dict.fromkeys(exchanges.SLOWED, 0.0), "a product alone, and beside an all-reduce"),
    Constant("CHANNELS_OF_A_PORT", exchanges, exchanges.MOST_CHANNELS, "NCCL's log: channels by ranks of each node"),
    Constant("gathered_bytes_per_s of deepspeed-0.4", execution, 0.0, "its gathers of a large parameter within a node"),
    Constant("lists_ranks of deepspeed-0.4", execution, False, "its gathers of one parameter over ever more ranks"),
    Constant("live_entries of deepspeed-0.4", execution, 0, "its gathers in a step, counted, of ever wider layers"),
    Constant("whole_entries of deepspeed-0.4", execution, 0, "its gathers in a step, counted, of a narrow layer"),
)  # fmt: skip
DEEPSPEED = "deepspeed-0.4"
OF_DEEPSPEED = {
    "gathered_bytes_per_s": "Fitted: the three rows of ZeRO-3 in arXiv 2104.04473, table 2; see `core/execution.py`.",
    "lists_ranks": "Source: DeepSpeed's code of 2021 gives torch a list of one tensor for each rank; it copies each.",
    "live_entries": "Source: DeepSpeed's default of stage3_max_reuse_distance.",
    "whole_entries": "Source: DeepSpeed's default of stage3_param_persistence_threshold.",
}
"""The origins of what makes ZeRO-3's gathers slow."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planned", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    judge = Tables(options.data, planned=options.planned)
    base = judge.errors(None)
    rows = ["| with all of them | | | | " + _cells(base, base) + " |"]
    print(rows[0], flush=True)
    origins: dict[str, str] = {}
    without: dict[str, Mapping[str, float]] = {}
    for constant in (each for each in CONSTANTS if options.only in each.name):
        value, origins[constant.name] = described(constant)
        without[constant.name] = judge.errors(constant)
        rows.append(
            f"| `{constant.name}` | {value} | {_said(constant.off)} | {constant.measured_by} "
            f"| {_cells(without[constant.name], base)} |"
        )
        print(rows[-1], flush=True)
    if options.only:
        return 0
    text = "\n".join(
        [
            *_head(origins, list(base)),
            *rows,
            *_missed(judge.runs),
            *_tail(origins),
            f"Whole benchmark: {time.perf_counter() - started:.0f} s.",
        ]
    )
    print(text)
    if options.write:
        options.write.write_text(text + "\n")
    judged = claims.constants(base, without, origins)
    print(judged.verdict())
    return judged.exit_code


def described(constant: Constant) -> tuple[str, str]:
    """The value, and the mechanism with its origin."""
    kinds = {"A100": load_profile("a100-80gb"), "T4": load_profile("t4")}
    name = constant.name.split()[0]
    if constant.place == "device":
        values = [f"{which} {_said(getattr(p.device, name))}" for which, p in kinds.items()]
        origins = [f"{which}: {p.device.origins[name]}" for which, p in kinds.items()]
        return ", ".join(values), " ".join([MEANINGS[name], *origins])
    if constant.place in ("inside", "outside"):
        links = [p.intra_node if constant.place == "inside" else p.inter_node for p in kinds.values()]
        if name == "transport":
            count = sum(len(protocols_of(link.transport)) for link in links)
            return (
                f"{count} protocols",
                f"{MEANINGS[name]} prior: `hardware/protocols.toml` has an origin for each number",
            )
        values = [f"{link.name} {_said(getattr(link, name))}" for link in links]
        return ", ".join(values), " ".join([MEANINGS[name], *(f"{link.name}: {link.origins[name]}" for link in links)])
    assert isinstance(constant.place, ModuleType)
    if constant.place is unit_count:
        return "", "Paper: Megatron-LM's loss over a split vocabulary is a function of plain torch ops in float32."
    if constant.name.endswith(f" of {DEEPSPEED}"):
        return _said(getattr(execution.SYSTEMS[DEEPSPEED], name)), OF_DEEPSPEED[name]
    return _said(getattr(constant.place, name)), _documented(constant.place, name)


def _documented(module: ModuleType, name: str) -> str:
    """The text that stands under a constant in its module."""
    body = ast.parse(inspect.getsource(module)).body
    for assigned, text in itertools.pairwise(body):
        targets = assigned.targets if isinstance(assigned, ast.Assign) else []
        if any(isinstance(each, ast.Name) and each.id == name for each in targets) and isinstance(text, ast.Expr):
            return " ".join(str(ast.literal_eval(text.value)).split())
    raise LookupError(f"{module.__name__}.{name} has no text under it")


class Tables:
    """The published tables, and how far predictions are from them."""

    def __init__(self, data: Path, *, planned: bool) -> None:
        self.planned = planned
        self.runs = single_node(data / "a100_single_node_gpt.csv")
        self.held = np.array([held_out(run) for run in self.runs])
        self.larger = [row.full for row in selective(data / "a100_selective_recompute.csv")]
        self.trials = t4_cluster.trials(data / "t4_16_gpt_medium.csv")
        with (data / "published_large_runs.csv").open(newline="") as file:
            self.large = [row for row in csv.DictReader(file) if row["microbatch"]]

    def errors(self, constant: Constant | None) -> dict[str, float]:
        """The error on each table without a constant; None: with all."""
        with _without(constant):
            a100 = load_profile("a100-80gb")
            machine = fit_cost_model.Machine(
                _changed(a100.device, constant), _changed(a100.intra_node, constant, "inside")
            )
            near = np.abs(fit_cost_model.errors(self.runs, machine))
            far = np.abs(fit_cost_model.errors(self.larger, machine))
            found = {"one node": near.mean(), "held out": near[self.held].mean(), "22B to 1T": far.mean()}
            if self.planned:
                found |= self._planned(constant)
        return {name: float(value) for name, value in found.items()}

    def _planned(self, constant: Constant | None) -> dict[str, float]:
        cluster = _cluster(t4_cluster.cluster(), constant)
        steps = np.array([t4_cluster.plan_of(trial, cluster).predicted.step_time_s for trial in self.trials])
        measured = np.array([trial.measured_s for trial in self.trials])
        large = [
            large_runs.rate_of(row, plan) / float(row["value"]) - 1
            for row in self.large
            for plan in large_runs.plans_of(row, _cluster(large_runs.cluster_of(row), constant))
        ]
        return {
            "T4": np.abs(steps / measured - 1).mean(),
            "T4 ranks": spearmanr(steps, measured).statistic,
            "large": np.abs(large).mean() if len(large) == len(self.large) else math.nan,
        }


def _changed(part: Device | Link, constant: Constant | None, place: str = "device") -> Device | Link:
    """A device, or a link at a place, without the constant, if it is one of its."""
    if constant is None or constant.place != place:
        return part
    return replace(part, **{constant.name.split()[0]: constant.off})


def _cluster(known: sw.Cluster, constant: Constant | None) -> sw.Cluster:
    """A uniform cluster whose device and links are without the constant."""
    return sw.Cluster(
        _changed(known.device(0), constant),
        nodes=known.nodes,
        devices_per_node=known.groups[0].devices_per_node,
        intra_node=_changed(known.groups[0].intra_node, constant, "inside"),
        inter_node=_changed(known.inter_node, constant, "outside"),
    )


@contextmanager
def _without(constant: Constant | None) -> Iterator[None]:
    """The library with a constant of its modules switched off, and nothing remembered from before."""
    undo: list[Callable[[], object]] = []
    if constant is not None and isinstance(constant.place, ModuleType):
        name, off, holder = constant.name, constant.off, constant.place
        if name.endswith(f" of {DEEPSPEED}"):
            known = execution.SYSTEMS
            off = known | {DEEPSPEED: replace(known[DEEPSPEED], **{name.split()[0]: constant.off})}
            name, holder = "SYSTEMS", execution
        elif name == "PIPELINE_MESSAGE_S":
            known = execution.SYSTEMS
            off = {each: replace(own, message_s=own.message_s and constant.off) for each, own in known.items()}
            name = "SYSTEMS"
        elif holder is unit_count:
            name, off = "loss_ops", lambda *_: frozenset()
        before = getattr(holder, name)
        setattr(holder, name, off)
        undo.append(lambda: setattr(holder, name, before))
    recounts = constant is not None and constant.place in (unit_count, handwritten_kernels)
    _forget(recounts=recounts)
    try:
        yield
    finally:
        for each in undo:
            each()
        _forget(recounts=recounts)


def _forget(*, recounts: bool) -> None:
    """Drop what is remembered of clusters and products, and of the work of graphs where that is counted anew."""
    search._REMEMBERED.clear()
    matrix_products._compute_s.cache_clear()
    if recounts:
        graph_reading._readings.clear()
        fit_cost_model.works.cache_clear()


def _said(value: object) -> str:
    match value:
        case None:
            return "none"
        case float():
            return "∞" if math.isinf(value) else f"{value:g}"
        case dict():
            return ", ".join(f"{key} {_said(each)}" for key, each in value.items())
        case tuple():
            return ", ".join(_said(each[-1] if isinstance(each, tuple) else each) for each in value)
    return str(value) or "none"


def _cells(found: Mapping[str, float], base: Mapping[str, float]) -> str:
    def cell(name: str) -> str:
        if name.endswith("ranks"):
            return f"{found[name]:.3f}"
        said = f"{found[name]:.1%}"
        return f"**{said}**" if abs(found[name] - base[name]) >= 0.005 else said

    return " | ".join(map(cell, base))


def _head(origins: Mapping[str, str], tables: Sequence[str]) -> list[str]:
    fitted = sum("fitted:" in origin.lower() for origin in origins.values())
    return [
        "# The constants of the time model",
        "",
        "    python benchmarks/constants.py",
        "",
        f"{len(CONSTANTS)} mechanisms, of which {fitted} have a constant that is fitted on a published table, as its "
        "origin says; the others are from data sheets, published kernels and source code, or priors. What is counted "
        "(FLOPs, bytes, kernels, messages) has none. Each column is the error on one table with the constant set to "
        "the value under `off`, which switches its mechanism off, and nothing fitted again; bold: it moves by half a "
        "percent or more.",
        "",
        *(f"- {name}: {what}." for name, what in (*COMPOSED, *PLANNED) if name in tables),
        "",
        f"| constant | value | off | a microbenchmark that measures it | {' | '.join(tables)} |",
        "|---|---|---|---|" + "---|" * len(tables),
    ]


def _missed(runs: Sequence[Run]) -> list[str]:
    """What no mechanism here can explain: layers that are faster with more to do, and slow heads."""
    times = unit_times(runs)
    pairs = [(shape, (*shape[:2], 2 * shape[2])) for shape in times if (*shape[:2], 2 * shape[2]) in times]
    odd = [(one, twice) for one, twice in sorted(pairs) if times[twice][0] < times[one][0]]
    profile = load_profile("a100-80gb")
    machine = fit_cost_model.Machine(profile.device, profile.intra_node)
    regret = _regret(runs, machine)
    heads: dict[int, list[float]] = {}
    for (hidden, tp, samples), (_, head_s) in times.items():
        embedding, _, head = next(
            machine.known[key] for key in machine.known if (key[0], *key[3:]) == (hidden, tp, samples)
        )
        heads.setdefault(tp, []).append(head_s / (embedding.total_s + head.total_s))
    explained = {one for one, _ in odd if one[1:] == (8, 1)}
    for key, (embedding, layer, head) in list(machine.known.items()):
        shape = key[0], *key[3:]
        if any(shape == twice and one not in explained for one, twice in odd):
            share = times[shape][0] / (layer.total_s + layer.forward_s)
            parts = {name: share * getattr(layer, name) for name in ("forward_s", "input_grad_s", "weight_grad_s")}
            machine.known[key] = embedding, replace(layer, **parts), head
    return [
        "",
        "## What these leave unexplained",
        "",
        f"The steps of the first table are composed of {len(times)} layer times, each read off it here, and of as many "
        f"heads. In {len(odd)} of {len(pairs)} cases a layer takes less time with twice the samples, although its work "
        f"doubles. Of one sample at tp 8 the softmax says why (`SOFTMAX_OPS`); of the other {len(odd) - len(explained)}"
        " no mechanism here does: the host rules there, and its time differs by a fifth between shapes that ask the "
        "same of it. The choice between plans that lie close hangs on them: the regret at equal batch and devices is "
        f"{regret:.1%} (composed in closed form), and {_regret(runs, machine):.1%} where these few layer times are "
        "those read off, and all else is as predicted.",
        "",
        *(
            f"- width {hidden}, tp {tp}: {times[hidden, tp, samples][0] * 1e3:.2f} ms of {samples} samples, "
            f"{times[twice][0] * 1e3:.2f} ms of {twice[2]}"
            for (hidden, tp, samples), twice in odd
        ),
        "",
        "Heads (with the embedding), read off over predicted, means: "
        + ", ".join(f"{np.mean(found):.1f} at tp {tp}" for tp, found in sorted(heads.items()))
        + ". What is missing at tp 1 grows with samples × width, as the product with the vocabulary does: that would "
        "run at a third of its rate. Half as wide, at tp 2, it does not. No mechanism is known that does this to one "
        "and not to the other, so none is here; layers of tp 1 that are predicted too slow make up for it.",
    ]


def _regret(runs: Sequence[Run], machine: fit_cost_model.Machine) -> float:
    predicted = [fit_cost_model.predicted_s(run, machine) for run in runs]
    return float(np.mean(list(regrets(runs, predicted, range(len(runs)), same_work))))


def _tail(origins: Mapping[str, str]) -> list[str]:
    return [
        "",
        "## What each is, and where its value comes from",
        "",
        *(f"- `{name}`: {origin}" for name, origin in origins.items()),
        "",
        "## Every published table that was looked at",
        "",
        *(f"- {what}" for _, what in (*COMPOSED, *PLANNED) if what.startswith("`")),
        *(f"- {what}" for what in OTHERS_SEEN),
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
