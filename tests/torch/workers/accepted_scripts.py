"""Training loops as PyTorch users write them: each is run on the plain model and on the split one, and gives the same.

A loop is given the model, what makes its optimizers and its steps, and whether it is the split one; it yields losses.
"""

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwright.torch as sw
from shardwright.core.errors import ShardwrightError
from tests.torch.workers.accepted_models import SAMPLES, Network

STEPS = 3
Loop = Callable[["Kit"], Iterator[float]]


@dataclass(frozen=True, slots=True)
class Script:
    """A model and its loop.

    Attributes:
        axes: along which it is split.
        mode: how it runs at the end: "recorded" or "messages".
    """

    make: Callable[[], nn.Module]
    loop: Loop
    axes: tuple[str, ...]
    mode: str


SCRIPTS: dict[str, Script] = {}


@dataclass(frozen=True, slots=True)
class Kit:
    """What a loop is written with: for the plain model what torch has, for the split one what this library has."""

    model: Any
    is_split: bool

    def optimizer(self, parameters: Any, **options: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=1e-2, **options)
        return sw.DistributedOptimizer(made) if self.is_split else made

    def step(self, loss_of: Callable[..., torch.Tensor], scaler: Any = None) -> Callable[..., float]:
        """A training step of a loss; by the scaler if there is one."""

        def body(model: Any, *batch: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, *batch)
            scaled = loss if scaler is None else scaler.scale(loss)
            model.backward(scaled) if self.is_split else scaled.backward()
            return loss

        run = sw.step(body) if self.is_split else body

        def step(*batch: torch.Tensor) -> float:
            if not self.is_split:
                return float(run(self.model, *batch).detach())
            replicas, mine = sw.rdp_size(), sw.rdp_rank()
            return float(run(self.model, *(b.chunk(replicas)[mine] for b in batch)).all_reduce_mean())

        return step


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SAMPLES, 16, generator=generator), torch.randn(SAMPLES, 1, generator=generator)


def script(make: Callable[[], nn.Module], *axes: str, mode: str = "recorded") -> Callable[[Loop], Loop]:
    def register(loop: Loop) -> Loop:
        SCRIPTS[loop.__name__] = Script(make, loop, axes, mode)
        return loop

    return register


# Two networks in one module, trained by turns ----------------------------------------------------------------------


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Network(16), Network()

    def forward(self, noise: torch.Tensor, x: torch.Tensor, *, of_critic: bool) -> torch.Tensor:
        """The loss of one of the two."""
        with torch.no_grad() if of_critic else contextlib.nullcontext():
            made = self.generator(noise)
        if of_critic:
            found: torch.Tensor = F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(made)).mean()
        else:
            found = F.softplus(-self.critic(made)).mean()
        return found


def by_parts(model: Any, noise: torch.Tensor, x: torch.Tensor, *, of_critic: bool) -> torch.Tensor:
    """The same loss, by calls of the parts."""
    if of_critic:
        made = model.generator(noise).detach()
        return F.softplus(-model.critic(x)).mean() + F.softplus(model.critic(made)).mean()
    return F.softplus(-model.critic(model.generator(noise))).mean()


def adversaries(kit: Kit, loss: Callable[..., torch.Tensor], *, freezes: bool) -> Iterator[float]:
    critic, generator = kit.model.critic, kit.model.generator
    of_critic, of_generator = kit.optimizer(critic.parameters()), kit.optimizer(generator.parameters())
    critic_step = kit.step(lambda model, noise, x: loss(model, noise, x, of_critic=True))
    generator_step = kit.step(lambda model, noise, x: loss(model, noise, x, of_critic=False))
    for number in range(STEPS):
        noise, x = batch(number)[0], batch(-number - 1)[0]
        for parameter in generator.parameters():
            parameter.requires_grad_(not freezes)
        of_critic.zero_grad()
        yield critic_step(noise, x)
        of_critic.step()
        for part in (generator, critic):
            for parameter in part.parameters():
                parameter.requires_grad_(not freezes or part is generator)
        of_generator.zero_grad()
        yield generator_step(noise, x)
        of_generator.step()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)


@script(Adversaries, "pp", "tp", mode="messages")
def adversaries_by_parts(kit: Kit) -> Iterator[float]:
    yield from adversaries(kit, by_parts, freezes=False)


@script(Adversaries, "pp", "tp", mode="messages")
def adversaries_that_are_frozen_by_turns(kit: Kit) -> Iterator[float]:
    """The first step is recorded; the second makes other calls, and all run by messages from then on, with the states
    of the optimizers and the gradients of the first."""

    def loss(model: Any, *given: Any, **named: Any) -> torch.Tensor:
        found: torch.Tensor = model(*given, **named)
        return found

    yield from adversaries(kit, loss, freezes=True)


# An average of the weights --------------------------------------------------------------------------------------------


def mse(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


@script(Network, "pp", "tp", "dp")
def an_average_of_the_weights(kit: Kit) -> Iterator[float]:
    averaged = AveragedModel(kit.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)).eval()
    first = copy.deepcopy(kit.model)
    optimizer = kit.optimizer(kit.model.parameters())
    step = kit.step(mse)
    run = sw.step(mse) if kit.is_split else mse

    def evaluated(model: Any) -> float:
        if not kit.is_split:
            return float(run(model, *batch(9)))
        return float(run(model, *(b.chunk(sw.rdp_size())[sw.rdp_rank()] for b in batch(9))).all_reduce_mean())

    for number in range(STEPS):
        optimizer.zero_grad()
        yield step(*batch(number))
        optimizer.step()
        averaged.update_parameters(kit.model)
        with torch.no_grad():
            yield evaluated(averaged)
            yield evaluated(kit.model)
    whole = averaged.state_dict()
    for name in sorted(whole):
        yield float(whole[name].double().norm())
    with torch.no_grad():
        yield evaluated(first)
        averaged.load_state_dict(
            {name: entry if name == "n_averaged" else 0.5 * entry for name, entry in whole.items()}
        )
        yield evaluated(averaged)
        yield evaluated(copy.deepcopy(averaged))
    if kit.is_split:
        said = (
            ("with gradients enabled", lambda: evaluated(averaged)),
            ("a DistributedModel is pickled", lambda: pickle.dumps(kit.model)),
            ("a copy of a DistributedModel is pickled", lambda: pickle.dumps(first)),
            ("what is written to it is lost", first.state_dict),
            (r"on your own module, use model\.module\.session", lambda: setattr(kit.model, "session", 1)),
        )
        for text, call in said:
            with pytest.raises(ShardwrightError, match=text):
                call()
        both = sw.step(lambda model, other, x: model(x) + other(x))
        unasked = sw.step(lambda model, x: first(x))
        with torch.no_grad():
            with pytest.raises(ShardwrightError, match="one of them at a time"):
                both(kit.model, first, batch(0)[0])
            with pytest.raises(ShardwrightError, match="in a step that was not given it"):
                unasked(kit.model, batch(0)[0])
        copy.deepcopy(kit.model.module)
    optimizer.zero_grad()
    yield step(*batch(0))


# A scaler ------------------------------------------------------------------------------------------------------------


class Overflowing(Network):
    """The weights of its first entry are zero and stay so; their gradients are as large as that entry."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        with torch.no_grad():
            self.first.weight[:, 0] = 0

    def forward(self, x: Any, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(self.first(x), scale)


@script(Overflowing, "pp", "dp")
def a_scaler_first_used_in_the_step(kit: Kit) -> Iterator[float]:
    """Where a gradient overflows, on the first stage alone, or on one replica, all ranks skip the update."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    optimizer = kit.optimizer(kit.model.parameters())
    step = kit.step(lambda model, x, y: F.mse_loss(model(x), y), scaler)
    for number in range(4):
        x, y = batch(number)
        x[:, 0] = 0.0
        x[-1, 0] = 1e36 if number == 1 else 0.0
        optimizer.zero_grad()
        yield step(x, y)
        if number == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale()
