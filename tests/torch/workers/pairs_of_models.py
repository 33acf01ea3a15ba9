"""Pairs of models for `two_models.py`: a teacher and a student, a generator and a discriminator; their losses, batches
and loops, plain and split."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright.torch as sw
from tests.comparison import Comparison

STEPS, MICROBATCHES, SAMPLES, NOISE, DATA, CLASSES = 4, 2, 8, 6, 8, 5
MOST = 0.1
"""The norm to which the student's gradients are clipped."""


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return found


class Tower(nn.Module):
    """A row of blocks between two linear layers; a class for every role, since errors name it."""

    def __init__(self, before: int, width: int, after: int, *, blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(before, width), nn.Linear(width, after)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.blocks(self.first(x)))
        return found


class Teacher(Tower):
    pass


class Student(Tower):
    pass


class Generator(Tower):
    pass


class Discriminator(Tower):
    pass


def teacher(dropout: float = 0.0) -> Teacher:
    torch.manual_seed(1)
    return Teacher(DATA, 24, CLASSES, blocks=3, dropout=dropout)


def student(dropout: float = 0.0) -> Student:
    torch.manual_seed(2)
    return Student(DATA, 16, CLASSES, dropout=dropout)


def generator() -> Generator:
    torch.manual_seed(3)
    return Generator(NOISE, 16, DATA)


def discriminator() -> Discriminator:
    torch.manual_seed(4)
    return Discriminator(DATA, 16, 1)


def batch(step: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(SAMPLES, DATA, generator=made),
        "labels": torch.randint(0, CLASSES, (SAMPLES,), generator=made),
        "noise": torch.randn(SAMPLES, NOISE, generator=made),
    }


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# The losses, as the plain loops and the steps compute them ----------------------------------------------------------


def of_labels(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), labels)


def of_distillation(model: Any, x: torch.Tensor, labels: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    found = model(x)
    soft = F.kl_div(found.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
    return soft + 0.5 * F.cross_entropy(found, labels)


def of_reconstruction(model: Any, noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(noise), x)


def of_critic(model: Any, x: torch.Tensor, fakes: torch.Tensor) -> torch.Tensor:
    return F.softplus(-model(x)).mean() + F.softplus(model(fakes)).mean()


def trained(loss: Callable[..., torch.Tensor]) -> Any:
    def body(model: Any, *given: torch.Tensor) -> torch.Tensor:
        found = loss(model, *given)
        model.backward(found)
        return found

    body.__name__ = body.__qualname__ = loss.__name__
    return sw.step(body)


STEP_OF = {loss: trained(loss) for loss in (of_labels, of_distillation, of_reconstruction, of_critic)}


@sw.step
def outputs(model, x):
    return model(x)


class Plain:
    """Plain training in one process, over the microbatches of all replicas."""

    def update(self, optimizer: Any, loss: Callable[..., torch.Tensor], model: Any, *given: torch.Tensor) -> float:
        optimizer.zero_grad()
        found = self.backward(loss, model, *given)
        if loss is of_distillation:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
        optimizer.step()
        return found

    def backward(self, loss: Callable[..., torch.Tensor], model: Any, *given: torch.Tensor) -> float:
        replicas = sw.rdp_size()
        parts = list(zip(*(tensor.chunk(MICROBATCHES * replicas) for tensor in given), strict=True))
        losses = [loss(model, *part) / len(parts) for part in parts]
        for one in losses:
            one.backward()
        return float(sum(one.detach() for one in losses))

    def outputs(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(x)
        return found


class Split:
    """The same by steps of models that are split."""

    def update(self, optimizer: Any, loss: Callable[..., torch.Tensor], model: Any, *given: torch.Tensor) -> float:
        optimizer.zero_grad()
        found = self.backward(loss, model, *given)
        if loss is of_distillation:
            norm = model.clip_grad_norm_(MOST)
            assert float(norm) > 2 * MOST, "nothing was clipped"
        optimizer.step()
        return found

    def backward(self, loss: Callable[..., torch.Tensor], model: Any, *given: torch.Tensor) -> float:
        return float(STEP_OF[loss](model, *map(own, given)).all_reduce_mean())

    def outputs(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        """Those of this replica's samples, for the step that takes them: `own` gives them as they are."""
        with torch.no_grad():
            found: torch.Tensor = outputs(model, own(x)).concat()
        return found


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This replica's samples."""
    return tensor if tensor.shape[0] < SAMPLES else tensor.chunk(sw.rdp_size())[sw.rdp_rank()]


Ways = Plain | Split
Loop = Callable[[Ways, Any, Any, Any, Any], Iterator[float]]


def distillation(ways: Ways, first: Any, second: Any, of_first: Any, of_second: Any) -> Iterator[float]:
    """A teacher that learns for two steps, and a student that learns from it from the second on."""
    for step in range(STEPS):
        given = batch(step)
        if step < 2:
            yield ways.update(of_first, of_labels, first, given["x"], given["labels"])
        if step:
            wanted = ways.outputs(first, given["x"])
            yield ways.update(of_second, of_distillation, second, given["x"], given["labels"], wanted)


def adversaries(ways: Ways, first: Any, second: Any, of_first: Any, of_second: Any) -> Iterator[float]:
    """A discriminator that learns from the fakes of a generator, which learns by itself."""
    for step in range(STEPS):
        given = batch(step)
        fakes = ways.outputs(first, given["noise"])
        yield ways.update(of_second, of_critic, second, given["x"], fakes)
        yield ways.update(of_first, of_reconstruction, first, given["noise"], given["x"])


def same_as_plain(title: str, loop: Loop, make: Callable[[], tuple[nn.Module, nn.Module]]) -> None:
    plain = make()
    wanted = list(loop(Plain(), *plain, *map(adamw, plain)))
    models = [sw.DistributedModel(module) for module in make()]
    optimizers = [sw.DistributedOptimizer(adamw(model)) for model in models]
    found = list(loop(Split(), *models, *optimizers))
    same = Comparison(title).losses(found, wanted, moving=0.01)
    for model, module in zip(models, plain, strict=True):
        name = type(module).__name__
        same.values(model.state_dict(), module.state_dict(), relative=1e-4, absolute=1e-4, what=f"weights of {name}")
    same.require()
    assert models[0].runtime is not models[1].runtime


def config(how: str) -> dict[str, Any]:
    axis, degree, *more = f"{how}:1".split(":") if how == "one" else how.split(":")
    keys = {"pp": "pipeline_parallel_degree", "tp": "tensor_parallel_degree"}
    found: dict[str, Any] = {"microbatches": MICROBATCHES, "wait_timeout_s": 60.0, "ddp": axis == "dp", "log_every": 0}
    if axis in keys:
        found[keys[axis]] = int(degree)
    return found | ({"shard": int(more[0])} if more else {})


def update(model: Any, optimizer: Any, step: int) -> float:
    given = batch(step)
    return Split().update(optimizer, of_labels, model, given["x"], given["labels"])


def wrapped(*modules: nn.Module) -> Iterator[tuple[sw.DistributedModel, sw.DistributedOptimizer]]:
    for module in modules:
        model = sw.DistributedModel(module)
        yield model, sw.DistributedOptimizer(adamw(model))


def expect(match: str, run: Callable[[], Any]) -> None:
    begun = time.monotonic()
    with pytest.raises(sw.ShardwrightError, match=match):
        run()
    assert time.monotonic() - begun < 30.0, "an error, not the end of a wait"
