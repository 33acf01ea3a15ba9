"""Mechanisms that the time model does not have, each fitted beside its constants: what they would bring.

    python benchmarks/tried_mechanisms.py [--data FOLDER] [--write benchmarks/results/tried_mechanisms.md]

The choice between plans of equal batch and devices is judged by regret on the runs of one node (`accuracy.py`). Each
mechanism here is fitted with all constants of `fit_cost_model.py` on the six models that it fits on, and judged on
these and on the two held out. Then the layer times that no mechanism gives are set against the rest: the regret with
all other times as measured is the least that a model without them can have. Nothing here is part of a prediction.
"""

import argparse
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import fit_cost_model as fit
import numpy as np
from numpy.typing import NDArray
from published import DATA, Run, held_out, regrets, same_work, selective, single_node, unit_times
from scipy.optimize import least_squares

from shardwright.core.cluster.hardware import load_profile
from shardwright.core.cost import unit_seconds
from shardwright.core.cost.unit_seconds import UnitCost

Shape = tuple[int, int, int]
"""Width, tensor degree, samples of a microbatch."""
Costs = tuple[UnitCost, ...]
"""Of embedding, layer and head."""
LARGEST_OF = {1: 0.0, 2: 0.564, 4: 1.029, 8: 1.424}
"""The mean of the largest of so many normal numbers, in standard deviations."""
SWITCH_BYTES = 8 << 20
"""The size of the all-reduces of the two layers that are measured faster than those of half as many samples."""


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A mechanism with one constant: its start and range, and the costs with it."""

    name: str
    start: float
    range: tuple[float, float]
    costs: Callable[[Costs, Shape, float], Costs]


def _computed(cost: UnitCost, factor: float) -> UnitCost:
    """The unit with its passes, but for collectives, so many times as long."""
    ahead, back = cost.forward_collective_s, cost.collective_s - cost.forward_collective_s
    return replace(
        cost,
        forward_s=ahead + (cost.forward_s - ahead) * factor,
        input_grad_s=back + (cost.input_grad_s - back) * factor,
        weight_grad_s=cost.weight_grad_s * factor,
    )


def _longer(cost: UnitCost, ahead_s: float, back_s: float) -> UnitCost:
    return replace(cost, forward_s=cost.forward_s + ahead_s, input_grad_s=cost.input_grad_s + back_s)


def _uneven(costs: Costs, shape: Shape, share: float) -> Costs:
    return tuple(_computed(cost, 1 + share * LARGEST_OF[shape[1]]) for cost in costs)


def _waiting(costs: Costs, shape: Shape, seconds: float) -> Costs:
    each = seconds * float(np.log2(shape[1]))
    return tuple(_longer(cost, many * each, many * each) for cost, many in zip(costs, (1, 2, 1), strict=True))


def _switching(costs: Costs, shape: Shape, share: float) -> Costs:
    hidden, _, samples = shape
    if samples * 1024 * hidden * 2 < SWITCH_BYTES:
        return costs
    less = [
        (cost.forward_collective_s * (share - 1), (cost.collective_s - cost.forward_collective_s) * (share - 1))
        for cost in costs
    ]
    return tuple(_longer(cost, *each) for cost, each in zip(costs, less, strict=True))


def _slow_head(costs: Costs, shape: Shape, factor: float) -> Costs:
    embedding, layer, head = costs
    return embedding, layer, _computed(head, factor) if shape[1] == 1 else head


TRIED = (
    Mechanism(
        "ranks of a tensor group differ by a share of their computing, and wait for the slowest",
        0.05,
        (0.0, 0.5),
        _uneven,
    ),
    Mechanism(
        "ranks wait for each other so many seconds before an all-reduce, times log2 of their number",
        2e-5,
        (0.0, 5e-4),
        _waiting,
    ),
    Mechanism(
        "all-reduces from 8 MiB on take a share of their time (a switch of protocol)", 0.8, (0.0, 2.0), _switching
    ),
    Mechanism("the head takes so many times as long where nothing is split", 1.5, (0.5, 3.0), _slow_head),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    runs = single_node(options.data / "a100_single_node_gpt.csv")
    larger = [row.full for row in selective(options.data / "a100_selective_recompute.csv")]
    lines = [
        "# Mechanisms that were tried",
        "",
        "    python benchmarks/tried_mechanisms.py",
        "",
        "Each is fitted with all constants of `fit_cost_model.py` on six models of one node; none is in the model.",
        "",
        "| mechanism | its constant | MAPE, fitted on | held out | regret at equal batch and devices, fitted on "
        "| held out |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    ours = {name: getattr(unit_seconds, name) for name in fit.UNIT_SECONDS}
    for tried in (None, *TRIED):
        lines.append(_fitted(tried, runs, larger))
        for name, value in ours.items():
            setattr(unit_seconds, name, value)
        print(lines[-1], flush=True)
    more = [*_limits(runs), "", f"Whole benchmark: {time.perf_counter() - started:.0f} s."]
    print("\n".join(more))
    if options.write:
        options.write.write_text("\n".join([*lines, *more]) + "\n")
    return 0


def _fitted(tried: Mechanism | None, runs: Sequence[Run], larger: Sequence[Run]) -> str:
    """The row of a mechanism; None: of the model without one."""
    seen = [run for run in runs if not held_out(run)]
    deviations = np.array([deviation for _, deviation in fit.PRIORS.values()])
    most = [np.log(1 / prior) if name.endswith("efficiency") else 3.0 for name, (prior, _) in fit.PRIORS.items()]
    own = [] if tried is None else [tried]
    lowest = [*[-3.0] * len(deviations), *(each.range[0] for each in own)]
    highest = [*most, *(each.range[1] for each in own)]
    start = [*[0.0] * len(deviations), *(each.start for each in own)]

    def machine(values: NDArray[np.float64]) -> fit.Machine:
        made = fit.machine_of(fit.constants_of(values[: len(deviations)]))
        for run in (*runs, *larger):
            key = (run.hidden, run.heads, run.sequence, run.tp, run.microbatch)
            if key not in made.known:
                fit.predicted_s(run, made)
                if tried is not None and run.model not in fit.LARGER:
                    shape = run.hidden, run.tp, run.microbatch
                    made.known[key] = tried.costs(made.known[key], shape, float(values[-1]))
        return made

    def parts(values: NDArray[np.float64]) -> NDArray[np.float64]:
        made = machine(values)
        return np.concatenate(
            [
                fit._rooted(fit.errors(seen, made)) / np.sqrt(len(seen)),
                fit._rooted(fit.errors(list(larger), made)) * np.sqrt(fit.LARGER_WEIGHT / len(larger)),
                np.sqrt(2 * fit.PRIOR_WEIGHT) * values[: len(deviations)] / deviations,
            ]
        )

    scale = [*[1.0] * len(deviations), *(each.start for each in own)]
    values = least_squares(parts, start, bounds=(lowest, highest), diff_step=3e-3, x_scale=scale, max_nfev=40).x
    made = machine(values)
    unseen = [run for run in runs if held_out(run)]
    found = [_judged(some, [fit.predicted_s(run, made) for run in some]) for some in (seen, unseen)]
    name, constant = ("none", "") if tried is None else (tried.name, f"{values[-1]:.3g}")
    errors, regret = (" | ".join(f"{each[which]:.1%}" for each in found) for which in (0, 1))
    return f"| {name} | {constant} | {errors} | {regret} |"


def _judged(runs: Sequence[Run], predicted: Sequence[float]) -> tuple[float, float]:
    """Mean absolute error, and mean regret."""
    measured = np.array([run.measured_s for run in runs])
    regret = np.mean(list(regrets(runs, predicted, range(len(runs)), same_work)))
    return float(np.abs(np.array(predicted) / measured - 1).mean()), float(regret)


def _limits(runs: Sequence[Run]) -> list[str]:
    """What the regret is with some times of layers and heads as measured, and the layers that no mechanism gives."""
    times = unit_times(runs)
    profile = load_profile("a100-80gb")
    plain = fit.Machine(profile.device, profile.intra_node)
    for run in runs:
        fit.predicted_s(run, plain)
    layers: dict[Shape, UnitCost] = {(key[0], *key[3:]): costs[1] for key, costs in plain.known.items()}
    odd = {
        shape
        for shape in times
        if (half := (shape[0], shape[1], shape[2] // 2)) in times
        and times[shape][0] < times[half][0]
        and half[1:] != (8, 1)  # one sample's softmax at tp 8 is not fused
        and times[shape][0] < 0.85 * (layers[shape].total_s + layers[shape].forward_s)
    }
    every, none = set(times), set[Shape]()
    kinds = (
        ("none", (none, none)),
        ("all", (every, every)),
        (f"all but {len(odd)} layers", (every - odd, every)),
        (f"these {len(odd)} layers alone", (odd, none)),
    )
    judged = {name: _with_read_off(runs, times, plain.known, *read_off) for name, read_off in kinds}
    least = judged[kinds[2][0]][1]
    lines = [
        "",
        "## The least regret",
        "",
        "| layers and heads as measured | MAPE | regret |",
        "|---|---|---|",
        *(f"| {name} | {error:.1%} | {regret:.1%} |" for name, (error, regret) in judged.items()),
        "",
        f"These {len(odd)} layers were measured faster than those of half as many samples, and are predicted 15% too "
        "slow or more:",
        "",
        "| width | tp | samples | measured ms | predicted ms | its all-reduces ms | without waiting for the host ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for shape in sorted(odd):
        layer = layers[shape]
        reduces = layer.collective_s + layer.forward_collective_s
        rest = layer.total_s + layer.forward_s - layer.host_wait_s
        found = times[shape][0], layer.total_s + layer.forward_s, reduces, rest
        cells = (*map(str, shape), *(f"{1e3 * each:.2f}" for each in found))
        lines.append(f"| {' | '.join(cells)} |")
    plainest, fastest = (1e3 * each for each in (times[1024, 1, 1][0], min(times[shape][0] for shape in odd)))
    return [
        *lines,
        "",
        "All-reduces of no time at all would leave them too slow, so that no protocol or topology says why. Nor do "
        "tiles: what products, memory traffic and all-reduces are predicted to take is what was measured, so that the "
        f"host would take no time at all. One sample of width 1024 on one device takes {plainest:.2f} ms, whose host "
        f"issues fewer kernels and no all-reduce; {fastest:.2f} ms are less. What differs is how long the host took "
        "when a shape was measured. As the steps of the file are composed of such times, one of them decides many "
        f"choices: with these as predicted and every other time as measured, the regret is {least:.1%}, and 2% are "
        "asked for.",
    ]


def _with_read_off(
    runs: Sequence[Run],
    times: Mapping[Shape, tuple[float, float]],
    known: Mapping[tuple[int, int, int, int, int], Costs],
    layers: Collection[Shape],
    heads: Collection[Shape],
) -> tuple[float, float]:
    """Error and regret with the times of some layers, and of some embeddings with their heads, as measured."""
    profile = load_profile("a100-80gb")
    machine = fit.Machine(profile.device, profile.intra_node)
    for key, (embedding, layer, head) in known.items():
        shape = (key[0], *key[3:])
        if shape in layers:
            layer = _scaled(layer, times[shape][0] / (layer.total_s + layer.forward_s))
        if shape in heads:
            share = times[shape][1] / (embedding.total_s + head.total_s)
            embedding, head = _scaled(embedding, share), _scaled(head, share)
        machine.known[key] = embedding, layer, head
    return _judged(runs, [fit.predicted_s(run, machine) for run in runs])


def _scaled(cost: UnitCost, share: float) -> UnitCost:
    parts = {name: share * getattr(cost, name) for name in ("forward_s", "input_grad_s", "weight_grad_s")}
    return replace(cost, **parts)


if __name__ == "__main__":
    sys.exit(main())
