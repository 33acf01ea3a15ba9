"""One training step of a model class, split, against the plain model in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardwright.torch as sw
from shardwright.backends.torch.unsplit import seeded_by_rule
from tests.models import inputs

MICROBATCHES = 2
SAMPLES = 2
"""In a microbatch."""
WAIT_S = 300.0
"""For another rank, on a machine that does other work too."""
GRADIENT, OF_ALL, LOSS = 1e-4, 1e-6, 1e-5
"""A gradient may be off by ``GRADIENT`` of its norm and ``OF_ALL`` of the norm of all; a loss by ``LOSS`` of itself."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the plain model gives: the loss of every microbatch, and the gradients and buffers after them."""

    losses: list[float]
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank of a split run found."""

    mode: str
    loss: float
    """The worst relative difference."""
    gradient: float
    """The worst, in units of what is allowed."""
    bad: list[str]
    """Names of gradients and buffers that are off."""
    elements: int
    """Of the parameters that this rank holds."""


def microbatches_of(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    def part(value: Any, m: int) -> Any:
        return value.chunk(MICROBATCHES)[m] if isinstance(value, torch.Tensor) and value.dim() else value

    return [{name: part(value, m) for name, value in given.items()} for m in range(MICROBATCHES)]


def made(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model and a batch for all microbatches; ``dtype`` is that of parameters and of floating inputs."""
    model = inputs.build(name)
    given = inputs.batch(model, SAMPLES * MICROBATCHES, 0)
    if dtype != torch.float32:
        model = model.to(dtype)
        floating = {k for k, v in given.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        given = {k: v.to(dtype) if k in floating else v for k, v in given.items()}
    return model, given


def plain_step(name: str, dtype: torch.dtype = torch.float32) -> Expected:
    """The reference run. Raises whatever the model raises; ValueError where a loss is not finite."""
    model, given = made(name, dtype)
    losses = []
    for m, part in enumerate(microbatches_of(given)):
        copied = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in part.items()}
        with seeded_by_rule(model, seed=0, step=0, microbatch=m):
            loss = inputs.loss_of(model, copied)
        (loss / MICROBATCHES).backward()
        losses.append(float(loss.detach()))
    if not all(torch.isfinite(torch.tensor(losses))):
        raise ValueError(f"the plain model's losses are {losses}")
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Expected(losses, gradients, {n: b for n, b in model.named_buffers() if b.is_floating_point()})


@sw.step
def train_step(model: Any, batch: Any) -> Any:
    loss = inputs.loss_of(model, batch)
    model.backward(loss)
    return loss


def split_step(
    name: str, ranks: int, expected: Expected, plan: Path | None = None, dtype: torch.dtype = torch.float32
) -> Found:
    """The same step on this rank of a split model, planned at the first step or by a plan file."""
    if plan is not None:
        sw.init(plan=plan, seed=0, wait_timeout_s=WAIT_S)
    else:
        sw.init({"pipeline_parallel_degree": ranks, "microbatches": MICROBATCHES, "wait_timeout_s": WAIT_S})
    plain, given = made(name, dtype)
    model = sw.DistributedModel(plain)

    losses = [float(loss) for loss in train_step(model, given).outputs]
    held = {key: parameter.grad for key, parameter in model.local_named_parameters()}
    worst, bad = compare_gradients(held, expected.gradients)
    bad += buffers_off(model, expected)
    mode = "recorded" if model.runtime.messages is None else "messages"
    elements = sum(parameter.numel() for parameter in model.local_parameters())
    sw.shutdown()
    return Found(mode, losses_off(losses, expected), worst, bad, elements)


def losses_off(losses: Sequence[float], expected: Expected) -> float:
    """The worst relative difference."""
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, expected.losses, strict=True))


def buffers_off(model: sw.DistributedModel, expected: Expected) -> list[str]:
    """The names of the buffers on this rank that are not those of the plain model."""
    return [
        key
        for key, buffer in model.local_named_buffers()
        if key in expected.buffers
        and not torch.allclose(buffer, expected.buffers[key], rtol=1e-4, atol=1e-6, equal_nan=True)
    ]


def compare_gradients(
    held: Mapping[str, torch.Tensor | None], wanted: Mapping[str, torch.Tensor]
) -> tuple[float, list[str]]:
    """The worst difference, in units of what is allowed, and the names of those that are off by more."""
    everything = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    worst, bad = 0.0, []
    for key, got in held.items():
        reference = wanted.get(key)
        if got is None or reference is None:
            if any(one is not None and bool(one.any()) for one in (got, reference)):
                bad.append(key)
            continue
        off = float((got - reference).norm() / (GRADIENT * reference.norm() + OF_ALL * everything))
        worst = max(worst, off)
        if not off <= 1.0:
            bad.append(key)
    return worst, bad
