"""One training step of a model class, split, against the plain model in one process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardwright.torch as sw
from shardwright.core.errors import ShardwrightError
from tests.comparison import Comparison
from tests.models import inputs
from tests.models.unsplit import seeded_by_rule

MICROBATCHES = 2
SAMPLES = 2
"""In a microbatch."""
WAIT_S = 300.0
"""For another rank, on a machine that does other work too."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the plain model gives: the loss of every microbatch, and the gradients and buffers after them."""

    losses: list[float]
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank of a split run found."""

    mode: str
    same: dict[str, Any]
    """The report of its `Comparison`."""
    elements: int
    """Of the parameters that this rank holds."""
    asked: str = ""
    """What had to be answered about the loss."""


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
    gradients = {n: p.grad for n, p in model.named_parameters()}
    return Expected(losses, gradients, {n: b for n, b in model.named_buffers() if b.is_floating_point()})


@sw.step
def train_step(model: Any, batch: Any) -> Any:
    loss = inputs.loss_of(model, batch)
    model.backward(loss)
    return loss


@sw.step
def answered_step(model: Any, batch: Any) -> Any:
    """Of a model whose loss couples samples, or cannot be told."""
    loss = inputs.loss_of(model, batch)
    model.backward(loss, reduction="mean")
    return loss


def first_step(start: Callable[[], tuple[sw.DistributedModel, dict[str, Any]]]) -> tuple[sw.DistributedModel, Any, str]:
    """A step of a model that ``start`` makes; with an answer, of a new one, where the library asks what the loss is to
    the batch. What it asked comes back too."""
    model, given = start()
    try:
        return model, train_step(model, given), ""
    except ShardwrightError as error:
        if "Say what is meant" not in str(error):
            raise
        asked = str(error)
    sw.shutdown()
    model, given = start()
    return model, answered_step(model, given), asked


def split_step(
    name: str, ranks: int, expected: Expected, plan: Path | None = None, dtype: torch.dtype = torch.float32
) -> Found:
    """The same step on this rank of a split model, planned at the first step or by a plan file."""

    def start() -> tuple[sw.DistributedModel, dict[str, Any]]:
        if plan is not None:
            sw.init(plan=plan, seed=0, wait_timeout_s=WAIT_S)
        else:
            sw.init({"pipeline_parallel_degree": ranks, "microbatches": MICROBATCHES, "wait_timeout_s": WAIT_S})
        plain, given = made(name, dtype)
        return sw.DistributedModel(plain), given

    model, out, asked = first_step(start)
    losses = [float(loss) for loss in out.outputs]
    held = {key: parameter.grad for key, parameter in model.local_named_parameters()}
    same = compare(name, losses, held, model, expected)
    mode = "recorded" if model.runtime.messages is None else "messages"
    elements = sum(parameter.numel() for parameter in model.local_parameters())
    sw.shutdown()
    return Found(mode, same.report(), elements, asked)


def compare(
    name: str,
    losses: Sequence[float],
    held: Mapping[str, torch.Tensor | None],
    model: sw.DistributedModel,
    expected: Expected,
) -> Comparison:
    """What this rank found, with the gradients that it holds, against what the plain model gives."""
    same = Comparison(name).losses(losses, expected.losses)
    same.gradients(held, expected.gradients, part=True, none_is_zero=True)
    buffers = {key: buffer for key, buffer in model.local_named_buffers() if key in expected.buffers}
    if expected.buffers:
        same.values(buffers, expected.buffers, relative=1e-4, absolute=1e-6, part=True, nan_is_nan=True, what="buffers")
    return same
