"""Several stages in this one process, and small batches for them."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.backends.torch.machine.mesh import bind
from shardwright.backends.torch.machine.process import Launch, start
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.backends.torch.runtime import Runtime
from shardwright.backends.torch.training.call import Result, StepBody, StepCall
from shardwright.core.layout.mesh import Mesh
from shardwright.core.schedule import Schedule

WIDTH = 6
MICROBATCHES = 2


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    start(Launch("none"), torch.device("cpu"), 30.0)
    yield
    dist.destroy_process_group()


def make_runtime(model: nn.Module, calls: list[list[tuple[str, int]]], stages: dict[str, tuple[int, ...]]) -> Runtime:
    """Stages that all lie on this rank, so that values travel through the mailbox and not through a network."""
    schedule = Schedule.build("looped-bfs", ranks=1, microbatches=MICROBATCHES, virtual_stages=len(calls))
    bound = bind(Mesh.of(pp=1, dp=1, tp=1))
    runtime = Runtime(model, bound, Watchdog("rank 0", 30.0), seed=0, weights=None)
    runtime.split(StageMap(schedule, tuple(map(tuple, calls)), stages))
    return runtime


def run_step(runtime: Runtime, body: StepBody, microbatches: list[list[torch.Tensor]]) -> Result:
    shares = runtime.begin("a step", [1] * len(microbatches))
    return runtime.run(StepCall("a", body, microbatches, shares))


def samples(*shape: int) -> torch.Tensor:
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(7))
