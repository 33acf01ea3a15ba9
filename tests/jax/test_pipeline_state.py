"""State of the model in a pipeline: read and written by the stage that uses it, or only read, by any."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from shardwright.core.errors import PlanError
from tests.comparison import Comparison
from tests.jax.chains import BATCH, VOCABULARY, WIDTH, Chain, batches, graph_of, plain_loss, plan_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYERS = 4


class Fixed(nnx.Variable):
    """Neither a parameter nor changed by the model."""


class Scaled(Chain):
    """A chain whose blocks all read one array that nothing changes."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(4, rngs)
        self.scale = Fixed(jnp.linspace(0.5, 1.5, WIDTH))

    def __call__(self, ids: jax.Array) -> jax.Array:
        first = x = self.embed(ids)
        for block in self.blocks:
            x = block(x, first) * self.scale.get_value()
        return self.embed.attend(self.norm(x))


def losses_of(train: sw.TrainStep, state: sw.TrainState, steps: int) -> tuple[list[float], sw.TrainState]:
    losses = []
    for batch in batches(steps):
        state, loss = train(state, batch)
        losses.append(float(loss))
    return losses, state


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_what_nothing_changes_is_read_by_every_stage(pp: int, dp: int) -> None:
    def create() -> Scaled:
        return Scaled(nnx.Rngs(1))

    graph = graph_of(create)
    train = sw.train_step(plain_loss, optax.adamw(1e-2), plan_of(graph, pp, dp), devices=jax.devices()[: pp * dp])
    alone = sw.train_step(plain_loss, optax.adamw(1e-2), plan_of(graph, 1, dp), devices=jax.devices()[:dp])
    found, state = losses_of(train, train.init(create), 3)
    Comparison().losses(found, losses_of(alone, alone.init(create), 3)[0]).require()
    together = train.params(state, at=jax.devices()[0])
    Comparison().equal(together.scale.get_value(), jnp.linspace(0.5, 1.5, WIDTH)).require()
    assert together(batches(1)[0]["x"]).devices() == {jax.devices()[0]}


def params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    layers = [{"w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5} for key in keys[1:]]
    return {"embed": jax.random.normal(keys[0], (VOCABULARY, WIDTH)), "layers": layers}


START = {"seen": jnp.int32(0), "mean": jnp.float32(0), "first": jnp.float32(0)}


def averaging(params: Any, batch: Any, *, state: Any) -> Any:
    """Running means of what enters the first layer and of what leaves the last, and a count."""
    first = x = params["embed"][batch["x"]]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"])
    logits = x @ params["embed"].T
    after = {
        "seen": state["seen"] + 1,
        "mean": 0.9 * state["mean"] + 0.1 * jax.lax.stop_gradient(x).mean(),
        "first": 0.9 * state["first"] + 0.1 * jax.lax.stop_gradient(first).mean(),
    }
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, after


def sample() -> Any:
    shape = jax.ShapeDtypeStruct((BATCH, 6), jnp.int32)
    return jax.eval_shape(params), {"x": shape, "y": shape}


def test_a_plain_functions_state_is_kept_where_it_is_made() -> None:
    graph = sw.capture(lambda params, batch: averaging(params, batch, state=START)[0], sample())
    train = sw.train_step(averaging, optax.sgd(0.0), plan_of(graph, 4), devices=jax.devices()[:4])
    state = train.init(params(), state=START)
    expected: Any = START
    for batch in batches(2):
        state, _ = train(state, batch)
        for start in range(0, BATCH, 2):
            part = {name: value[start : start + 2] for name, value in batch.items()}
            expected = averaging(params(), part, state=expected)[1]
    assert int(state.other["seen"]) == BATCH
    Comparison().values(state.other, expected, relative=1e-5, absolute=0.0).require()
    assert state.other["mean"].devices() != state.other["first"].devices()


def test_state_that_one_stage_reads_and_another_writes() -> None:
    def crossing(params: Any, batch: Any, *, state: Any) -> Any:
        x = params["embed"][batch["x"]] + state["mean"]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["w"])
        loss = optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, batch["y"]).mean()
        return loss, {"mean": jax.lax.stop_gradient(x).mean()}

    start = {"mean": jnp.float32(0)}
    graph = sw.capture(lambda params, batch: crossing(params, batch, state=start)[0], sample())
    train = sw.train_step(crossing, optax.sgd(0.1), plan_of(graph, 2), devices=jax.devices()[:2])
    with pytest.raises(PlanError, match=r"read on stages \[0\] and written on stage 1.*inside one block"):
        train(train.init(params(), state=start), batches(1)[0])


@pytest.mark.parametrize("pp", [1, 2])
def test_a_state_from_the_hosts_memory(pp: int) -> None:
    """Saved with jax.device_get: it goes back to the devices of its stages first."""
    graph = graph_of(lambda: Chain(2, nnx.Rngs(1)))
    train = sw.train_step(plain_loss, optax.adamw(1e-2), plan_of(graph, pp), devices=jax.devices()[:pp])
    start = train.init(lambda: Chain(2, nnx.Rngs(1)))
    places = jax.tree.map(lambda leaf: leaf.sharding, start)
    saved = jax.device_get(start)
    expected, _ = losses_of(train, start, 2)
    if pp > 1:
        with pytest.raises(PlanError, match=r"in the host's memory.*train\.place\(state"):
            train(saved, batches(1)[0])
    placed = train.place(saved)
    assert jax.tree.map(lambda leaf: leaf.sharding, placed) == places
    Comparison().equal(losses_of(train, placed, 2)[0], expected).require()
    Comparison().equal(losses_of(train, train.place(saved), 2)[0], expected).require()  # what was saved is untouched


def test_a_state_of_another_plan_is_not_placed() -> None:
    graph = graph_of(lambda: Chain(2, nnx.Rngs(1)))
    trains = [
        sw.train_step(plain_loss, optimizer, plan_of(graph, 2), devices=jax.devices()[:2])
        for optimizer in (optax.adamw(1e-2), optax.sgd(1e-2))
    ]
    with pytest.raises(PlanError, match=r"the state has \d+ arrays where one of this plan and optimizer has 0"):
        trains[1].place(trains[0].init(lambda: Chain(2, nnx.Rngs(1))))
