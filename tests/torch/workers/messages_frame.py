"""What the checks of message passing on three ranks share: a plain model, the same one split, and their comparison."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamic import batch
from torch import nn

import shardwright.torch as sw
from shardwright.backends.torch.training.messages.owners import Owners
from tests.comparison import Comparison

MICROBATCHES = 4
SAMPLES = 8
CONFIG = {
    "pipeline_parallel_degree": 3,
    "microbatches": MICROBATCHES,
    "pipeline": "interleaved",
    "wait_timeout_s": 60.0,
    "pipeline_mode": "messages",
}


@sw.step
def train_step(model, batch):
    loss = model(**batch)
    model.backward(loss, reduction="mean")
    return loss


def expect(kind: type[Exception], match: str, run: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        run()
    assert match in str(caught.value), str(caught.value)


def start(
    build: Callable[[], nn.Module], owners: dict[str, int] | None = None, **keys: Any
) -> tuple[nn.Module, sw.DistributedModel]:
    """A plain model and the same over three ranks, each module where ``owners`` says, or where planning puts it."""
    sw.init({**CONFIG, **keys})
    torch.manual_seed(4)
    plain = build()
    torch.manual_seed(4)
    model = sw.DistributedModel(build())
    if owners is not None:
        model.runtime.run_by_messages(Owners.of(model.module, owners), active=None, schedule="interleaved")
    return plain, model


def parts(step: int = 0, samples: int = SAMPLES) -> list[dict[str, torch.Tensor]]:
    whole = batch(step, samples)
    return [{key: tensor.chunk(MICROBATCHES)[m] for key, tensor in whole.items()} for m in range(MICROBATCHES)]


def same_gradients(plain: nn.Module, model: sw.DistributedModel) -> None:
    """Of this rank's parameters, and together of all."""
    same = Comparison(type(plain).__name__)
    same.gradients(gradients(model), {name: p.grad for name, p in plain.named_parameters()}, part=True)
    require_of_ranks(same)


def gradients(model: sw.DistributedModel) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.local_named_parameters()}


def require_of_ranks(same: Comparison) -> None:
    """On every rank, that what all ranks compared is equal, and that together they compared all."""
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, same.report())
    Comparison.of_ranks(reports).require()


def same_losses(found: sw.StepOutput, losses: list[torch.Tensor]) -> None:
    """Of each microbatch."""
    Comparison().values(found.outputs, losses, relative=1e-5, absolute=1e-6).require()


def compare(plain: nn.Module, model: sw.DistributedModel, steps: int = 2) -> None:
    """Train both: the same losses, gradients, and buffers."""
    ours = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        losses = []
        for part in parts(step):
            loss = plain(**part)
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        found = train_step(model, batch(step, SAMPLES))
        same_losses(found, losses)
        same_gradients(plain, model)
        ours.step()
        theirs.step()
    wanted = dict(plain.named_buffers())
    if wanted:
        held = dict(model.local_named_buffers())
        require_of_ranks(Comparison("buffers").values(held, wanted, relative=1e-5, absolute=1e-6, part=True))
