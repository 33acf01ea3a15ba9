"""What users give a step by mistake is named before anything runs, and what may be given in several forms is taken."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardwright.jax as sw
from shardwright.backends.jax.state.shardings import batch_sharding, put
from shardwright.core.errors import CaptureError, PlanError
from tests.comparison import Comparison
from tests.jax.chains import plan_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDTH, BATCH = 4, 16


def params() -> dict[str, jax.Array]:
    return {f"w{number}": jax.random.normal(jax.random.key(number), (WIDTH, WIDTH)) / 2 for number in range(2)}


def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    x = batch["x"]
    for weight in params.values():
        x = x + jnp.tanh(x @ weight)
    return (x**2).mean()


BATCHES = [{"x": np.random.default_rng(step).standard_normal((BATCH, WIDTH)).astype(np.float32)} for step in range(3)]


@pytest.fixture(scope="module")
def graph() -> sw.Graph:
    return sw.capture(loss, (jax.eval_shape(params), BATCHES[0]))


def training(
    graph: sw.Graph, pp: int, run: Callable[..., Any] = loss, optimizer: Any = None, dp: int = 1, wrt: Any = None,
    **pins: Any,
) -> sw.TrainStep:  # fmt: skip
    plan = plan_of(graph, pp, dp, **pins)
    return sw.train_step(run, optimizer or optax.sgd(0.1), plan, devices=jax.devices()[: pp * dp], wrt=wrt)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda value: {"loss": value}, "a loss that is a dict"),
        (lambda value: None, "a loss that is None"),
        (lambda value: (value, {"accuracy": value}), r"could be its weight or a metric.*sw\.weighted"),
        (lambda value: (value > 0).astype(jnp.int32), "a loss of int32"),
    ],
)
def test_what_is_no_loss(graph: sw.Graph, pp: int, returned: Callable[[jax.Array], Any], message: str) -> None:
    train = training(graph, pp, lambda params, batch: returned(loss(params, batch)))
    with pytest.raises(PlanError, match=message):
        train(train.init(params()), BATCHES[0])


@pytest.mark.parametrize("pp", [1, 2])
def test_what_is_no_state_batch_or_parameter(graph: sw.Graph, pp: int) -> None:
    train = training(graph, pp)
    with pytest.raises(PlanError, match=r"a dict was given where a step takes the state that train\.init made"):
        train(params(), BATCHES[0])  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"scale is a float: give arrays \(numpy\.asarray\)"):
        train(train.init(params()), {**BATCHES[0], "scale": 2.0})
    with pytest.raises(PlanError, match="parameter w0 is int32, which has no gradient"):
        train.init({**params(), "w0": jnp.zeros((WIDTH, WIDTH), jnp.int32)})


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"plan": None}, r"^plan is None: give what sw\.plan"),
        ({"plan": "plan.json"}, r"^plan is 'plan\.json': give what sw\.plan or sw\.Plan\.load"),
        ({"loss_fn": 3.0}, r"^loss_fn is 3\.0: give a function"),
        ({"devices": 2}, r"^devices is 2: give a list"),
        ({"devices": "cpu"}, r"^devices is 'cpu': give a list"),
        ({"devices": ["cpu:0", "cpu:1"]}, r"^devices holds 'cpu:0': give JAX's devices"),
        ({"batch_dims": "x"}, r"^batch_dims gives x 'x': expected the number"),
        ({"batch_dims": {"x": 0.5}}, r"^batch_dims gives x 0\.5: expected the number"),
        ({"batch_dims": True}, r"^batch_dims gives x True: expected the number"),
        ({"batch": BATCHES[0] | {7: BATCHES[0]["x"]}}, r"^the sample has a dict whose keys cannot be sorted"),
        ({"batch": {"x": BATCHES[0]["x"].astype(object)}}, r"^x is an array of object: give arrays of numbers"),
        ({"params": {"w0": np.ones(WIDTH), 1: np.ones(WIDTH)}}, r"^the model or its state has a dict whose keys"),
        ({"params": {"w0": 1, "w1": 2}}, r"^parameter w0 is int, which has no gradient"),
    ],
)
def test_what_is_of_another_type(graph: sw.Graph, pp: int, given: dict[str, Any], message: str) -> None:
    plan, state = plan_of(graph, pp, 1), params()
    named = {"loss_fn": loss, "optimizer": optax.sgd(0.1), "plan": plan, "devices": jax.devices()[:pp]} | given
    batch, state = named.pop("batch", BATCHES[0]), named.pop("params", state)

    def run() -> None:
        train = sw.train_step(**named)
        train(train.init(state), batch)

    with pytest.raises(sw.ShardwrightError, match=message):
        run()


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_batch_on_a_mesh_or_device_of_the_users(graph: sw.Graph, axis_type: AxisType, pp: int) -> None:
    train = training(graph, pp)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    _, given = train(train.init(params()), BATCHES[0])
    for at in (NamedSharding(mesh, PartitionSpec("data")), jax.devices()[5]):
        _, found = train(train.init(params()), jax.device_put(BATCHES[0], at))
        assert float(found) == float(given)


def test_a_batch_that_lies_right_is_not_copied() -> None:
    mesh = jax.make_mesh((2,), ("dp",))
    placed = jax.device_put(BATCHES[0]["x"], batch_sharding(mesh, 0))
    assert put(placed, batch_sharding(mesh, 0)) is placed
    assert put(BATCHES[0]["x"], batch_sharding(mesh, 0)) is BATCHES[0]["x"]
    moved = put(placed, batch_sharding(mesh, 1))
    assert [shard.data.shape for shard in moved.addressable_shards] == [(BATCH, WIDTH // 2)] * 2
    Comparison().equal(moved, placed).require()


@pytest.mark.parametrize(("of", "pp", "dp"), [((1, 1), 2, 1), ((1, 4), 1, 2)])
def test_a_state_of_another_plan(graph: sw.Graph, of: tuple[int, int], pp: int, dp: int) -> None:
    """Shards of the parameters over other devices; whole ones `jax.jit` moves by itself."""
    train = training(graph, pp, dp=dp, shard=3)
    state = training(graph, of[0], dp=of[1], shard=3).init(params())
    for _ in range(2):  # before the step is compiled, and after
        with pytest.raises(PlanError, match=r"another plan's.* train\.place\(state\)") as error:
            train(state, BATCHES[0])
        places = re.search(r"is on (cpu:.*) as .* where this plan keeps it on (cpu:.*) as ", str(error.value))
        assert places
        assert places[1] != places[2]
        _, expected = train(train.init(params()), BATCHES[0])
    _, found = train(train.place(state), BATCHES[0])
    assert float(found) == float(expected)


@pytest.mark.parametrize("optimizer", [None, optax.adam, optax.MultiSteps])
def test_what_is_no_optimizer(graph: sw.Graph, optimizer: Any) -> None:
    with pytest.raises(PlanError, match=r"optimizer is .*: give an optax transformation"):
        sw.train_step(loss, optimizer, plan_of(graph, 1), devices=jax.devices()[:1])


@pytest.mark.parametrize("pp", [1, 2])
def test_a_step_inside_a_program(graph: sw.Graph, pp: int) -> None:
    train = training(graph, pp)
    with pytest.raises(PlanError, match=r"it compiles itself; call it outside"):
        jax.jit(train)(train.init(params()), BATCHES[0])


@pytest.mark.parametrize("pp", [1, 2])
def test_an_optimizer_that_follows_the_loss(graph: sw.Graph, pp: int) -> None:
    optimizer = optax.polyak_sgd()
    train = training(graph, pp, optimizer=optimizer)
    state, expected = train.init(params()), params()
    kept = optimizer.init(expected)
    for batch in BATCHES:
        state, _ = train(state, batch)
        value, gradients = jax.value_and_grad(loss)(expected, batch)
        updates, kept = optimizer.update(gradients, kept, expected, value=value)
        expected = optax.apply_updates(expected, updates)
    Comparison().values(train.params(state), expected, relative=1e-4, absolute=1e-6).require()


@jax.tree_util.register_dataclass
@dataclass
class Stack:
    """A pytree that can be called, as the modules of Equinox are."""

    w0: Any
    w1: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        for weight in (self.w0, self.w1):
            x = x + jnp.tanh(x @ weight)
        return x


@pytest.mark.parametrize("pp", [1, 2])
def test_parameters_that_can_be_called(pp: int) -> None:
    def run(model: Stack, batch: dict[str, jax.Array]) -> jax.Array:
        return (model(batch["x"]) ** 2).mean()

    graph = sw.capture(run, (Stack(**params()), BATCHES[0]))
    train = training(graph, pp, run, wrt=Stack(False, True))
    state = train.init(Stack(**params()))
    state, found = train(state, BATCHES[0])
    after = train.params(state, at=jax.devices()[0])
    assert isinstance(after, Stack)
    same = Comparison().losses([float(found)], [float(loss(params(), BATCHES[0]))]).equal(after.w0, params()["w0"])
    moved = params()["w1"] - 0.1 * jax.grad(run)(Stack(**params()), BATCHES[0]).w1
    same.values(after.w1, moved, relative=1e-5, absolute=1e-6).require()


def test_what_is_among_parameters_and_no_array() -> None:
    with pytest.raises(CaptureError, match=r"w1 is among the parameters.*custom_jvp.*equinox\.partition"):
        sw.capture(lambda model, batch: model(batch["x"]).mean(), (Stack(params()["w0"], jax.nn.relu), BATCHES[0]))
    with pytest.raises(CaptureError, match=r"a Stack is a pytree of parameters: capture the loss function"):
        sw.capture(Stack(**params()), BATCHES[0])


class Tabled(nnx.Module):
    """Holds an array that is no variable, as tables of positions are."""

    def __init__(self) -> None:
        self.table = jnp.linspace(0.0, 1.0, WIDTH)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(number)) for number in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x + self.table))
        return x


@pytest.mark.parametrize("pp", [1, 2])
def test_a_module_that_holds_plain_arrays(pp: int) -> None:
    def run(model: Tabled, batch: dict[str, jax.Array]) -> jax.Array:
        return (model(batch["x"]) ** 2).mean()

    train = training(sw.capture(Tabled(), BATCHES[0], run), pp, run)
    _, found = train(train.init(Tabled()), BATCHES[0])
    Comparison().losses([float(found)], [float(run(Tabled(), BATCHES[0]))]).require()
