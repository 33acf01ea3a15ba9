"""How far predictions of a kind are off: one table, in which every number says where it comes from.

What decides is how the constants of the devices came about: measured by a profile, fitted on published runs, taken over
from a device that was fitted, or assumed. A cluster of several kinds of device has the class of the least known. Memory
follows from the framework, as its runtime decides what is held.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shardwright.core.cluster.hardware.device import Device, MeasuredUnit
from shardwright.core.plan.decision import Decision
from shardwright.core.values.fields import Share

Basis = Literal[
    "profiled with the model", "profiled with the model, composed", "profiled", "fitted", "transferred", "prior"
]
"""The classes of predictions: from the model's own profile, for a plan of a form that was run there or for another one;
from a profile of the device alone; from constants fitted on published runs, taken from a device that was fitted, or
assumed."""

STEP_TIME: dict[Basis, tuple[float, str]] = {
    "profiled with the model": (
        0.04,
        "benchmarks/results/step_time.md: mean error of 48 rounds of PyTorch plans 4.0%, of 45 of JAX plans 3.5%",
    ),
    "profiled with the model, composed": (
        0.10,
        "benchmarks/results/step_time.md, plans of other forms: mean error 7.1%, 20 of 26 plans within 10%",
    ),
    "profiled": (
        0.26,
        "prior: as transferred; products and links are measured, what units take is not, and no result is recorded",
    ),
    "fitted": (0.07, "benchmarks/results/accuracy.md: MAPE 6.0% over 1440 runs of one node of A100, held out 5.5%"),
    "transferred": (0.26, "published H100 runs with Megatron's settings: 26% too slow"),
    "prior": (0.40, "prior: more than of transferred devices; no published run on such a device was compared"),
}
"""The typical relative error of the step time, and its origin."""

MEMORY: dict[str, tuple[float, str]] = {
    "torch": (0.035, "benchmarks/results/memory.md: the rank predicted furthest too low, GPT-2 on pp 2 × tp 2, 0.965"),
    "jax": (0.105, "benchmarks/results/memory.md: the plan predicted furthest too low, NCF on dp 2, 0.897"),
}
"""By framework, the share of what ranks were measured to hold by which the worst prediction was too low, and its
origin. Left free on every device, it is what keeps such a plan from running out of memory."""

LEAD = 0.03
"""The lead in step time below which predictions do not tell which of two plans of one model on one cluster is faster.
Errors that both share cancel, those of the mechanisms in which they differ stay. Of the published runs of equal model,
batch and devices (those of benchmarks/accuracy.py, 9,792 pairs on A100), the one predicted faster was so in 52% of the
pairs that were predicted within 3% of each other, as a coin would have it; in 63% of those from 3 to 5%, in 82% from 5
to 8%, in 93% of all."""

HOST_LEAD = 0.25
"""The lead, beside `LEAD`, below which nothing is told of steps in which devices do nothing but wait for their hosts.
Of the rows of benchmarks/results/gpu_steps.md whose kernels alone take far less than the step, predictions are off by 6
to 46%, by a quarter in the mean, where rows of the same model that computing fills are within 4%: how fast a host
issues kernels is that host's own."""

_KNOWN_LEAST: tuple[Basis, ...] = ("prior", "profiled", "transferred", "fitted")
"""The classes of a device without a profile of the model, the least known first."""


@dataclass(frozen=True, slots=True)
class PredictionError:
    """The typical relative errors of a prediction. The default is of one of which nothing is known."""

    step_time: Share = 1.0
    memory: Share = 1.0
    """By how much the most wrong prediction of memory was too low."""
    basis: Basis = "prior"


def lead(host_share: float) -> float:
    """The lead in step time below which predictions do not tell which of two plans of one model on one cluster is
    faster, where devices wait for their hosts in so much of a step. By whole tenths of it, as twins of two frameworks
    count a few kernels more or fewer, and are to get one answer."""
    return LEAD + HOST_LEAD * math.floor(10 * host_share) / 10


def prediction_error(
    devices: Iterable[Device], framework: str, model: str, decision: Decision, host_share: float = 0.0
) -> PredictionError:
    """The errors of a plan's prediction.

    Args:
        framework: the one that the model was captured from.
        model: the name of the model's structure in profiles (`model.structure.measured_name`).
        host_share: the share of a step in which devices wait for their hosts.
    """
    held = tuple(devices)
    runs = [[unit for unit in device.measured_units if unit.model == model] for device in held]
    basis: Basis
    if all(runs):
        basis = "profiled with the model" if all(_was_run(decision, own) for own in runs) else _COMPOSED
    else:
        basis = min((_of_device(device) for device in held), key=_KNOWN_LEAST.index)
    of_host = 0.0 if all(runs) else HOST_LEAD * host_share
    return PredictionError(max(STEP_TIME[basis][0], of_host), memory_error(framework), basis)


_COMPOSED: Basis = "profiled with the model, composed"


def memory_error(framework: str) -> float:
    """The error of predicted memory; that of the least known framework for one that is not in the table."""
    known = MEMORY.get(framework)
    return max(error for error, _ in MEMORY.values()) if known is None else known[0]


def lead_error(first: PredictionError, second: PredictionError, *, alike: bool) -> float:
    """The lead in step time below which predictions do not tell which of two plans is faster. ``alike``: plans of one
    model on one cluster, whose common errors cancel (`LEAD`); the errors of others are taken as independent."""
    return LEAD if alike else math.hypot(first.step_time, second.step_time)


def _of_device(device: Device) -> Basis:
    """The class of a device without a profile of the model, by the origins of the constants that rule its time."""
    if device.measured_products:
        return "profiled"
    kinds = {name: device.origins.get(name, "").split(":")[0] for name in ("matmul_efficiency", "vector_efficiency")}
    if kinds["matmul_efficiency"] == "fitted":
        return "fitted"
    return "transferred" if "derived" in kinds.values() else "prior"


def _was_run(decision: Decision, runs: Iterable[MeasuredUnit]) -> bool:
    """Whether a plan has a form that the profile ran: replicas, tensor ranks or the shortest pipeline, plain."""
    d = decision
    sizes = {(run.microbatch, run.tensor_degree, run.in_stages) for run in runs}
    plain = (d.recompute, d.schedule, d.virtual_stages, d.shard) == ("none", "1f1b", 1, 0)
    return plain and d.pp <= 2 and (d.microbatch, d.tp, d.pp > 1) in sizes
