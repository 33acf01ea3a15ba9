"""Pipelines compiled as users compile them, with all of XLA's optimisations and flags, for twenty steps. Other tests
leave the optimisations out and take quicker emitters, as they compile much and run little."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import optax
import pytest

import shardwright.jax as sw
from tests.comparison import Comparison
from tests.jax import chains, spmd_model
from tests.jax.chains import module_reference

ROOT = Path(__file__).parents[2]
STEPS = 20


@pytest.mark.parametrize("form", ["stages", pytest.param("one program for all stages", marks=pytest.mark.slow)])
def test_twenty_steps_are_the_unsplit_models(form: str) -> None:
    """In a process of its own, as XLA reads its flags once."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "tests.jax.test_compiled_training", form]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the same\n")


def train_and_compare(form: str) -> None:
    if form == "stages":
        create, loss_fn, batches = chains.maker(4), chains.loss_fn, chains.batches(STEPS)
        plan, one_program = chains.plan_of(chains.graph_of(create), 2, schedule="1f1b"), False
    else:
        create, loss_fn, batches = spmd_model.maker(2), chains.plain_loss, spmd_model.batches(STEPS)
        plan, one_program = spmd_model.plan_of(2, 2), True
    assert not jax.config.read("jax_disable_most_optimizations")
    assert "emitters" not in os.environ["XLA_FLAGS"]
    expected = module_reference(loss_fn, create, optax.adamw(1e-3), batches)
    train = sw.train_step(loss_fn, optax.adamw(1e-3), plan, devices=jax.devices()[:2], one_program=one_program)
    state, losses = train.init(create), []
    for batch in batches:
        state, loss = train(state, batch)
        losses.append(loss)
    same = Comparison(form)
    same.losses(losses, expected.losses, moving=1e-3)
    same.require("losses")


if __name__ == "__main__":
    train_and_compare(sys.argv[1])
    print("the same")
