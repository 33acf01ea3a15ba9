"""SageMaker's calls that are computed again in the backward pass."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwright.torch as sw
from shardwright.core.errors import PlanWarning, ShardwrightError
from tests.comparison import Comparison


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return nn.functional.dropout(super().forward(x), 0.3)


class Pair(nn.Module):
    """One or two arguments, and two results."""

    def forward(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = given[0] if len(given) == 1 and isinstance(given[0], tuple) else (given[0], given[-1])
        return first.tanh(), second * 2


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row, self.last, self.how = nn.Sequential(*(Counted(4, 4) for _ in range(3))), Counted(4, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "plain":
            return self.last(self.row(x)).square().mean()
        x = sw.checkpoint_sequential(self.row, x, strategy=self.how)
        loss: torch.Tensor = sw.checkpoint(self.last, x).square().mean()
        return loss


def gradients(how: str) -> tuple[list[torch.Tensor], int]:
    model = Net(how)
    torch.manual_seed(1)
    Counted.calls = 0
    model(torch.ones(5, 4, requires_grad=True)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None], Counted.calls


@pytest.mark.parametrize("strategy", ["each", "group_2", "contiguous"])
def test_gradients_are_those_of_plain_calls_and_modules_run_twice(strategy: str) -> None:
    expected, calls = gradients("plain")
    assert calls == 4
    if strategy == "each":
        found, calls = gradients(strategy)
    else:
        with pytest.warns(PlanWarning, match="each module of the Sequential is computed again by itself"):
            found, calls = gradients(strategy)
    Comparison().equal(found, expected).require()
    assert calls == 8


@pytest.mark.parametrize("packs", [False, True])
def test_tuples_are_arguments_unless_they_are_packed(packs: bool) -> None:
    row, given = nn.Sequential(Pair(), Pair()), (torch.ones(2, requires_grad=True), torch.ones(2))
    found = sw.checkpoint_sequential(row, given, pack_args_as_tuple=packs)
    Comparison().equal(list(found), [torch.ones(2).tanh().tanh(), torch.full((2,), 4.0)]).require()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sw.checkpoint(torch.tanh, torch.ones(1)), "checkpoint takes a torch.nn.Module, not a"),
        (lambda: sw.checkpoint(nn.Tanh(), torch.ones(1), preserve_rng_state=False), "preserve_rng_state=False"),
        (lambda: sw.checkpoint_sequential(nn.Tanh(), torch.ones(1)), "calls an nn.Sequential, not a Tanh"),
        (lambda: sw.checkpoint_sequential(nn.Sequential(), 1, strategy="group_0"), "strategy='group_0': expected"),
        (lambda: sw.checkpoint_sequential(nn.Sequential(), 1, pack_args_as_tuple=2), "pack_args_as_tuple=2"),
    ],
)
def test_what_is_wrong_is_said(call: Any, said: str) -> None:
    with pytest.raises(ShardwrightError, match=said):
        call()
