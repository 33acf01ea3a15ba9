"""Checks of what gives another value at each call: clocks, and random generators of the users' own. `python_values.py`
runs them."""

import random
import sys
import time
from time import time as clock
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright.torch as sw
from shardwright.core.errors import CaptureError

WIDTH, STEPS = 8, 3
BEGAN_S = time.time()
OWN_GENERATORS = {"python": random.Random(0), "numpy": np.random.default_rng(0)}
settings = {"by_tensor": False}


def distributed_model() -> Any:
    torch.manual_seed(0)
    return sw.DistributedModel(nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, WIDTH), torch.ones(4, WIDTH)


def waiting_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    began_s = time.time()
    seconds = torch.tensor([time.time() - BEGAN_S]) if settings["by_tensor"] else time.time() - BEGAN_S
    loss = F.mse_loss(model(x), y) * 0.0 + seconds
    model.backward(loss.sum(), reduction="mean")
    print(f"the body took {clock() - began_s:.3f} s", file=sys.stderr)
    return loss.sum(), clock() - began_s


def a_clock(config: dict[str, Any], is_alone: bool) -> None:
    """What a clock says is another number in every step; where each of several ranks has one it is refused by name."""
    sw.init(config)
    distributed, step = distributed_model(), sw.step(waiting_step)
    if not is_alone:
        with pytest.raises(CaptureError, match=r"time\.time\(\), which says another time on each of the 2 ranks"):
            step(distributed, *batch())
    for by_tensor in (False, True) if is_alone else ():
        settings["by_tensor"] = by_tensor
        for _ in range(STEPS):
            earliest_s = time.time() - BEGAN_S
            loss, took_s = step(distributed, *batch())
            latest_s = time.time() - BEGAN_S
            assert all(earliest_s - 1e-4 <= float(one) <= latest_s + 1e-4 for one in loss.outputs), by_tensor
            assert all(0.0 <= one < 60.0 for one in took_s.outputs)  # another number in each microbatch
    assert distributed.runtime.split_model.bodies.recorded <= 4, (
        "a clock costs one recording more, and none in each step"
    )
    assert time.time is clock
    sw.shutdown()


def a_generator_of_the_users(config: dict[str, Any], is_alone: bool) -> None:
    for kind in OWN_GENERATORS:

        def body(model: Any, x: torch.Tensor, y: torch.Tensor, kind: str = kind) -> Any:
            loss = F.mse_loss(model(x), y) * OWN_GENERATORS[kind].random()
            model.backward(loss, reduction="mean")
            return loss

        sw.init(config)
        with pytest.raises(CaptureError, match="they would be the same in every step: draw them before the step"):
            sw.step(body)(distributed_model(), *batch())
        sw.shutdown()

    def with_torchs(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.mse_loss(model(x), y) * torch.rand((), generator=torch.Generator().manual_seed(3))
        model.backward(loss, reduction="mean")
        return loss

    sw.init(config)
    with pytest.raises(CaptureError, match=r"the step draws random numbers from a torch\.Generator of its own"):
        sw.step(with_torchs)(distributed_model(), *batch())
    sw.shutdown()


CHECKS = (a_clock, a_generator_of_the_users)
