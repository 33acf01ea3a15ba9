"""Pipelines where XLA has no more threads than devices, in a process of their own: the number is set once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
