"""Fit the efficiencies of the A100 profile on published runs: prints the values that its files hold.

    python benchmarks/fit_cost_model.py [--data FOLDER]

Fitted on: the runs of one node (`a100_single_node_gpt.csv`) without the two models that `published.held_out` names,
and the full-recompute column of `a100_selective_recompute.csv`. What is counted (FLOPs, bytes, kernels, messages) and
what data sheets give stays; each fitted constant starts from its prior and pays for leaving it (a Gaussian in its
logarithm). The loss is the mean absolute error of one node, and half of that of the larger runs. Steps are composed in
closed form here (equal stages, 1F1B), which is within 1% of what `accuracy.py` judges by, the simulator.
"""

import argparse
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from megatron import EXECUTION
from numpy.typing import NDArray
from predict import graph_of
from published import DATA, Run, held_out, selective, single_node
from scipy.optimize import least_squares

import shardwright.core.cost.unit_seconds as unit_module
from shardwright.core.cluster.groups import Group
from shardwright.core.cluster.hardware import Device, Link, load_profile
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
    "COLLECTIVE_DISPATCH": (0.25, 1.0),
}
"""Constant → (prior, standard deviation of its logarithm)."""
DEVICE = ("matmul_efficiency", "tile_depth", "vector_efficiency", "kernel_launch_s", "dispatch_s")
UNIT_SECONDS = ("BACKWARD_DISPATCH", "OVERLAP_POWER", "COLLECTIVE_DISPATCH")
"""The constants of the device, and those of `cost.unit_seconds`."""
PRIOR_WEIGHT = 0.003
LARGER_WEIGHT = 0.5
LARGER = ("22B", "175B", "530B", "1T")


class Machine:
    """A node of A100 with one set of constants."""

    def __init__(self, device: Device, link: Link) -> None:
        self.device, self.link = device, link
        self.known: dict[tuple[int, int, int, int, int], tuple[UnitCost, ...]] = {}
        """Width, heads, sequence, tensor degree and microbatch → the costs of embedding, layer and head."""

    @classmethod
    def of(cls, constants: dict[str, float]) -> "Machine":
        profile = load_profile("a100-80gb")
        found = {name.removeprefix("nvlink3."): value for name, value in constants.items()}
        device = replace(profile.device, **{name: found[name] for name in DEVICE})
        return cls(device, replace(profile.intra_node, efficiency=found["efficiency"], latency_s=found["latency_s"]))

    def group(self, ranks: int) -> Group:
        """Ranks of one node."""
        return Group(ranks, 1, self.link)


def constants_of(logs: NDArray[np.float64]) -> dict[str, float]:
    """The constants that are so far from their priors, in logarithms; a share is at most 1."""
    values = {name: prior * float(np.exp(log)) for (name, (prior, _)), log in zip(PRIORS.items(), logs, strict=True)}
    return {name: min(value, 1.0) if name.endswith("efficiency") else value for name, value in values.items()}


def machine_of(constants: dict[str, float]) -> Machine:
    """The machine with such constants, those of the library among them set."""
    for name in UNIT_SECONDS:
        setattr(unit_module, name, constants[name])
    return Machine.of(constants)


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


def predicted_s(run: Run, machine: Machine) -> float:
    """Seconds of a step with full recompute."""
    key = (run.hidden, run.heads, run.sequence, run.tp, run.microbatch)
    if key not in machine.known:
        collective_s = seconds_of(machine.group(run.tp), run.tp) if run.tp > 1 else None
        # Gradients add up in fp16 in the runs of one node (DeepSpeed), in fp32 in the larger ones (Megatron-LM).
        added_bytes = 10 if run.model in LARGER else 6
        held = (51200 * run.hidden, 12 * run.hidden**2, 51200 * run.hidden)
        machine.known[key] = tuple(
            unit_cost(
                work,
                machine.device,
                "fp16",
                collective_s=collective_s,
                gradient_bytes=entries // run.tp * added_bytes,
                execution=EXECUTION,
            )
            for work, entries in zip(works(*key), held, strict=True)
        )
    embedding, layer, head = machine.known[key]
    microbatches = run.batch // (run.dp * run.microbatch)
    stages = [run.layers / run.pp * (layer.total_s + layer.forward_s)] * run.pp
    layers_s = stages[0]
    stages[0] += embedding.total_s
    stages[-1] += head.total_s
    pipeline = microbatches * max(stages)
    pipeline += sum(stages) - max(stages) if run.virtual_stages == 1 else (run.pp - 1) * layers_s / run.virtual_stages
    elements = (12 * run.hidden**2 * run.layers / run.pp + 51200 * run.hidden) / run.tp
    device = machine.device
    tail = (
        elements
        * (58 if run.model in LARGER else 36)
        / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    )
    if run.dp > 1:  # in one node; none of the larger runs has replicas
        tail += machine.group(run.dp).all_reduce_s(2 * elements)
    return pipeline + tail


def errors(runs: list[Run], machine: Machine) -> NDArray[np.float64]:
    """Predicted over measured, less 1, of each run."""
    return np.array([predicted_s(run, machine) / run.measured_s - 1 for run in runs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    runs = [run for run in single_node(options.data / "a100_single_node_gpt.csv") if not held_out(run)]
    larger = [row.full for row in selective(options.data / "a100_selective_recompute.csv")]
    deviations = np.array([deviation for _, deviation in PRIORS.values()])
    most = [np.log(1 / prior) if name.endswith("efficiency") else 3.0 for name, (prior, _) in PRIORS.items()]

    def parts(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Half the sum of their squares is the loss."""
        machine = machine_of(constants_of(logs))
        return np.concatenate(
            [
                _rooted(errors(runs, machine)) / np.sqrt(len(runs)),
                _rooted(errors(larger, machine)) * np.sqrt(LARGER_WEIGHT / len(larger)),
                np.sqrt(2 * PRIOR_WEIGHT) * logs / deviations,
            ]
        )

    logs = least_squares(parts, np.zeros(len(PRIORS)), bounds=(-3.0, most), diff_step=3e-3).x
    constants = constants_of(logs)
    machine = machine_of(constants)
    for (name, (prior, _)), value in zip(PRIORS.items(), constants.values(), strict=True):
        print(f"{name:20} {value:.4g}   (prior {prior:g})")
    near, far = errors(runs, machine), errors(larger, machine)
    print(f"one node: MAPE {np.mean(np.abs(near)):.2%}; larger: {np.round(far, 3).tolist()}")


def _rooted(error: NDArray[np.float64], blunt: float = 0.01) -> NDArray[np.float64]:
    """Half the square of it is the absolute error, but for a blunt tip."""
    return np.sign(error) * np.sqrt(2 * (np.sqrt(error**2 + blunt**2) - blunt))


if __name__ == "__main__":
    main()
