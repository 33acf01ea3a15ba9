"""Layers in a stack that a `lax.scan` goes over: stages hold their rows, and run their iterations."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import shardwright.jax as sw
from shardwright.backends.jax.state.ownership import Stack
from shardwright.core.errors import PlanError
from tests.comparison import Comparison
from tests.jax.chains import (
    BATCH,
    LENGTH,
    VOCABULARY,
    WIDTH,
    batches,
    module_reference,
    named,
    reference,
)
from tests.jax.chains import plan_of as plan_with

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYERS = 6


def plan_of(graph: sw.Graph, pp: int, dp: int = 1, tp: int = 1, **pins: Any) -> sw.Plan:
    """A plan that computes again what the model's own checkpoints do."""
    return plan_with(graph, pp, dp, tp, **({"recompute": "auto"} | pins))


def params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    normal = jax.random.normal
    layers = {
        "w": 0.3 * normal(keys[1], (LAYERS, WIDTH, WIDTH)),
        "b": jnp.zeros((LAYERS, WIDTH)),
        "out": 0.1 * normal(keys[2], (LAYERS, WIDTH, WIDTH)),
    }
    return {
        "embed": normal(keys[0], (VOCABULARY, WIDTH)),
        "layers": layers,
        "head": 0.3 * normal(keys[3], (WIDTH, VOCABULARY)),
    }


def loss_fn(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """A scan over checkpointed layers; every layer chooses by value between two functions."""

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        def run(x: jax.Array) -> jax.Array:
            y = x @ weights["w"] + weights["b"]
            return x + jax.lax.cond(y.sum() > 0, jnp.tanh, jnp.sin, y) @ weights["out"]

        return jax.checkpoint(run)(x), None

    x, _ = jax.lax.scan(layer, params["embed"][batch["x"]], params["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["y"]).mean()


SAMPLE = {name: jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32) for name in ("x", "y")}
OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2)),
    "every two": optax.MultiSteps(optax.adamw(1e-2), 2),  # branches by a count
    "lamb": optax.lamb(1e-2),  # takes norms of whole parameters, so of whole stacks
}


@pytest.fixture(scope="module")
def graph() -> sw.Graph:
    return sw.capture(loss_fn, (params(), SAMPLE))


@pytest.mark.parametrize(
    ("optimizer", "pp", "dp", "tp", "pins"),
    [
        pytest.param("adamw", 3, 1, 1, {}, marks=pytest.mark.slow),
        ("adamw", 4, 1, 1, {}),  # which do not divide the six layers
        ("every two", 2, 1, 1, {}),
        ("adamw", 4, 2, 1, {"shard": 1}),  # pieces of one row, which replicas cannot share, and of two, which they can
        pytest.param("lamb", 2, 2, 2, {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("adamw", 2, 1, 1, {"virtual_stages": 2, "schedule": "zbv"}, marks=pytest.mark.slow),
    ],
)
def test_a_stack_is_cut_into_its_layers(
    graph: sw.Graph, optimizer: str, pp: int, dp: int, tp: int, pins: dict[str, Any]
) -> None:
    plan = plan_of(graph, pp, dp, tp, **pins)
    train = sw.train_step(
        loss_fn, OPTIMIZERS[optimizer], plan, devices=jax.devices()[: plan.mesh.size], reduction="mean"
    )
    state = train.init(params)
    steps = batches(3)
    expected = reference(loss_fn, params(), OPTIMIZERS[optimizer], steps)
    losses = []
    for batch in steps:
        state, loss = train(state, batch)
        losses.append(float(loss))
    Comparison().losses(losses, expected.losses).require()
    after = train.params(state)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, params())
    Comparison(optimizer).values(named(after), expected.params, relative=1e-4, absolute=1e-5).require()


def test_a_state_of_other_rows_is_refused(graph: sw.Graph) -> None:
    first, second, alone = (
        sw.train_step(loss_fn, optax.adamw(1e-2), plan_of(graph, len(starts), stage_starts=starts),
                      devices=jax.devices()[: len(starts)], reduction="mean")
        for starts in ((0, 3), (0, 4), (0,))
    )  # fmt: skip
    saved = jax.device_get(first.init(params()))
    for refuse in (second.place, lambda state: second(state, batches(1)[0])):
        with pytest.raises(PlanError, match=r"of the state is float32\[\d, .* where one of this plan .*train\.params"):
            refuse(saved)
    with pytest.raises(PlanError):
        alone.place(saved)


def test_every_device_holds_its_rows_alone(graph: sw.Graph) -> None:
    plan = plan_of(graph, 3, stage_starts=(0, 3, 5))
    train = sw.train_step(loss_fn, optax.adamw(1e-2), plan, devices=jax.devices()[:3], reduction="mean")
    state, _ = train(train.init(params()), batches(1)[0])
    for tree in (state.params, state.optimizer[0].mu):
        stack = tree["layers"]["w"]
        assert isinstance(stack, Stack)
        assert [piece.shape for piece in stack.pieces] == [(2, WIDTH, WIDTH)] * 3
        assert [set(piece.devices()) for piece in stack.pieces] == [{device} for device in jax.devices()[:3]]


def test_casts_of_a_stack_follow_its_rows(graph: sw.Graph) -> None:
    plan = plan_of(graph, 2, precision="bf16")
    train = sw.train_step(loss_fn, optax.adamw(1e-2), plan, devices=jax.devices()[:2], reduction="mean")
    state, loss = train(train.init(params), batches(1)[0])
    exact = reference(loss_fn, params(), optax.adamw(1e-2), batches(1)).losses[0]
    assert 0 < abs(float(loss) - exact) < 2e-2 * exact
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.inner(x))


class Stacked(nnx.Module):
    """Layers made by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)

        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.layers = make(rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: Layer, x: jax.Array) -> jax.Array:
            return layer(x)

        return self.embed.attend(run(self.layers, self.embed(ids)))


def module_loss(model: Stacked, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def test_nnx_scan_over_layers() -> None:
    def create() -> Stacked:
        return Stacked(nnx.Rngs(0))

    graph = sw.capture(nnx.eval_shape(create), SAMPLE, module_loss)
    train = sw.train_step(
        module_loss, optax.adamw(1e-2), plan_of(graph, 2, stage_starts=(0, 3)), devices=jax.devices()[:2]
    )
    state = train.init(create)
    expected = module_reference(module_loss, create, optax.adamw(1e-2), batches(2))
    losses = []
    for batch in batches(2):
        state, loss = train(state, batch)
        losses.append(float(loss))
    Comparison().losses(losses, expected.losses).require()
    kernel = dict(nnx.to_flat_state(state.params))["layers", "inner", "kernel"].get_value()
    assert [piece.shape[0] for piece in kernel.pieces] == [2, 2]
    assert train.params(state).layers.inner.kernel.get_value().shape == (4, WIDTH, WIDTH)


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + jnp.tanh(linen.Dense(WIDTH, name="inner")(x)), None


class LinenStacked(linen.Module):
    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = linen.Embed(VOCABULARY, WIDTH, name="embed")
        layers = linen.scan(LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        x, _ = layers(name="layers")(embed(ids), None)
        return embed.attend(x)


@pytest.mark.slow
def test_linen_scan_over_layers() -> None:
    module = LinenStacked()
    variables = module.init(jax.random.key(0), jnp.zeros((2, LENGTH), jnp.int32))

    def loss(variables: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = module.apply(variables, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    graph = sw.capture(loss, (variables, SAMPLE))
    train = sw.train_step(loss, optax.adamw(1e-2), plan_of(graph, 2, stage_starts=(0, 3)), devices=jax.devices()[:2])
    state = train.init(variables)
    expected = reference(loss, variables, optax.adamw(1e-2), batches(2))
    losses = []
    for batch in batches(2):
        state, value = train(state, batch)
        losses.append(float(value))
    Comparison().losses(losses, expected.losses).require()
    kernel = state.params["params"]["layers"]["inner"]["kernel"]
    assert [piece.shape[0] for piece in kernel.pieces] == [2, 2]


def test_a_stack_that_is_read_outside_its_loop(graph: sw.Graph) -> None:
    def regularised(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        return loss_fn(params, batch) + 1e-3 * jnp.sum(jnp.cos(params["layers"]["w"]))

    train = sw.train_step(regularised, optax.sgd(0.1), plan_of(graph, 2), devices=jax.devices()[:2], reduction="mean")
    with pytest.raises(sw.ShardwrightError, match=r"holds rows \d to \d of layers\.w, .* reads the whole of it"):
        train(train.init(params), batches(1)[0])


def test_an_optimizer_that_mixes_layers(graph: sw.Graph) -> None:
    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g: jnp.cumsum(g, 0), gradients), state

    mixing = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    train = sw.train_step(loss_fn, mixing, plan_of(graph, 2), devices=jax.devices()[:2], reduction="mean")
    with pytest.raises(sw.ShardwrightError, match=r"mixes the layers of a stacked parameter.*cumsum"):
        train(train.init(params), batches(1)[0])


@pytest.mark.parametrize(
    ("pp", "dp", "pins"),
    [
        (3, 1, {}),
        pytest.param(2, 2, {"shard": 1, "virtual_stages": 2, "schedule": "interleaved-1f1b"}, marks=pytest.mark.slow),
    ],
)
def test_a_loop_from_the_last_layer_to_the_first(pp: int, dp: int, pins: dict[str, Any]) -> None:
    """The first stage holds the last rows. Layers differ in what they give the loss beside what they pass on."""

    def loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x = x + jnp.tanh(x @ weights["w"] + weights["b"]) @ weights["out"]
            return x, jnp.square(x).mean()

        x, squares = jax.lax.scan(layer, params["embed"][batch["x"]], params["layers"], reverse=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["y"])
        return losses.mean() + jnp.dot(squares, jnp.arange(1.0, LAYERS + 1))

    plan = plan_of(sw.capture(loss, (params(), SAMPLE)), pp, dp, **pins)
    steps, optimizer = batches(3), OPTIMIZERS["adamw"]
    expected = reference(loss, params(), optimizer, steps)
    train = sw.train_step(loss, optimizer, plan, devices=jax.devices()[: plan.mesh.size])
    state, losses = train.init(params() if dp == 1 else params), []
    for batch in steps:
        state, value = train(state, batch)
        losses.append(float(value))
    Comparison().losses(losses, expected.losses).require()
    Comparison().values(named(train.params(state)), expected.params, relative=1e-4, absolute=1e-5).require()
