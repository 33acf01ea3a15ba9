"""What the processes of `step_time.py` run: a profile of this machine, or the steps of one plan."""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from step_reference import reference_of

import shardwright as sw
from shardwright.backends import registry
from shardwright.measure import measure_units

WARM = 3
"""Steps of a launch that are not timed: in the first ones memory comes from the system."""
USUAL = 4
"""Microbatches, as large as the sample, of a plan with as many steps as were asked for. Longer steps are fewer."""


@dataclass(frozen=True)
class Ran:
    """The median seconds of a step, the plain model's seconds at that time, and the most bytes that every rank held in
    another step, if that was asked for."""

    step_s: float
    reference_s: float
    """The seconds of a step by the median of how many times those of the plain model before and after it each took."""
    peak_bytes: tuple[int, ...] = ()


def given(framework: str, name: str, width: int) -> tuple[Any, Any, Any]:
    """A model, one microbatch and the loss."""
    if framework == "torch":
        import step_models

        return *step_models.made(name, width), None
    import jax_models

    model, sample, loss = getattr(jax_models, name)(width)
    return model, sample, loss


def profiled(framework: str, name: str, width: int, budget_s: float, degrees: Sequence[int], file: str) -> float:
    """What `shardwright profile --model` does, but for the tensor degrees that no plan here has. Gives the median
    seconds of the plain model before, between and after its measurements."""
    measured = registry.load(framework).profile(name="measured", budget_s=budget_s)
    model, sample, loss = given(framework, name, width)
    reference = reference_of(framework, given(framework, name, width))
    reference()
    seconds = [reference() for _ in range(4)]
    size = len(next(iter(sample.values())))
    units = measure_units(
        model, sample, loss, microbatches=sorted({max(1, size // 2), size}), tensor_degrees=degrees,
        cluster=sw.Cluster(measured.profile(), devices_per_node=measured.ranks),
    )  # fmt: skip
    if measured.rank == 0:
        replace(measured, units=units).save(file)
    return statistics.median([*seconds, *(reference() for _ in range(4))])


def timed(framework: str, name: str, width: int, profiled_width: int, file: str, steps: int, with_memory: bool) -> Ran:
    """Steps of a plan, and the plain model of the profile between them. Memory is followed after them, as that makes a
    step slower."""
    model, sample, loss = given(framework, name, width)
    reference = reference_of(framework, given(framework, name, profiled_width))
    plan = sw.Plan.load(file)
    batch = (torch_batch if framework == "torch" else jax_batch)(model, plan, sample)
    share = min(1.0, USUAL * len(next(iter(sample.values()))) * plan.decision.dp / plan.decision.batch)
    running: Any = registry.load(framework).compile(plan, model, loss=loss)
    del model, sample
    warm, count = (max(2, round(share * number)) for number in (WARM, steps))
    reference()
    for _ in range(warm):
        running.step(batch)
    seconds, plain = [], [reference()]
    for _ in range(count):
        began = time.perf_counter()
        running.step(batch)  # gives the loss of all ranks, so that none is ahead by more than its optimizer
        seconds.append(time.perf_counter() - began)
        plain.append(reference())
    times = statistics.median(2 * took / sum(both) for took, both in zip(seconds, pairwise(plain), strict=True))
    del reference
    peak = (torch_peak_bytes if framework == "torch" else jax_peak_bytes)(running, plan, batch) if with_memory else ()
    return Ran(statistics.median(seconds), statistics.median(seconds) / times, tuple(peak))


def torch_batch(model: Any, plan: sw.Plan, sample: Mapping[str, Any]) -> dict[str, Any]:
    """This process's batch."""
    import torch

    torch.set_num_threads(1)
    model.train()
    own = plan.decision.batch // plan.decision.dp
    return {key: torch.cat([value] * -(-own // len(value)))[:own] for key, value in sample.items()}


def jax_batch(_model: Any, plan: sw.Plan, sample: Mapping[str, Any]) -> dict[str, Any]:
    """That of all devices, which this process drives."""
    import numpy as np

    whole = plan.decision.batch
    return {key: np.concatenate([np.asarray(value)] * -(-whole // len(value)))[:whole] for key, value in sample.items()}


def torch_peak_bytes(running: Any, _plan: sw.Plan, batch: Mapping[str, Any]) -> list[int]:
    """As `memory_ranks.py`: all live storages by torch's own MemTracker, gradients made anew."""
    import torch.distributed as dist
    import tracked

    runtime, optimizer = running._runtime, running._optimizer
    optimizer.zero_grad()
    with tracked.tracking(tracked.held_by(runtime), optimizer, batch.values()) as tracker:
        running.step(batch)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tracker.peak_bytes())
    return every


def jax_peak_bytes(running: Any, plan: sw.Plan, batch: Mapping[str, Any]) -> Sequence[int]:
    """As `memory_jax.py`."""
    import memory_jax

    return memory_jax.measured_bytes(running.train, running.state, batch, plan)
