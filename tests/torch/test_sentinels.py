"""NaN and infinity in losses and gradients: told with the step, the stage and the microbatch, and by op if asked."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwright.torch as sw
from shardwright.core.errors import NonFiniteError


class Part(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


class Model(nn.Module):
    """The second part does what a test wants, the third something harmless."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([Part(torch.tanh), Part(function), Part(torch.tanh)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().mean()


@sw.step
def train_step(model, x):
    loss = model(x)
    model.backward(loss)
    return loss


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    sw.shutdown()


def begin(function: Callable[[torch.Tensor], torch.Tensor], **keys: Any) -> sw.DistributedModel:
    sw.init({"microbatches": 4, **keys})
    return sw.DistributedModel(Model(function))


def batch(bad: int | None = None) -> torch.Tensor:
    """Two samples for each microbatch; all that is in microbatch ``bad`` is NaN."""
    given = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    if bad is not None:
        given[2 * bad : 2 * bad + 2] = float("nan")
    return given


def halved(x: torch.Tensor) -> torch.Tensor:
    """Its values are finite, and the gradient at zero is not."""
    return x.mul(0.0).abs().sqrt()


def divided(x: torch.Tensor) -> torch.Tensor:
    return x / x.sub(x)


def masked(x: torch.Tensor) -> torch.Tensor:
    """An infinity that is meant, as in attention's masks."""
    return x.masked_fill(torch.tensor([True, False, False, False]), float("-inf")).softmax(-1)


def test_the_loss_is_named_with_its_microbatch_and_warned_of_a_few_times() -> None:
    model = begin(torch.tanh)
    train_step(model, batch())
    with pytest.warns(UserWarning, match=r"rank 0, step 1: the loss of microbatch 2 \(stage 0\) is nan") as said:
        train_step(model, batch(bad=2))
    assert "debug='numerics'" in str(said[0].message)
    for _ in range(4):
        model.zero_grad()
        with warnings.catch_warnings(record=True) as more:
            warnings.simplefilter("always")
            train_step(model, batch(bad=0))
    assert not more, "the same is not said for ever"


def test_it_is_an_error_where_that_is_asked_for() -> None:
    model = begin(torch.tanh, nonfinite="error")
    with pytest.raises(NonFiniteError, match=r"the loss of microbatch 0 \(stage 0\) is nan"):
        train_step(model, batch(bad=0))


def test_nothing_is_said_where_that_is_asked_for() -> None:
    model = begin(torch.tanh, nonfinite="ignore")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(model, batch(bad=0))


def test_a_gradient_is_named_where_the_loss_is_finite() -> None:
    model = begin(halved, nonfinite="error")
    with pytest.raises(NonFiniteError, match=r"step 0: the gradient of parts\.0\.linear\.weight has a NaN"):
        train_step(model, batch())


@pytest.mark.parametrize("debug", [None, "numerics"])
def test_infinities_that_are_meant_are_no_reason(debug: str | None) -> None:
    model = begin(masked, nonfinite="error", debug=debug)
    train_step(model, batch())
    assert model.runtime.split_model.sentinel.answer == "error"


def test_large_and_finite_gradients_are_no_reason() -> None:
    """The sum of their squares is infinite in float32."""
    model = begin(lambda x: x * 1e25, nonfinite="error")
    with torch.no_grad():
        model.module.parts[2].linear.weight.mul_(1e-25)
    train_step(model, batch())
    norms = [float(p.grad.double().norm()) for p in model.parameters()]
    assert max(norms) > 1e20
    assert all(norm < float("inf") for norm in norms)


def test_overflow_in_half_is_left_to_the_scaler() -> None:
    model = begin(halved, nonfinite="error")
    with torch.autocast("cpu", dtype=torch.float16):
        train_step(model, batch())
    assert any(not torch.isfinite(p.grad).all() for p in model.parameters())


def test_the_first_op_of_the_forward_is_named() -> None:
    model = begin(divided, nonfinite="error", debug="numerics")
    with pytest.raises(NonFiniteError, match=r"div in parts\.1 \(forward; stage 0, action 0F0, microbatch 0\)"):
        train_step(model, batch())


def test_the_first_op_of_the_backward_is_named() -> None:
    model = begin(halved, nonfinite="error", debug="numerics")
    named = r"made by div in parts\.1 \(backward, SqrtBackward0; stage 0, action 0B0, microbatch 0\)"
    with pytest.raises(NonFiniteError, match=named):
        train_step(model, batch())


def test_ops_are_not_looked_at_where_they_do_not_run_one_by_one() -> None:
    with pytest.raises(sw.ShardwrightError, match="compile leaves none"):
        sw.init({"debug": "numerics", "compile": True})
    with pytest.raises(sw.ShardwrightError, match="debug='loud': expected 'numerics'"):
        sw.init({"debug": "loud"})
    with pytest.raises(sw.ShardwrightError, match="nonfinite='maybe': expected 'warn', 'error' or 'ignore'"):
        sw.init({"nonfinite": "maybe"})
