"""Gradients of one microbatch whose backward runs in turn: those of `jax.grad`, whatever the function is made of."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from shardwright.backends.jax.loss.gradients_in_turn import gradients_in_turn
from tests.comparison import Comparison

WIDTH = 8


def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.nn.relu((x @ weight) * jnp.tanh(x))


def again(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.checkpoint(plain)(x, weight)


def looped(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ weight), carry.sum()), x, length=3)[0]


def masked(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x @ weight, 0.0)


LAYERS = plain, again, looped, masked
CASES = [(plain, False, False), *((layer, apart, not apart) for layer in LAYERS for apart in (False, True))]


@pytest.mark.parametrize(("layer", "is_apart", "donated"), CASES)
def test_gradients_are_those_of_jax(layer: Any, is_apart: bool, donated: bool) -> None:
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) for _ in range(3)]
    unused = jnp.ones(3)
    x, sums = jnp.asarray(rng.normal(size=(5, WIDTH)), jnp.float32), [jnp.ones_like(w) for w in (*weights, unused)]

    def total(params: list[jax.Array], x: jax.Array) -> Any:
        for weight in (*params[:3], params[0]):  # the first weight has two uses
            x = layer(x, weight)
        return (x**2).mean(), (x.sum(), {"mean": x.mean()})

    def run(params: list[jax.Array], x: jax.Array) -> Any:
        added = [lambda new, old=old: old + new for old in sums]
        apart = (lambda leaves: jax.lax.optimization_barrier(list(leaves))) if is_apart else None
        doubled = lambda leaves: [2 * leaf for leaf in leaves]  # noqa: E731
        return gradients_in_turn(total, params, (x,), added, copied=doubled, apart=apart, donated=donated)

    params = [*weights, unused]
    beside, found = jax.jit(run)(params, x)
    (_, wanted_beside), wanted = jax.value_and_grad(total, has_aux=True)([2 * p for p in params], x)
    compared = Comparison()
    compared.values(found, [old + new for old, new in zip(sums, wanted, strict=True)], relative=1e-5, absolute=1e-6)
    compared.values(jax.tree.leaves(beside), jax.tree.leaves(wanted_beside), relative=1e-5, absolute=1e-6)
    compared.require()


class Convolved(nnx.Module):
    """A convolution, the norm of its batch and a ReLU, six times."""

    def __init__(self, rngs: nnx.Rngs):
        sizes = [3, *[8] * 6]
        self.convs = nnx.List([nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in pairwise(sizes)])
        self.norms = nnx.List([nnx.BatchNorm(b, rngs=rngs) for b in sizes[1:]])

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = jax.nn.relu(norm(conv(x)))
        return x


def test_gradients_of_convolutions_are_not_left_for_the_end() -> None:
    """Each waits for the product before the one that it could be run beside, and what it reads is freed with it: left
    for the end, they hold two values a layer, and the step takes twice as much."""

    def loss(model: Convolved, batch: dict[str, jax.Array]) -> jax.Array:
        return (model(batch["x"]) ** 2).mean()

    batch = {"x": jnp.ones((16, 32, 32, 3))}
    graph = sw.capture(nnx.eval_shape(lambda: Convolved(nnx.Rngs(0))), batch, loss)
    one = sw.Cluster("cpu", devices_per_node=1)
    plan = sw.plan(graph, one, batch=16, microbatch=16, precision="fp32", recompute="none", loss_scope="replica")
    train = sw.train_step(loss, optax.sgd(1e-3), plan, devices=jax.devices()[:1], log_every=0)
    (peak,) = train.memory_bytes(train.init(lambda: Convolved(nnx.Rngs(0))), batch)
    assert 0.97 <= plan.predicted.peak_memory_bytes[0] / peak <= 1.1
