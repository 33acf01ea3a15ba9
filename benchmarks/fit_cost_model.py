"""Fit the efficiencies of the A100 profile on published runs: prints the values that its files hold.

    python benchmarks/fit_cost_model.py [--data FOLDER]

Fitted on: the runs of one node (`a100_single_node_gpt.csv`) without the two models that `published.held_out` names,
and the full-recompute column of `a100_selective_recompute.csv`. What is counted (FLOPs, bytes, kernels, messages) and
what data sheets give stays; each fitted constant starts from its prior and pays for leaving it (a Gaussian in its
logarithm). The loss is the mean absolute logarithm of predicted over measured, of one node and of the larger runs,
half the weight on each. Steps are composed in closed form here (equal stages, 1F1B); `accuracy.py` judges by the
simulator.
"""

import argparse
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from predict import graph_of
from published import DATA, Run, held_out, selective, single_node
from scipy.optimize import minimize

import shardwright.core.cost.unit_seconds as unit_module
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.cost.unit_seconds import UnitCost, seconds_of, unit_cost
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.cost.work import UnitWork
from shardwright.core.model.fold import fold
from shardwright.core.solver import Frame
from shardwright.core.solver.op_layouts import Rates, Terms, choose

PRIORS: dict[str, tuple[float, float]] = {
    "matmul_efficiency": (0.85, 0.15),
    "tile_depth": (64.0, 0.7),
    "vector_efficiency": (0.6, 0.4),
    "kernel_launch_s": (4e-6, 0.5),
    "dispatch_s": (60e-6, 0.7),
    "nvlink3.efficiency": (0.78, 0.2),
    "nvlink3.latency_s": (3.4e-6, 0.5),
    "BACKWARD_DISPATCH": (1.5, 0.4),
    "OVERLAP_POWER": (3.0, 0.5),
}
"""Constant → (prior, standard deviation of its logarithm)."""
PRIOR_WEIGHT = 0.003
RESTARTS = 3
LARGER = ("22B", "175B", "530B", "1T")
ROWS_STEP = 5
"""Every fifth run of one node is fitted on: runs that differ in the batch alone say the same."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster with one set of constants."""

    constants: dict[str, float]

    @classmethod
    def of(cls, logs: NDArray[np.float64]) -> "Machine":
        values = {
            name: prior * float(np.exp(log)) for (name, (prior, _)), log in zip(PRIORS.items(), logs, strict=True)
        }
        for name in ("matmul_efficiency", "vector_efficiency", "nvlink3.efficiency"):
            values[name] = min(values[name], 1.0)
        return cls(values)

    def cluster(self, run: Run) -> Cluster:
        c, profile = self.constants, load_profile("a100-80gb")
        device = replace(
            profile.device,
            matmul_efficiency=c["matmul_efficiency"],
            compute_units=108,
            tile_depth=c["tile_depth"],
            vector_efficiency=c["vector_efficiency"],
            kernel_launch_s=c["kernel_launch_s"],
            dispatch_s=c["dispatch_s"],
        )
        link = replace(profile.intra_node, efficiency=c["nvlink3.efficiency"], latency_s=c["nvlink3.latency_s"])
        per_node = min(8, run.devices)
        return Cluster(device, nodes=run.devices // per_node, devices_per_node=per_node, intra_node=link)


RATES = Rates(2.5e14, 1.6e12, 2e11)
"""By which the layouts of a layer are chosen: those of an A100, roughly; the answer does not hang on them."""


@lru_cache(maxsize=1024)
def works(hidden: int, heads: int, sequence: int, tp: int, microbatch: int) -> tuple[UnitWork, UnitWork, UnitWork]:
    """Embedding, layer and head, with everything split that can be."""
    graph = graph_of(hidden, heads, 2, sequence)
    folded, counter = fold(graph), WorkCounter(graph)
    layouts = choose(Frame(folded, counter), Terms(tp, RATES, "fp16", 16.0))
    found = []
    for index in (0, 1, 3):
        unit = folded.units[index]
        found.append(counter.count(unit, microbatch, "fp16", layouts.realised(index) if tp > 1 else None))
    return found[0], found[1], found[2]


def predicted_s(run: Run, machine: Machine, known: dict[object, tuple[UnitCost, ...]]) -> float:
    """Seconds of a step with full recompute."""
    key = (run.hidden, run.heads, run.sequence, run.tp, run.microbatch)
    cluster = machine.cluster(run)
    if key not in known:
        collective_s = seconds_of(cluster.group(range(run.tp)), run.tp) if run.tp > 1 else None
        # Gradients add up in fp16 in the runs of one node (DeepSpeed), in fp32 in the larger ones (Megatron-LM).
        added_bytes = 10 if run.model in LARGER else 6
        held = (51200 * run.hidden, 12 * run.hidden**2, 51200 * run.hidden)
        known[key] = tuple(
            unit_cost(
                work,
                cluster.device(0),
                "fp16",
                collective_s=collective_s,
                gradient_bytes=entries // run.tp * added_bytes,
            )
            for work, entries in zip(works(*key), held, strict=True)
        )
    embedding, layer, head = known[key]
    microbatches = run.batch // (run.dp * run.microbatch)
    stages = [run.layers / run.pp * (layer.total_s + layer.forward_s)] * run.pp
    busiest_layers = stages[0]
    stages[0] += embedding.total_s
    stages[-1] += head.total_s
    if run.virtual_stages == 1:
        pipeline = sum(stages) + (microbatches - 1) * max(stages)
    else:  # what an end of the pipeline has more than the others fits into its bubble
        pipeline = microbatches * busiest_layers + (run.pp - 1) * busiest_layers / run.virtual_stages
    elements = (12 * run.hidden**2 * run.layers / run.pp + 51200 * run.hidden) / run.tp
    device = cluster.device(0)
    tail = (
        elements
        * (58 if run.model in LARGER else 36)
        / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    )
    if run.dp > 1:
        tail += cluster.group(range(0, run.dp * run.tp, run.tp)).all_reduce_s(2 * elements)
    return pipeline + tail


def errors(runs: list[Run], machine: Machine) -> NDArray[np.float64]:
    """Logarithm of predicted over measured, of each run."""
    unit_module.BACKWARD_DISPATCH = machine.constants["BACKWARD_DISPATCH"]
    unit_module.OVERLAP_POWER = machine.constants["OVERLAP_POWER"]
    known: dict[object, tuple[UnitCost, ...]] = {}
    return np.log([predicted_s(run, machine, known) / run.measured_s for run in runs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--evaluations", type=int, default=700)
    options = parser.parse_args()
    runs = [run for run in single_node(options.data / "a100_single_node_gpt.csv") if not held_out(run)][::ROWS_STEP]
    larger = [row.full for row in selective(options.data / "a100_selective_recompute.csv")]
    deviations = np.array([deviation for _, deviation in PRIORS.values()])

    def loss(logs: NDArray[np.float64]) -> float:
        machine = Machine.of(logs)
        near, far = errors(runs, machine), errors(larger, machine)
        smooth = np.mean(np.sqrt(near**2 + 1e-4)) + 0.5 * np.mean(np.sqrt(far**2 + 1e-4))
        return float(smooth + PRIOR_WEIGHT * np.sum((logs / deviations) ** 2))

    logs = np.zeros(len(PRIORS))
    for _ in range(RESTARTS):  # a simplex that has shrunk early goes on from a fresh one
        logs = minimize(
            loss,
            logs,
            method="Nelder-Mead",
            options={
                "maxfev": options.evaluations,
                "xatol": 1e-3,
                "fatol": 1e-5,
                "adaptive": True,
                "initial_simplex": logs + 0.15 * np.vstack([np.zeros(len(logs)), np.diag(deviations)]) / 0.3,
            },
        ).x
    machine = Machine.of(logs)
    for (name, (prior, _)), value in zip(PRIORS.items(), machine.constants.values(), strict=True):
        print(f"{name:20} {value:.4g}   (prior {prior:g})")
    near, far = errors(runs, machine), errors(larger, machine)
    print(f"one node: mean |log ratio| {np.mean(np.abs(near)):.2%}; larger: {np.round(far, 3).tolist()}")


if __name__ == "__main__":
    main()
