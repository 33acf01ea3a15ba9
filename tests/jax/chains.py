"""Small chains of blocks for the tests of pipelines: quick to compile, with a skip, a tied weight and unlike ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardwright.jax as sw
from shardwright.backends.jax.capture.tree import dotted
from shardwright.core.model.graph import Graph
from tests.comparison import Comparison

WIDTH, VOCABULARY, LENGTH, BATCH = 8, 12, 6, 16


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, first: jax.Array) -> jax.Array:
        return x + self.drop(self.down(jnp.tanh(self.up(x + 0.1 * first))))


class Chain(nnx.Module):
    """Token ids [batch, length] → logits; what enters the first block is read by every block, and the head is the
    embedding."""

    def __init__(self, blocks: int, rngs: nnx.Rngs, dropout: float = 0.0):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, dropout) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        first = x = self.embed(ids)
        for block in self.blocks:
            x = block(x, first)
        return self.embed.attend(self.norm(x))


def loss_fn(model: Chain, batch: dict[str, jax.Array]) -> sw.Weighted:
    """Tokens below a bound count, so microbatches weigh differently."""
    counted = (batch["y"] < VOCABULARY // 2).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return sw.weighted((losses * counted).sum() / counted.sum(), counted.sum())


def plain_loss(model: Chain, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


@cache
def maker(blocks: int, dropout: float = 0.0) -> Callable[[], Chain]:
    return lambda: Chain(blocks, nnx.Rngs(1), dropout)


@cache
def graph_of(create: Callable[[], nnx.Module], loss: Callable[..., Any] = plain_loss) -> Graph:
    sample = {name: jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32) for name in ("x", "y")}
    return sw.capture(nnx.eval_shape(create), sample, loss)


def batches(steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{name: rng.integers(0, VOCABULARY, (BATCH, LENGTH), np.int32) for name in ("x", "y")} for _ in range(steps)]


def plan_of(graph: Graph, pp: int, dp: int = 1, tp: int = 1, batch: int = BATCH, **pins: Any) -> sw.Plan:
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=pp * dp * tp)
    given: dict[str, Any] = {"microbatch": 2, "precision": "fp32", "recompute": "none", "shard": 0,
                             "loss_scope": "replica"}  # fmt: skip
    given |= {"schedule": "1f1b", "virtual_stages": 1} | pins
    return sw.plan(graph, cluster, batch=batch, pp=pp, dp=dp, tp=tp, **given)


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with the gradients of the last step as the second half of its state."""

    def init(params: Any) -> Any:
        return optimizer.init(params), jax.tree.map(jnp.zeros_like, params)

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        updates, inner = optimizer.update(gradients, state[0], params)
        return updates, (inner, gradients)

    return optax.GradientTransformation(init, update)


def named(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a tree of parameters by name."""
    if isinstance(tree, nnx.State):
        return {dotted(path): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(tree)}
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in flat}


@dataclass(frozen=True)
class Run:
    """What a run of the unsplit model gave: losses, the gradients of the first step, the parameters at the end."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    params: dict[str, np.ndarray]


def reference(
    loss: Callable[..., Any],
    params: Any,
    optimizer: optax.GradientTransformation,
    steps: Sequence[dict[str, np.ndarray]],
    microbatch: int = 2,
) -> Run:
    """The unsplit model on one device, written with nothing of Shardwright: microbatch after microbatch, losses
    combined by weight. ``loss(params, batch)`` takes a pytree of parameters."""

    def total(params: Any, batch: Any) -> Any:
        found = loss(params, batch)
        value, weight = (found.value, found.weight) if isinstance(found, sw.Weighted) else (found, jnp.float32(1))
        return value * weight, weight

    gradient = jax.jit(jax.value_and_grad(total, has_aux=True))
    update = jax.jit(optimizer.update)
    state, losses, first = optimizer.init(params), [], None
    for batch in steps:
        size = len(next(iter(batch.values())))
        loss_sum = weight_sum = 0.0
        summed = jax.tree.map(jnp.zeros_like, params)
        for start in range(0, size, microbatch):
            part = {key: value[start : start + microbatch] for key, value in batch.items()}
            (value, weight), found = gradient(params, part)
            loss_sum, weight_sum = loss_sum + float(value), weight_sum + float(weight)
            summed = jax.tree.map(jnp.add, summed, found)
        mean = jax.tree.map(lambda g, w=weight_sum: g / w, summed)
        first = first or named(mean)
        updates, state = update(mean, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(loss_sum / weight_sum)
    return Run(losses, first or {}, named(params))


def module_reference(
    loss: Callable[..., Any],
    create: Callable[[], nnx.Module],
    optimizer: optax.GradientTransformation,
    steps: Sequence[dict[str, np.ndarray]],
    microbatch: int = 2,
) -> Run:
    """`reference` of an NNX model."""
    graphdef, params, rest = nnx.split(create(), nnx.Param, ...)

    def run(p: Any, batch: Any) -> Any:  # NNX refuses to change variables that were made outside a transformation
        return loss(nnx.merge(graphdef, p, jax.tree.map(lambda leaf: leaf, rest)), batch)

    return reference(run, params, optimizer, steps, microbatch)


def require_same_gradients(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """‖g − g_ref‖ ≤ 1e-4 · ‖g_ref‖ + 1e-6 · ‖all g_ref‖ for every tensor."""
    Comparison().gradients(found, expected).require()


def require_same_run(
    train: sw.TrainStep, state: sw.TrainState, expected: Run, steps: Sequence[dict[str, np.ndarray]]
) -> sw.TrainState:
    """Losses 1e-5 relative in every step, gradients of the first step; the optimizer is a `recording` one."""
    losses = []
    for batch in steps:
        state, loss = train(state, batch)
        if not losses:
            require_same_gradients(named(state.optimizer[1]), expected.gradients)
        losses.append(float(loss))
    Comparison().losses(losses, expected.losses, moving=1e-4 if len(steps) > 1 else None).require()
    return state
