"""What the processes of `step_time.py` run: a profile of this machine, or the steps of one plan."""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import shardwright as sw
from shardwright.backends import registry
from shardwright.measure import measure_units

WARM = 6
"""Steps of a launch that are not timed: in the first ones memory comes from the system."""
USUAL = 4
"""Microbatches, as large as the sample, of a plan with as many steps as were asked for. Longer steps are fewer."""


@dataclass(frozen=True)
class Ran:
    """The median seconds of a step, and the most bytes that every rank held in another, if that was asked for."""

    step_s: float
    peak_bytes: tuple[int, ...] = ()


def given(framework: str, name: str, width: int) -> tuple[Any, Any, Any]:
    """A model, one microbatch and the loss."""
    if framework == "torch":
        import step_models

        return *step_models.made(name, width), None
    import jax_models

    model, sample, loss = getattr(jax_models, name)(width)
    return model, sample, loss


def profiled(framework: str, name: str, width: int, budget_s: float, degrees: Sequence[int], file: str) -> None:
    """What `shardwright profile --model` does, but for the tensor degrees that no plan here has."""
    measured = registry.load(framework).profile(name="measured", budget_s=budget_s)
    model, sample, loss = given(framework, name, width)
    units = measure_units(
        model, sample, loss, microbatches=(len(next(iter(sample.values()))),), tensor_degrees=degrees,
        cluster=sw.Cluster(measured.profile(), devices_per_node=measured.ranks),
    )  # fmt: skip
    if measured.rank == 0:
        replace(measured, units=units).save(file)


def timed(framework: str, name: str, width: int, file: str, steps: int, with_memory: bool) -> Ran:
    """Steps of a plan. Its memory is followed after them, as that makes a step slower."""
    model, sample, loss = given(framework, name, width)
    plan = sw.Plan.load(file)
    batch = (torch_batch if framework == "torch" else jax_batch)(model, plan, sample)
    share = min(1.0, USUAL * len(next(iter(sample.values()))) * plan.decision.dp / plan.decision.batch)
    running: Any = registry.load(framework).compile(plan, model, loss=loss)
    del model, sample
    warm, count = (max(2, round(share * number)) for number in (WARM, steps))
    seconds = []
    for step in range(warm + count):
        began = time.perf_counter()
        running.step(batch)  # gives the loss of all ranks, so that none is ahead by more than its optimizer
        if step >= warm:
            seconds.append(time.perf_counter() - began)
    peak = (torch_peak_bytes if framework == "torch" else jax_peak_bytes)(running, plan, batch) if with_memory else ()
    return Ran(statistics.median(seconds), tuple(peak))


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
