"""NaN and infinity in losses and gradients: told with the step, the stage and the microbatch; what was good stays."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from shardwright.core.errors import NonFiniteError
from shardwright.core.schedule.actions import Kind
from tests.comparison import Comparison

pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDTH, BATCH = 4, 8
Function = Callable[[jax.Array], jax.Array]


class Part(nnx.Module):
    def __init__(self, function: Function, rngs: nnx.Rngs):
        self.linear, self.function = nnx.Linear(WIDTH, WIDTH, rngs=rngs), function

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(self.linear(x))


class Model(nnx.Module):
    """The second part does what a test wants, the others something harmless."""

    def __init__(self, function: Function):
        rngs = nnx.Rngs(0)
        self.parts = nnx.List([Part(f, rngs) for f in (jnp.tanh, function, jnp.tanh)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for part in self.parts:
            x = part(x)
        return x


def loss_fn(model: Model, batch: jax.Array) -> jax.Array:
    return jnp.square(model(batch)).mean()


def halved(x: jax.Array) -> jax.Array:
    """Its values are finite, and the gradient at zero is not."""
    return jnp.sqrt(jnp.abs(x * 0.0))


def divided(x: jax.Array) -> jax.Array:
    return x / (x - x)


def masked(x: jax.Array) -> jax.Array:
    """An infinity that is meant, as in attention's masks."""
    return jax.nn.softmax(jnp.where(jnp.arange(WIDTH) == 0, -jnp.inf, x))


@cache
def plan_of(pp: int, dp: int = 1) -> sw.Plan:
    """Part 0, then parts 1 and 2, where there are two stages."""
    graph = sw.capture(
        nnx.eval_shape(lambda: Model(jnp.tanh)), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32), loss_fn
    )
    stages = {"schedule": "1f1b", "virtual_stages": 1, "stage_starts": (0, 1)} if pp > 1 else {}
    return sw.plan(
        graph, sw.Cluster("cpu", devices_per_node=pp * dp), batch=BATCH, pp=pp, dp=dp, tp=1, microbatch=2 // dp,
        precision="fp32", recompute="none", shard=0, **stages,
    )  # fmt: skip


def begin(function: Function, pp: int = 1, dp: int = 1, **options: Any) -> tuple[sw.TrainStep, sw.TrainState]:
    plan = plan_of(pp, dp)
    train = sw.train_step(loss_fn, optax.adam(1e-2), plan, devices=jax.devices()[: pp * dp], **options)
    return train, train.init(Model(function))


def batch(bad: int | None = None) -> np.ndarray:
    """Two samples for each of four microbatches; all that is in microbatch ``bad`` is NaN."""
    given = np.random.default_rng(0).standard_normal((BATCH, WIDTH)).astype(np.float32)
    if bad is not None:
        given[2 * bad : 2 * bad + 2] = np.nan
    return given


@pytest.mark.parametrize("pp", [1, 2])
def test_the_loss_is_named_with_its_microbatch_and_warned_of_a_few_times(pp: int) -> None:
    train, state = begin(jnp.tanh, pp)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = train(state, batch())
        state, _ = train(state, batch(bad=2))
    stage = "" if pp == 1 else r".* came to stage 1 from stage 0 \(action 0F2\)"
    with pytest.warns(UserWarning, match=rf"step 1: the loss of microbatch 2 is nan{stage}") as said:
        train.settle()
    assert "debug='numerics'" in str(said[0].message)
    with warnings.catch_warnings(record=True) as more:
        warnings.simplefilter("always")
        for _ in range(4):
            state, _ = train(state, batch(bad=0))
        train.settle()
    assert len(more) == 2, "the same is not said for ever"


@pytest.mark.parametrize("pp", [1, 2])
def test_where_it_is_an_error_the_state_is_as_it_was(pp: int) -> None:
    """Raised in a later call, whose state is not used up, and which a good batch goes on from."""
    train, state = begin(jnp.tanh, pp, nonfinite="error")
    state, _ = train(state, batch())
    before = jax.device_get((state.step, state.params, state.optimizer))
    state, loss = train(state, batch(bad=1))
    assert np.isnan(loss)
    with pytest.raises(NonFiniteError, match=r"^step 1: the loss of microbatch 1 is nan.* as they were before that"):
        train(state, batch())
    found = jax.tree.leaves((state.step, state.params, state.optimizer))
    Comparison().equal([np.asarray(leaf) for leaf in found], jax.tree.leaves(before)).require()
    state, loss = train(state, batch())
    train.settle()
    assert np.isfinite(loss)
    assert int(state.step) == 2


def test_nothing_is_said_where_that_is_asked_for() -> None:
    train, state = begin(jnp.tanh, nonfinite="ignore")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = train(state, batch(bad=0))
        train.settle()
        train.params(state)


@pytest.mark.parametrize(
    ("pp", "said"),
    [
        (1, r"step 0: the gradient of parts\.0\.linear\.bias has a NaN \(3 more\);"),
        (2, r"step 0: the gradient has a NaN: a NaN came to stage 0 from stage 1 \(action 1B0\), which made it"),
    ],
)
def test_a_gradient_is_named_where_the_loss_is_finite(pp: int, said: str) -> None:
    """And parameters given out are looked at before."""
    train, state = begin(halved, pp, nonfinite="error")
    state, loss = train(state, batch())
    assert np.isfinite(loss)
    with pytest.raises(NonFiniteError, match=said):
        train.params(state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.state(train.params(state), nnx.Param)))


def test_the_replica_is_named_and_the_stage_whose_own_gradients_are_not_finite() -> None:
    for function, given, said in (
        (jnp.tanh, batch(bad=3), r"the loss of microbatch 2 is nan: .* stage 0 \(action 0F2, replica 1\)"),
        (halved, batch(), r"the gradient has a NaN: it was made in the backward of stage 0;"),
    ):
        model = Model(jnp.tanh)
        model.parts[0].function = function
        train = sw.train_step(loss_fn, optax.sgd(0.1), plan_of(2, 2), devices=jax.devices()[:4], nonfinite="error")
        train(train.init(model), given)
        with pytest.raises(NonFiniteError, match=said):
            train.settle()


@pytest.mark.parametrize("pp", [1, 2])
def test_infinities_that_are_meant_are_no_reason(pp: int) -> None:
    train, state = begin(masked, pp, nonfinite="error")
    state, loss = train(state, batch())
    train.settle()
    assert np.isfinite(loss)


def test_settings_that_are_none() -> None:
    for options, said in (
        ({"debug": "loud"}, "debug='loud': expected 'numerics', or None"),
        ({"nonfinite": "maybe"}, "nonfinite='maybe': expected 'warn', 'error' or 'ignore'"),
        ({"nonfinite": "ignore", "debug": "numerics"}, "leave one of them out"),
    ):
        with pytest.raises(sw.ShardwrightError, match=said):
            begin(jnp.tanh, **options)


@pytest.mark.parametrize(
    ("pp", "function", "bad", "said"),
    [
        (
            1,
            halved,
            None,
            r"the gradient of microbatch 0 .* NaN was made by mul in parts\.1 \(backward; stage 0, action 0B0",
        ),
        (
            2,
            divided,
            None,
            r"infinity was made by div in parts\.1 \(forward; stage 1, action 1F0, microbatch 0; test_sen",
        ),
        (2, masked, 3, r"the loss of microbatch 3 is not finite: the batch has a NaN or an infinity"),
    ],
)
def test_the_first_op_is_named_before_the_step(pp: int, function: Function, bad: int | None, said: str) -> None:
    """With the module, the user's line, the stage and the microbatch. A step without one trains."""
    train, state = begin(function, pp, nonfinite="error", debug="numerics")
    with pytest.raises(NonFiniteError, match=said):
        train(state, batch(bad))
    state.require_alive()
    if function is masked:
        _, loss = train(state, batch())
        train.settle()
        assert np.isfinite(loss)


def test_ops_inside_of_loops_and_parameters_that_came_bad_are_named() -> None:
    """A plain function, whose layers are one stack: the loop's own op; then a parameter that is NaN before the step."""

    def looped(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.log(x @ weight - 1e3), None

        return jax.lax.scan(layer, x, params["stack"])[0].mean()

    params = {"stack": jnp.ones((2, WIDTH, WIDTH))}
    graph = sw.capture(looped, (params, jnp.ones((BATCH, WIDTH))))
    plan = sw.plan(graph, sw.Cluster("cpu", devices_per_node=1), batch=BATCH, pp=1, dp=1, tp=1, precision="fp32")
    train = sw.train_step(looped, optax.sgd(0.1), plan, devices=jax.devices()[:1], nonfinite="error", debug="numerics")
    for given, said in (
        (params, r"NaN was made by log between modules \(forward; .*test_sentinels\.py:\d+ \(.*layer\)"),
        ({"stack": params["stack"].at[0, 0, 0].set(jnp.nan)}, "parameter stack was not finite before the step"),
    ):
        with pytest.raises(NonFiniteError, match=said):
            train(train.init(given), batch())


def test_an_error_in_a_stage_names_it_and_leaves_the_state() -> None:
    train, state = begin(jnp.tanh, 2)
    state, _ = train(state, batch())
    launch = train.pipeline.launches[1][Kind.FORWARD]

    def failing(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    train.pipeline.launches[1][Kind.FORWARD] = replace(launch, run=failing)
    with pytest.raises(RuntimeError, match="out of memory") as said:
        train(state, batch())
    assert "stage 1, action 1F0, microbatch 0" in said.value.__notes__[0]
    train.pipeline.launches[1][Kind.FORWARD] = launch
    state, _ = train(state, batch())
    assert int(state.step) == 2
