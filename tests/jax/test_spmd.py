"""Pipelines of stages that are alike as one SPMD program, in one process and in two."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from shardwright.backends.jax.pipeline.spmd import _learning_if
from tests.comparison import Comparison
from tests.jax import spmd_model
from tests.jax.chains import Run, module_reference, named, reference
from tests.jax.spmd_model import batches, loss_fn, maker, optimizer, plain_loss, plain_params, plan_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).parents[2]
BLOCKS = 4


@pytest.fixture(scope="module")
def expected() -> Run:
    return module_reference(loss_fn, maker(BLOCKS), optimizer(), batches(2))


def trained_as(expected: Run, train: sw.TrainStep) -> sw.TrainState:
    """The state after two steps, whose losses and parameters are those expected."""
    state = train.init(maker(BLOCKS))
    losses = []
    for batch in batches(2):
        state, loss = train(state, batch)
        losses.append(float(loss))
    Comparison().losses(losses, expected.losses).require()
    after = named(nnx.state(train.params(state), nnx.Param))
    Comparison().values(after, expected.params, relative=2e-3, absolute=2e-5).require()
    return state


@pytest.mark.parametrize(
    ("pp", "dp", "pins"),
    [
        (4, 2, {}),
        (2, 1, {"schedule": "looped-bfs", "virtual_stages": 2}),
        pytest.param(2, 1, {"recompute": "full"}, marks=pytest.mark.slow),
    ],
)
def test_losses_and_parameters_are_the_unsplit_models(expected: Run, pp: int, dp: int, pins: dict[str, Any]) -> None:
    plan = plan_of(BLOCKS, pp, dp, **pins)
    devices = jax.devices()[: plan.mesh.size]
    train = sw.train_step(loss_fn, optimizer(), plan, devices=devices, one_program=True)
    state = trained_as(expected, train)
    for tree in (state.params, state.optimizer):  # every device holds its share of the blocks
        assert tree["stacks"]
        for stack in tree["stacks"]:
            assert stack.addressable_shards[0].data.size * pp == stack.size


class Directed(nnx.Module):
    """A block of the direction of its input, which has no derivative at zero."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(spmd_model.WIDTH, spmd_model.WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.up(x / jnp.linalg.norm(x, axis=-1, keepdims=True)))


TWICE = {"schedule": "looped-bfs", "virtual_stages": 2}


@pytest.mark.parametrize(
    "cases", [[({}, True), (TWICE, True)], pytest.param([({}, False), (TWICE, False)], marks=pytest.mark.slow)]
)
def test_ranks_without_work_learn_nothing(
    monkeypatch: pytest.MonkeyPatch, cases: list[tuple[dict[str, Any], bool]]
) -> None:
    """While the pipeline fills and drains, with one round and with two; and stages as programs of their own."""
    monkeypatch.setattr(spmd_model, "Block", Directed)
    expected = module_reference(loss_fn, maker(BLOCKS), optimizer(), batches(2))
    for pins, one_program in cases:
        train = sw.train_step(
            loss_fn, optimizer(), plan_of(BLOCKS, 2, **pins), devices=jax.devices()[:2], one_program=one_program
        )
        trained_as(expected, train)


def test_gradients_pass_where_there_is_work() -> None:
    """Of a function whose derivative at zero is infinite; integers and random keys are left as they are."""
    fixed = {"ids": jnp.arange(2), "key": jax.random.key(0)}

    def roots(x: jax.Array, busy: jax.Array, scale: float) -> jax.Array:
        given = _learning_if(busy, {"x": x, **fixed})
        assert given["ids"] is fixed["ids"]
        assert given["key"] is fixed["key"]
        return scale * jnp.sqrt(given["x"]).sum()

    slope = jax.jit(jax.value_and_grad(roots))
    for busy, scale, wanted in ((False, 0.0, [0, 0]), (False, 1.0, [0, 0]), (True, 1.0, [np.inf, 0.25])):
        value, found = slope(jnp.array([0.0, 4.0]), jnp.bool_(busy), scale)
        assert value == 2 * scale
        Comparison().equal(list(found), wanted).require()


@pytest.mark.slow
def test_two_processes_of_four_devices_each(expected: Run) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"  # of two that are given, the last
    environment = os.environ | {"XLA_FLAGS": flags}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.jax.spmd_model", str(rank), "2", str(port)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [worker.communicate(timeout=400)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    plain = reference(plain_loss, plain_params(), optimizer(), batches(2), 1)
    for text in said:
        match = re.search(r"losses \[(.*)\] devices 4", text)
        assert match, text
        Comparison().losses([float(x) for x in match[1].split(",")], expected.losses).require()
        refusal = r"refused: MissingCapabilityError: stage 0 lies on the devices of 2 processes, .*sw.init.*one_program"
        assert re.search(refusal, text), text
        for what, name in (("plan", "plan"), ("batch", "batch"), ("later batch", "batch")):
            differs = rf"{what} refused: the processes do not have the same {name}: .* process 1 differs from process 0"
            assert re.search(f"^{differs}", text, re.MULTILINE), text
        for stages in ("plain", "alone"):
            match = re.search(stages + r" \[(.*)\]", text)
            assert match, text
            Comparison().losses([float(x) for x in match[1].split(",")], plain.losses).require()


# --- bad input


def test_blocks_that_stages_do_not_divide() -> None:
    with pytest.raises(sw.ShardwrightError, match=r"repeats 6 blocks, which 4 stages .* divides 6"):
        sw.train_step(loss_fn, optimizer(), plan_of(6, 4), devices=jax.devices()[:4], one_program=True)


def test_a_schedule_that_is_no_loop() -> None:
    plan = plan_of(BLOCKS, 2, schedule="1f1b")
    with pytest.raises(sw.ShardwrightError, match=r"schedule='1f1b'.* gpipe and looped-bfs"):
        sw.train_step(loss_fn, optimizer(), plan, devices=jax.devices()[:2], one_program=True)


def test_stages_that_are_not_alike() -> None:
    from tests.jax import chains

    graph = chains.graph_of(chains.maker(4))
    plan = chains.plan_of(graph, 2, schedule="gpipe")
    train = sw.train_step(chains.loss_fn, optimizer(), plan, devices=jax.devices()[:2], one_program=True)
    with pytest.raises(sw.ShardwrightError, match="stages that are alike"):
        train(train.init(chains.maker(4)), chains.batches(1)[0])


def test_stages_that_are_alike_but_for_a_derivative_rule() -> None:
    """Each block scales its gradient by a factor of its own, which stands in no equation of its forward."""
    from tests.jax import chains

    class Scaled(chains.Block):
        def __init__(self, rngs: nnx.Rngs, factor: float):
            super().__init__(rngs, 0.0)
            self.factor = factor

        def __call__(self, x: jax.Array, first: jax.Array) -> jax.Array:
            @jax.custom_vjp
            def scaled(x: jax.Array) -> jax.Array:
                return x

            scaled.defvjp(lambda x: (x, None), lambda _, gradient: (self.factor * gradient,))
            return scaled(super().__call__(x, x))

    class Model(chains.Chain):
        def __init__(self, factors: tuple[float, ...]):
            super().__init__(4, nnx.Rngs(1))
            self.blocks = nnx.List([Scaled(nnx.Rngs(1), factor) for factor in factors])

    def once(factors: tuple[float, ...]) -> float:
        plan = chains.plan_of(chains.graph_of(lambda: Model(factors)), 2, schedule="gpipe")
        train = sw.train_step(chains.plain_loss, optax.sgd(1.0), plan, devices=jax.devices()[:2], one_program=True)
        state = train.init(lambda: Model(factors))
        for batch in chains.batches(2):
            state, loss = train(state, batch)
        return float(loss)

    same = (0.5, 0.5, 0.5, 0.5)
    expected = chains.module_reference(chains.plain_loss, lambda: Model(same), optax.sgd(1.0), chains.batches(2))
    assert once(same) == pytest.approx(expected.losses[1], rel=1e-5)
    with pytest.raises(
        sw.ShardwrightError, match=r"equation \d+, custom_vjp_call against custom_vjp_call, .*derivative"
    ):
        once((0.5, 0.5, 2.0, 0.5))
