"""Entries of a plain function's state that depend on each other: each lies on one stage, whatever reads or makes it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import shardwright.jax as sw
from shardwright.core.errors import PlanError
from tests.comparison import Comparison
from tests.jax.chains import BATCH, VOCABULARY, WIDTH, batches, named, plan_of, recording

pytestmark = pytest.mark.usefixtures("quick_compilation")

Values = dict[str, Any]
MICROBATCHES = 8


def params() -> Values:
    keys = jax.random.split(jax.random.key(0), 5)
    layers = [{"w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5} for key in keys[1:]]
    return {"embed": jax.random.normal(keys[0], (VOCABULARY, WIDTH)), "layers": layers}


def model(params: Values, batch: Values, shift: Any = 0.0, scale: Any = 1.0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What enters the first layer, ``shift`` added; what leaves the last; the loss, of logits times ``scale``."""
    first = x = params["embed"][batch["x"]] + shift
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"])
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T * scale, batch["y"])
    return jax.lax.stop_gradient(first), jax.lax.stop_gradient(x), losses.mean()


def shifted(params: Values, batch: Values, state: Values) -> tuple[jax.Array, Values]:
    _, x, loss = model(params, batch)
    return loss, {"a": state["b"], "b": x.mean(), "c": state["a"]}


def swapped(params: Values, batch: Values, state: Values) -> tuple[jax.Array, Values]:
    *_, loss = model(params, batch, scale=1 + state["a"])
    return loss, {"a": state["b"], "b": state["a"] * 0.9, "c": state["c"] + state["b"]}


def counting(params: Values, batch: Values, state: Values) -> tuple[jax.Array, Values]:
    """A sum that is made once, for the last stage and for an entry that only the last stage reads."""
    counts = jnp.cumsum((batch["y"] > 5).astype(jnp.float32), axis=1)
    *_, loss = model(params, batch, scale=1 + 0.1 * counts[..., None] + 0.01 * state["a"])
    return loss, state | {"a": state["a"] + (counts > 1).sum().astype(jnp.float32), "b": counts.max()}


def joined(params: Values, batch: Values, state: Values) -> tuple[jax.Array, Values]:
    """What two stages read apart, and an entry that becomes the sum."""
    p, q = state["a"] * 0.9, state["b"] * 0.9
    *_, loss = model(params, batch, p, 1 + q)
    return loss, {"a": p, "b": q, "c": p + q}


def annealed(params: Values, batch: Values, state: Values) -> tuple[jax.Array, Values]:
    *_, loss = model(params, batch, scale=1 / state["b"])
    return loss, state | {"b": jnp.maximum(0.99 * state["b"], 0.1), "c": 2.0}


def debiased(params: Values, batch: Values, state: Values) -> tuple[jax.Array, Values]:
    """A count that two stages' means read."""
    rate = 1 / (1 + state["c"])
    first, x, loss = model(params, batch)
    a, b = ((1 - rate) * state[name] + rate * value.mean() for name, value in (("a", first), ("b", x)))
    return loss, {"a": a, "b": b, "c": state["c"] + 1}


def early(params: Values, batch: Values, state: Values) -> tuple[jax.Array, Values]:
    """The first stage reads an entry, the last what it becomes."""
    after = 0.5 * (0.9 * state["a"] + 0.1)
    *_, loss = model(params, batch, state["a"], 1 + after)
    return loss, state | {"a": after}


CASES = [shifted, swapped, counting, joined, annealed, debiased, early]


def start() -> Values:
    return {"a": jnp.float32(0.3), "b": jnp.float32(0.7), "c": jnp.float32(0.0)}


def by_keyword(case: Callable[..., Any]) -> Callable[..., Any]:
    def loss(params: Values, batch: Values, *, state: Values) -> tuple[jax.Array, Values]:
        return case(params, batch, state)  # type: ignore[no-any-return]

    return loss


def train_of(case: Callable[..., Any], optimizer: optax.GradientTransformation) -> sw.TrainStep:
    shape = jax.ShapeDtypeStruct((BATCH, 6), jnp.int32)
    sample = jax.eval_shape(params), {"x": shape, "y": shape}
    graph = sw.capture(lambda params, batch: case(params, batch, start())[0], sample)
    return sw.train_step(by_keyword(case), optimizer, plan_of(graph, 2), devices=jax.devices()[:2])


@pytest.mark.parametrize("case", CASES)
def test_the_state_is_what_it_is_unsplit(case: Callable[..., Any]) -> None:
    train = train_of(case, recording(optax.sgd(0.1)))
    state = train.init(params(), state=start())
    gradient = jax.jit(jax.value_and_grad(case, has_aux=True))
    expected, kept = params(), start()
    for batch in batches(2):
        state, loss = train(state, batch)
        total_loss, total = 0.0, jax.tree.map(jnp.zeros_like, expected)
        for row in range(0, BATCH, BATCH // MICROBATCHES):
            part = {name: value[row : row + BATCH // MICROBATCHES] for name, value in batch.items()}
            (value, kept), found = gradient(expected, part, kept)
            total_loss += float(value)
            total = jax.tree.map(jnp.add, total, found)
        mean = jax.tree.map(lambda g: g / MICROBATCHES, total)
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, mean)
        same = Comparison().losses(float(loss), total_loss / MICROBATCHES)
        same.values(state.other, kept, relative=1e-4, absolute=0.0, what="state")
        same.gradients(named(state.optimizer[1]), named(mean)).require()


def test_what_no_place_serves_is_named() -> None:
    """The first stage reads an entry that becomes what the last one makes, by way of another entry."""

    def crossing(params: Values, batch: Values, state: Values) -> tuple[jax.Array, Values]:
        _, x, loss = model(params, batch, shift=state["a"])
        return loss, {"a": state["b"], "b": x.mean(), "c": state["c"]}

    train = train_of(crossing, optax.sgd(0.1))
    with pytest.raises(PlanError, match=r"state b, \(\), is read on stages \[0\] and written on stage 1.*one block"):
        train(train.init(params(), state=start()), batches(1)[0])
