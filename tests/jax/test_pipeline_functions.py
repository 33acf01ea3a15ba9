"""Plain functions in pipelines, however their parameters are named."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright.jax as sw
from tests.comparison import Comparison
from tests.jax.chains import named, plan_of, recording, reference, require_same_run

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYERS, WIDTH, BATCH = 4, 8, 16


def layer(number: int) -> dict[str, jax.Array]:
    weight = jax.random.normal(jax.random.key(number), (WIDTH, WIDTH)) / WIDTH**0.5
    return {"w": weight, "b": jnp.zeros(WIDTH)}


def numbered() -> dict[str, Any]:
    return {f"layer_{number}": layer(number) for number in range(LAYERS)}


def arrays() -> dict[str, Any]:
    return {"layers": [layer(number)["w"] for number in range(LAYERS)]}


def flat() -> dict[str, Any]:
    return {f"w{number}": layer(number)["w"] for number in range(LAYERS)}


def loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """Layer after layer, a layer being arrays with or without a bias."""
    x = batch["x"]
    for one in params["layers"] if "layers" in params else params.values():
        x = x + jnp.tanh(x @ one["w"] + one["b"] if isinstance(one, dict) else x @ one)
    return (x**2).mean()


@pytest.mark.parametrize("create", [numbered, arrays, flat])
def test_layers_are_told_by_their_names(create: Any) -> None:
    rng = np.random.default_rng(0)
    steps = [{"x": rng.standard_normal((BATCH, WIDTH)).astype(np.float32)} for _ in range(3)]
    graph = sw.capture(loss, (jax.eval_shape(create), {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)}))
    matrices = {"mask": lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)}
    rate = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(rate, weight_decay=0.1, **matrices))
    train = sw.train_step(loss, recording(optimizer), plan_of(graph, LAYERS), devices=jax.devices()[:LAYERS])
    expected = reference(loss, create(), optimizer, steps)
    state = require_same_run(train, train.init(create), expected, steps)
    Comparison().values(named(train.params(state)), expected.params, relative=1e-4, absolute=1e-6).require()
    held = [len(array.devices()) for array in jax.tree.leaves(state.params)]
    assert held == [1] * len(held)
    assert {device for array in jax.tree.leaves(state.params) for device in array.devices()} == set(jax.devices()[:4])
