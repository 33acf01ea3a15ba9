"""Steps in which gradients flow from one model into another, held against the same script in one process. Part of
`two_models.py`."""

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs_of_models import (
    DATA,
    MICROBATCHES,
    NOISE,
    SAMPLES,
    STEPS,
    Tower,
    adamw,
    batch,
    config,
    discriminator,
    generator,
    of_labels,
    own,
    student,
    wrapped,
)
from torch import nn

import shardwright.torch as sw
from shardwright.core.errors import PlanWarning
from tests.comparison import Comparison

Loss = Callable[..., torch.Tensor]


def of_real_and_fake(discriminator: Any, generator: Any, noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    real, made = discriminator(torch.cat([x, generator(noise).detach()])).chunk(2)
    return F.softplus(-real).mean() + F.softplus(made).mean()


def of_real_then_fake(discriminator: Any, generator: Any, noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    fakes = generator(noise)
    return F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fakes.detach())).mean()


def of_fooling(generator: Any, discriminator: Any, noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    fakes = generator(noise)
    return F.softplus(-discriminator(fakes)).mean() + 0.5 * F.l1_loss(fakes, x)


def of_cycle(there: Any, back: Any, noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(back(there(noise)), noise) + F.l1_loss(there(back(x)), x)


def plain_backward(loss: Loss, *given: Any) -> float:
    """The loss of a batch, with its gradients, over the microbatches of all replicas."""
    models = [one for one in given if isinstance(one, nn.Module)]
    count = MICROBATCHES * sw.rdp_size()
    parts = list(zip(*(t.chunk(count) for t in given if isinstance(t, torch.Tensor)), strict=True))
    losses = [loss(*models, *part) / len(parts) for part in parts]
    total = torch.stack(losses).sum()
    total.backward()
    return float(total.detach())


def stepped(loss: Loss) -> Callable[..., float]:
    """The same by a step, whose first model is given the loss."""

    def body(first, second, noise, x):
        found = loss(first, second, noise, x)
        first.backward(found)
        return found

    body.__name__ = body.__qualname__ = loss.__name__
    step = sw.step(body)

    def run(loss: Loss, first: Any, second: Any, *tensors: torch.Tensor) -> float:
        return float(step(first, second, *map(own, tensors)).all_reduce_mean())

    return run


def adversaries(backward: dict[Loss, Any], first: Any, second: Any, of_first: Any, of_second: Any) -> Iterator[float]:
    """A GAN as scripts have it: the discriminator's step, and the generator's through the discriminator."""
    of_critic, of_fooling = backward
    for number in range(STEPS):
        given = batch(number)
        of_second.zero_grad()
        yield backward[of_critic](of_critic, second, first, given["noise"], given["x"])
        of_second.step()
        of_first.zero_grad()
        yield backward[of_fooling](of_fooling, first, second, given["noise"], given["x"])
        of_first.step()


def cycles(backward: dict[Loss, Any], first: Any, second: Any, of_first: Any, of_second: Any) -> Iterator[float]:
    """Two models, each called with what the other returns."""
    for number in range(STEPS):
        given = batch(number)
        for optimizer in (of_first, of_second):
            optimizer.zero_grad()
        yield backward[of_cycle](of_cycle, first, second, given["noise"], given["x"])
        for optimizer in (of_first, of_second):
            optimizer.step()


def same_as_in_one_process(title: str, loop: Any, losses: tuple[Loss, ...], make: Callable[[], Any]) -> Any:
    plain = make()
    wanted = list(loop(dict.fromkeys(losses, plain_backward), *plain, *map(adamw, plain)))
    (first, of_first), (second, of_second) = wrapped(*make())
    found = list(loop({loss: stepped(loss) for loss in losses}, first, second, of_first, of_second))
    same = Comparison(title).losses(found, wanted, moving=0.01)
    for model, module in zip((first, second), plain, strict=True):
        name = type(module).__name__
        same.values(model.state_dict(), module.state_dict(), relative=1e-4, absolute=1e-4, what=f"weights of {name}")
    same.require()
    return first, second


class NormedGenerator(Tower):
    """With statistics of its batches."""

    def __init__(self) -> None:
        super().__init__(NOISE, 16, DATA)
        self.blocks[0].norm = nn.BatchNorm1d(16)
        self.blocks[0].down = nn.Linear(32, 16, bias=False)  # the gradient of a bias before it would be zero


def a_generator_through_its_discriminator() -> None:
    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(7)
        has_parts = sw.rdp_size() > 1 or sw.tp_size() > 1
        return generator() if has_parts else NormedGenerator(), discriminator()

    first, second = same_as_in_one_process("a GAN", adversaries, (of_real_and_fake, of_fooling), make)
    assert second.runtime.messages is None, "not recorded"
    counts = [model.model_run.samples_trained for model in (first, second)]
    assert counts == [STEPS * SAMPLES] * 2, counts
    with torch.no_grad():

        @sw.step
        def fooled(generator, discriminator, noise):
            return discriminator(generator(noise)).mean()

        assert fooled(first, second, own(batch(0)["noise"])).reduce_mean().isfinite()


def a_discriminator_that_is_called_twice() -> None:
    """By messages with stages, since the steps make different calls; buffers that the model computes with are as they
    were when a call is run once more."""

    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(5)
        critic = discriminator()
        if sw.pp_size() > 1:
            nn.utils.parametrizations.spectral_norm(critic.first)
        return generator(), critic

    same_as_in_one_process("a GAN of three calls", adversaries, (of_real_then_fake, of_fooling), make)


def a_cycle_of_two() -> None:
    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(6)
        return Tower(NOISE, 16, DATA), Tower(DATA, 16, NOISE)

    same_as_in_one_process("a cycle", cycles, (of_cycle,), make)


class Dropped(nn.Module):
    """Linear in its weights, with a mask: the product of weights and gradients is the loss, under the same mask."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(before, 16, bias=False), nn.Dropout(0.5)
        self.last = nn.Linear(16, after, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.drop(self.first(x)))
        return found


def one_mask_in_both_passes() -> None:
    """The forward pass that is run twice draws the same numbers both times."""
    (first, _), (second, _) = wrapped(Dropped(NOISE, DATA), Dropped(DATA, 1))

    @sw.step
    def through(first, second, noise):
        loss = second(first(noise)).mean()
        first.backward(loss)
        return loss

    losses = []
    for _ in range(2):
        first.zero_grad()
        losses.append(float(through(first, second, own(batch(0)["noise"])).all_reduce_mean()))
        of_last = sum((p * p.grad).sum() for n, p in first.local_named_parameters() if n.startswith("last"))
        parts = torch.as_tensor(of_last, dtype=torch.float32).reshape(1)
        total = sum(float(one) for one in sw.allgather(float(parts), sw.PP_GROUP))
        Comparison("the mask").losses([total], [losses[-1]]).require()
    assert abs(losses[0] - losses[1]) > 1e-6, "two steps drew the same mask"


def statistics_of_batches_of_their_own() -> None:
    """Where ranks of the tensor axis have batches of their own, the forward pass that is run twice has the samples of
    all of them both times."""
    sw.shutdown()
    sw.init(config(sys.argv[1]) | {"prescaled_batch": False, "microbatches": 1})
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(NOISE, DATA), nn.BatchNorm1d(DATA), nn.Linear(DATA, DATA)), discriminator()]
    plain = copy.deepcopy(made)
    (first, _), (second, _) = wrapped(*made)

    @sw.step
    def through(first, second, noise):
        loss = second(first(noise)).pow(2).mean()
        first.backward(loss)
        return loss

    noise = batch(0)["noise"]
    loss = through(first, second, noise.chunk(sw.tp_size())[sw.tp_rank()])
    wanted = plain[1](plain[0](noise)).pow(2).mean()
    wanted.backward()
    found, held = first.state_dict(), plain[0].state_dict()
    same = Comparison("batches of their own").losses([float(loss.all_reduce_mean())], [wanted.item()])
    same.equal(found["1.num_batches_tracked"], held["1.num_batches_tracked"], what="runs")
    same.values(
        found["1.running_var"], held["1.running_var"], relative=1e-5, absolute=1e-6, what="statistics"
    ).require()
    with pytest.warns(PlanWarning, match="update_bn does nothing with a copy"):
        copy.deepcopy(first)


def what_the_body_writes() -> None:
    """Python values are written once for each microbatch, and every run of the body finds those of before."""
    kept = {"calls": 0}

    def loss_of(first, second, noise):
        scale = 1.0 + 0.5 * kept["calls"]
        kept["calls"] += 1
        return second(first(noise * scale)).pow(2).mean() / scale

    def body(first, second, noise):
        loss = loss_of(first, second, noise)
        first.backward(loss)
        return loss

    def taught(first, second, noise):
        kept["calls"] += 1
        with torch.no_grad():
            wanted = second(noise[:, :1].repeat(1, DATA))
        loss = (first(noise).mean(1, keepdim=True) - wanted).pow(2).mean()
        first.backward(loss)
        return loss

    plain = [generator(), discriminator()]
    (first, _), (second, _) = wrapped(*copy.deepcopy(plain))
    chained, behind, noise = sw.step(body), sw.step(taught), batch(0)["noise"]
    same = Comparison("what the body writes")
    for number in range(2):
        kept["calls"] = MICROBATCHES * number
        for model in (first, second, *plain):
            model.zero_grad()
        wanted = plain_backward(loss_of, *plain, noise)
        assert kept["calls"] == MICROBATCHES * (number + 1)
        kept["calls"] = MICROBATCHES * number
        same.losses([float(chained(first, second, noise).all_reduce_mean())], [wanted])
        assert kept["calls"] == MICROBATCHES * (number + 1), kept
        for model, module in zip((first, second), plain, strict=True):
            found = {name: p.grad for name, p in model.local_named_parameters()}
            same.gradients(found, {name: p.grad for name, p in module.named_parameters() if name in found})
    kept["calls"] = 0
    behind(first, second, noise)
    assert kept["calls"] == MICROBATCHES, kept
    same.require()


def gradients_of_inputs() -> None:
    """A tensor that requires a gradient gets it, a leaf or one that was computed outside; weights of losses count."""
    given = batch(0)

    def body(model, x, labels, weighted):
        loss = of_labels(model, x, labels)
        model.backward(loss, weight=x.shape[0] if weighted else None)
        return loss + x.mean()

    step = sw.step(body)
    ((model, _),) = wrapped(student())
    plain = student()
    for weighted in (False, True):
        wanted = given["x"].clone().requires_grad_()
        plain_backward(of_labels, plain, wanted * 1.0, given["labels"])
        found = own(given["x"]).clone().requires_grad_()
        scale = torch.tensor(2.0, requires_grad=True)
        step(model, found, own(given["labels"]), weighted)
        step(model, scale * own(given["x"]) / 2, own(given["labels"]), weighted)
        of_scale = (own(wanted.grad) * own(given["x"])).sum() / 2
        same = Comparison("gradients of inputs")
        same.gradients({"x": found.grad, "scale": scale.grad}, {"x": own(wanted.grad), "scale": of_scale}).require()
