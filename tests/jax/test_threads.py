"""Pipelines where XLA has no more threads than devices, in a process of their own: the number is set once. And what
keeps them going: a rank's actions under way are bounded."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright.jax as sw
from shardwright.backends.jax.pipeline import actions as pipeline
from tests.jax.chains import plan_of

ROOT = Path(__file__).parents[2]
PROGRAM = """
import jax, jax.numpy as jnp, optax
import shardwright as sw
from shardwright.jax import train_step

UNITS, WIDTH = 16, 512

def loss(params, batch):
    x = batch
    for up, down in params:
        x = x + jnp.tanh(x @ up) @ down
    return jnp.mean(x**2)

params = [(jnp.full((WIDTH, 2 * WIDTH), 1e-3), jnp.full((2 * WIDTH, WIDTH), 1e-3)) for _ in range(UNITS)]
batch = jnp.ones((512, WIDTH))
graph = sw.capture(loss, (params, batch[:2]))
plan = sw.plan(
    graph, sw.Cluster("cpu", devices_per_node=2), batch=512, microbatch=128, pp=1, dp=1, tp=2, virtual_stages=UNITS,
    schedule="interleaved-1f1b", stage_starts=range(UNITS), recompute="none", shard=0, precision="fp32",
)
train = train_step(loss, optax.sgd(0.1), plan)
state = train.init(params)
for _ in range(4):
    state, found = train(state, batch)
print("loss", float(found))
"""


@pytest.mark.slow
def test_a_rank_of_several_devices_is_not_handed_more_than_its_threads_get_through() -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "NPROC": "2",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("loss")


@dataclass(eq=False)
class Marker:
    """What an action makes last, and whether it was waited for."""

    array: jax.Array
    done: bool = False

    def block_until_ready(self) -> None:
        self.done = True


@pytest.mark.usefixtures("quick_compilation")
def test_no_more_than_the_bound_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every one of three steps of twelve actions a rank."""
    monkeypatch.setattr(pipeline, "MOST_AHEAD", 3)

    def loss(params: list[jax.Array], batch: jax.Array) -> jax.Array:
        for weight in params:
            batch = jnp.tanh(batch @ weight)
        return (batch**2).mean()

    params, batch = [jnp.eye(4), 2 * jnp.eye(4)], np.ones((24, 4), np.float32)
    graph = sw.capture(loss, (params, batch))
    train = sw.train_step(loss, optax.sgd(0.1), plan_of(graph, 2, 2, batch=24), devices=jax.devices()[:4])
    state, _ = train(train.init(params), batch)
    under_way: dict[int, list[int]] = {0: [], 1: []}
    for rank, launches in enumerate(train.pipeline.launches):
        made: list[Marker] = []

        def run(*given: Any, launch: Any, made: list[Marker], rank: int) -> Any:
            *results, marker = launch.run(*(a.array if isinstance(a, Marker) else a for a in given))
            made.append(Marker(marker))
            newest = max((i for i, other in enumerate(made) if other.done), default=-1)
            under_way[rank].append(len(made) - 1 - newest)  # one that is done comes after all before it
            return [*results, made[-1]]

        for kind, launch in launches.items():
            launches[kind] = replace(launch, run=partial(run, launch=launch, made=made, rank=rank))
    for _ in range(3):
        state, _ = train(state, batch)
    for counts in under_way.values():
        assert len(counts) == 3 * 12
        assert max(counts) == 4  # three, and the one that was just handed over
