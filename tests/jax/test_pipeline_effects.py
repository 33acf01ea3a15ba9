"""What depends on values, and what reaches outside, in a pipeline: both stay whole inside their stage."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import shardwright.jax as sw
from shardwright.backends.jax.program.equations import evaluate
from shardwright.backends.jax.program.flattening import flatten
from shardwright.backends.jax.program.saved_activations import residuals
from tests.comparison import Comparison
from tests.jax.chains import plan_of, reference

LAYERS, WIDTH, BATCH = 4, 8, 16


def params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {"layers": [{"w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5} for key in keys]}


def batches(steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((BATCH, WIDTH)).astype(np.float32)} for _ in range(steps)]


def halvings(x: jax.Array) -> jax.Array:
    """How often the norm halves before it is below 1: a loop whose length depends on values."""

    def above(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[0] > 1.0

    norm = jax.lax.stop_gradient(jnp.sqrt((x**2).sum()))
    return jax.lax.while_loop(above, lambda carry: (carry[0] / 2, carry[1] + 1), (norm, jnp.int32(0)))[1]


def by_value(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    x = batch["x"]
    for layer in params["layers"]:
        y = x @ layer["w"]
        y = jax.lax.cond(y.sum() > 0, jnp.tanh, lambda y: jnp.sin(y) * 0.5, y)
        x = x + y / (1.0 + halvings(y))
    return (x**2).mean()


def sample() -> tuple[dict[str, Any], dict[str, Any]]:
    return jax.eval_shape(params), {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_loops_and_branches_that_depend_on_values_stay_whole(schedule: str) -> None:
    plan = plan_of(sw.capture(by_value, sample()), 2, schedule=schedule)
    train = sw.train_step(by_value, optax.adamw(1e-2), plan, devices=jax.devices()[:2], reduction="mean")
    state = train.init(params)
    expected = reference(by_value, params(), optax.adamw(1e-2), batches(3))
    losses = []
    for batch in batches(3):
        state, loss = train(state, batch)
        losses.append(float(loss))
    Comparison().losses(losses, expected.losses).require()
    whole = [e.primitive.name for part in train.pipeline.micro.cut.parts for e in part.equations]
    assert whole.count("while") == whole.count("cond") == LAYERS


def test_side_effects_without_an_order_run_once_for_every_microbatch() -> None:
    seen: list[float] = []

    def watched(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"])
            io_callback(lambda value: seen.append(float(value)), None, jax.lax.stop_gradient(x.sum()), ordered=False)
        return (x**2).mean()

    def silent(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"])
        return (x**2).mean()

    plan = plan_of(sw.capture(silent, sample()), 2)
    train = sw.train_step(watched, optax.sgd(0.1), plan, devices=jax.devices()[:2])
    batch = batches(1)[0]
    _, loss = train(train.init(params), batch)
    jax.block_until_ready(loss)
    jax.effects_barrier()
    x, expected = batch["x"].reshape(plan.microbatches, -1, WIDTH), []
    for part in x:
        for layer in params()["layers"]:
            part = np.tanh(part @ np.asarray(layer["w"]))
            expected.append(part.sum())
    Comparison().values(sorted(seen), sorted(expected), relative=1e-4, absolute=1e-5).require()


def test_a_parameter_that_the_captured_function_does_not_read() -> None:
    def with_spare() -> dict[str, Any]:
        return params() | {"spare": jnp.ones((3, 5))}

    given = jax.eval_shape(with_spare), sample()[1]
    plan = plan_of(sw.capture(by_value, given), 2)
    train = sw.train_step(by_value, optax.sgd(0.1), plan, devices=jax.devices()[:2], reduction="mean")
    with pytest.raises(sw.ShardwrightError, match=r"no stage uses parameter spare, \(3, 5\).*leave it out"):
        train.init(with_spare)


# --- what is kept from forward to backward


def test_what_cheap_arithmetic_makes_again_is_not_kept() -> None:
    """Of y = tanh(x · w) a derivative reads y and 1 - y: one of them follows from the other."""

    def run(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        y = jnp.tanh(x @ w)
        return y, 1.0 - y, jnp.broadcast_to(y.sum(), (50,)), w.astype(jnp.bfloat16), jnp.exp(y)

    x, w = jnp.ones((4, 6)), jnp.full((6, 3), 0.1)
    program = flatten(jax.make_jaxpr(run)(x, w))
    wanted = [atom for atom in program.outputs if isinstance(atom, int)]
    chosen = residuals(program, wanted)
    kept = {tuple(program.avals[value].shape) for value in chosen.kept}
    assert len(chosen.kept) == 3  # y, its sum, exp(y)
    assert kept == {(4, 3), ()}
    known = dict(zip(program.arguments, (x, w), strict=True)) | dict(program.constants)
    evaluate(program.equations, known)
    expected = [known[value] for value in wanted]
    again = {v: known[v] for v in (*chosen.kept, *program.arguments, *program.constants)}
    evaluate(chosen.remade, again)
    Comparison().equal([again[value] for value in wanted], expected).require()
