"""What users do wrong on two pipeline ranks, each named. Prints `ok NAME on RANK` for each."""

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright.torch as sw
from shardwright.core.errors import ShardwrightError

WAIT_S = 40.0
CONFIG = {"pipeline_parallel_degree": 2, "microbatches": 2, "wait_timeout_s": WAIT_S}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x * self.scale


@sw.step
def train_step(model, x, y=None):
    out = model(x)
    loss = out.square().mean() if y is None else (out - y).square().mean()
    model.backward(loss)
    return loss


def wrapped(change: Callable[[nn.Module], Any] = lambda model: None) -> Any:
    sw.init(CONFIG)
    model = Tower()
    change(model)
    return sw.DistributedModel(model)


def given(rows: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def expect(match: str, run: Callable[[], Any]) -> None:
    begun = time.monotonic()
    with pytest.raises(ShardwrightError, match=match):
        run()
    assert time.monotonic() - begun < WAIT_S / 2, "an error, not the end of a wait"
    sw.shutdown()


def a_target_on_one_rank_alone() -> None:
    model = wrapped()
    expect(
        r"disagree on the arguments in the step train_step: y is None on rank 0, \(4, 8\) float32 on rank 1",
        lambda: train_step(model, given(), given() if sw.rank() else None),
    )


def batches_of_different_dtypes() -> None:
    model = wrapped()
    expect(
        r"the ranks disagree on the arguments .*: x is \(4, 8\) float32 on rank 0, \(4, 8\) float64 on rank 1",
        lambda: train_step(model, given(dtype=[torch.float32, torch.float64][sw.rank()])),
    )


def models_of_different_dtypes() -> None:
    expect(
        r"disagree on the parameters of the model in sw.DistributedModel: .* \(8, 8\) float64, trained on rank 1",
        lambda: wrapped(lambda model: model.double() if sw.rank() else model),
    )


def different_models() -> None:
    expect(
        r"disagree on the modules of the model .*: layers.4 is not there on rank 0, Linear .* on rank 1",
        lambda: wrapped(lambda model: model.layers.append(nn.Linear(8, 8)) if sw.rank() else model),
    )


def a_call_outside_a_step() -> None:
    model = wrapped()
    expect("runs inside a function decorated with", lambda: model(given()))


def a_result_that_no_rank_computes() -> None:
    model = wrapped()

    @sw.step
    def returns_a_weight(model, x):
        loss = model(x).mean()
        model.backward(loss)
        return loss, model.module.scale

    expect("the step returns scale, a parameter", lambda: returns_a_weight(model, given()))


def a_value_read_in_the_body() -> None:
    model = wrapped()

    @sw.step
    def reads(model, x):
        loss = model(x).mean()
        model.backward(loss)
        return {"loss": loss, "text": f"{loss.item():.2f}"}

    expect("item", lambda: reads(model, given()))


def shapes_that_part_in_mid_run() -> None:
    """One rank records a step for the new shapes and the other runs the one it has: both are told, and none waits."""
    sw.init({**CONFIG, "wait_timeout_s": 600.0})
    model = sw.DistributedModel(Tower())
    for _ in range(2):
        train_step(model, given())
    warnings.simplefilter("ignore")  # of a batch that is not the planned one
    with pytest.raises(ShardwrightError, match=r"x is \(4, 8\) float32 on rank 0, \(6, 8\) float32 on rank 1"):
        train_step(model, given(6 if sw.rank() else 4))


CHECKS: tuple[Callable[[], None], ...] = (
    a_target_on_one_rank_alone,
    batches_of_different_dtypes,
    models_of_different_dtypes,
    different_models,
    a_call_outside_a_step,
    a_result_that_no_rank_computes,
    a_value_read_in_the_body,
    shapes_that_part_in_mid_run,  # the last, since the ranks are out of step afterwards
)


def main() -> None:
    dist.init_process_group("gloo")
    for check in CHECKS:
        check()
        os.write(1, f"ok {check.__name__} on {dist.get_rank()}\n".encode())  # in one piece: both ranks write here


if __name__ == "__main__":
    main()
