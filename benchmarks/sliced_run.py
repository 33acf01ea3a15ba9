"""What the processes of `sliced_steps.py` run: a profile of this machine, and the steps of all forms in turns."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sliced_models import Sizes, jax_model, torch_model

import shardwright
from shardwright.backends import registry
from shardwright.measure import measure_units
from tests.comparison import Comparison

RANKS = 2
PINS: dict[str, Any] = {
    "batch": 1, "pp": RANKS, "tp": 1, "dp": 1, "schedule": "1f1b", "recompute": "none", "precision": "fp32",
    "optimizer": "sgd",
}  # fmt: skip
Step = Callable[[], Any]


@dataclass(frozen=True)
class Ran:
    """What was measured: the seconds of every round and what was predicted, by form, and the planner's lengths."""

    times: Mapping[str, Sequence[float]]
    predicted: Mapping[str, float]
    chosen: Sequence[int]


@dataclass(frozen=True)
class _Form:
    """A form with its plan, a step of it, and the gradients of its first step."""

    plan: shardwright.Plan
    step: Step
    gradients: Mapping[str, Any]


def given(framework: str, sizes: Sizes) -> tuple[Any, Any, Any]:
    """A model, one batch of one sequence, and the loss."""
    if framework == "torch":
        import torch

        torch.set_num_threads(1)
        tokens = torch.randint(0, sizes.words, (1, sizes.tokens), generator=torch.Generator().manual_seed(1))
        return torch_model(sizes), {"tokens": tokens, "wanted": tokens}, None
    import numpy as np

    create, loss = jax_model(sizes)
    ids = np.random.default_rng(1).integers(0, sizes.words, (1, sizes.tokens)).astype(np.int32)
    return create(), {"tokens": ids, "wanted": ids}, loss


def profiled(framework: str, sizes: Sizes, budget_s: float, file: str) -> None:
    """What `shardwright profile --model` does, with this model on all ranks."""
    measured = registry.load(framework).profile(name="measured", budget_s=budget_s)
    cluster = shardwright.Cluster(measured.profile(), devices_per_node=measured.ranks)
    units = measure_units(*given(framework, sizes), microbatches=(1,), cluster=cluster)
    if measured.rank == 0:
        replace(measured, units=units).save(file)


def timed(framework: str, sizes: Sizes, profile: str | None, others: Sequence[Sequence[int]], rounds: int) -> Ran:
    """A round is one step of each form after the other: whole sequences, one slice, the planner's lengths, the others,
    and in PyTorch torch's own pipeline. Gradients of all are held against those of whole sequences first."""
    model, sample, loss = given(framework, sizes)
    graph = shardwright.capture(model, sample, loss)
    cluster = shardwright.Cluster(profile or "cpu", devices_per_node=RANKS)
    make = _torch_form if framework == "torch" else _jax_form

    def form(**slices: Any) -> _Form:
        return make(sizes, shardwright.plan(graph, cluster, **PINS, **slices), sample)

    forms = {"whole": form(), "one slice": form(slices=1), "the planner's": form(slices="auto")}
    forms |= {" + ".join(map(str, lengths)): form(slice_lengths=list(lengths)) for lengths in others}
    same = Comparison("slices")
    for name, found in forms.items():
        same.where = name
        same.gradients(dict(found.gradients), dict(forms["whole"].gradients), part=True)
    same.require("gradients")
    steps = {name: found.step for name, found in forms.items()}
    if framework == "torch":
        steps["torch's pipeline"] = _torchs(sizes, sample)
        steps["torch's pipeline"]()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(_seconds(framework, step))
    predicted = {
        name: found.plan.predicted.pipeline_s if framework == "torch" else found.plan.predicted.step_time_s
        for name, found in forms.items()
    }
    return Ran(times, predicted, forms["the planner's"].plan.decision.slice_lengths)


def _seconds(framework: str, step: Step) -> float:
    """Seconds of a step on all ranks."""
    if framework == "jax":
        began = time.perf_counter()
        step()
        return time.perf_counter() - began
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - began


def _torch_form(sizes: Sizes, plan: shardwright.Plan, sample: Mapping[str, Any]) -> _Form:
    import torch.distributed as dist

    import shardwright.torch as sw

    if not dist.is_initialized():
        dist.init_process_group("gloo")
        sw.init({"pipeline_parallel_degree": RANKS, "microbatches": 1})
    model = sw.DistributedModel(torch_model(sizes), plan=plan)

    @sw.step
    def train_step(model: Any, tokens: Any, wanted: Any) -> Any:
        loss = model(tokens, wanted)
        model.backward(loss, reduction="mean")
        return loss

    def step() -> None:
        train_step(model, sample["tokens"], sample["wanted"])

    step()
    held = dict(model.local_named_parameters())
    return _Form(plan, step, {name: None if p.grad is None else p.grad.clone() for name, p in held.items()})


def _torchs(sizes: Sizes, sample: Mapping[str, Any]) -> Step:
    """A step of torch's own pipeline of one microbatch, of the same layers on each rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    whole, rank = torch_model(sizes), dist.get_rank()
    half = sizes.layers // 2
    first = nn.Sequential(whole.embedding, *whole.layers[:half])
    last = nn.Sequential(*whole.layers[half:], whole.norm, whole.head)
    stage = PipelineStage((first, last)[rank], rank, RANKS, torch.device("cpu"))

    def loss_of(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())

    schedule = ScheduleGPipe(stage, 1, loss_of)

    def step() -> None:
        if rank == 0:
            schedule.step(sample["tokens"])
        else:
            schedule.step(target=sample["wanted"])

    return step


def _jax_form(sizes: Sizes, plan: shardwright.Plan, sample: Mapping[str, Any]) -> _Form:
    import jax
    import optax

    import shardwright.jax as sw
    from tests.jax.chains import named, recording

    create, loss = jax_model(sizes)
    train = sw.train_step(loss, recording(optax.sgd(1e-6)), plan, devices=jax.devices()[:RANKS])
    held = [train.init(create)]

    def step() -> None:
        state, value = train(held.pop(), sample)
        held.append(state)
        jax.block_until_ready((state, value))

    step()
    gradients = {name: value.copy() for name, value in named(held[0].optimizer[1]).items()}
    step()
    return _Form(plan, step, gradients)
