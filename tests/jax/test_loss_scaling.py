"""Losses in float16: scaled by the rule, a step that overflows is skipped on all devices and said, settings refused."""

import logging
import random
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from shardwright.backends.jax.loss.scaling import Scaling
from shardwright.core.errors import NonFiniteError, PlanWarning
from shardwright.core.model.loss.scaling import LossScale
from tests.comparison import Comparison

pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDTH, BATCH = 4, 8


@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("consecutive", [False, True])
def test_the_state_follows_the_rule_over_random_overflows(shift: int, consecutive: bool) -> None:
    rule = LossScale(2.0**32, True, 2.0, 20, 4.0, shift, consecutive)  # to 2**127 it is exact in float32
    drawn = random.Random(shift)
    overflows = [drawn.random() < (0.02 if step % 600 > 300 else 0.3) for step in range(3000)]

    def one(state: Scaling, overflowed: jax.Array) -> tuple[Scaling, Scaling]:
        after = state.after(rule, overflowed)
        return after, after

    _, found = jax.lax.scan(one, Scaling.begin(rule), jnp.array(overflows))
    wanted = []
    for overflowed in overflows:
        rule.update(overflowed)
        wanted.append((rule.scale, rule.steps, rule.last_overflow, rule.hysteresis_left))
    Comparison().equal(np.stack([np.asarray(each, np.float64) for each in found], 1), np.array(wanted)).require()


def test_a_fixed_factor_stays_and_none_rises_to_infinity() -> None:
    fixed = LossScale(128.0)
    assert float(Scaling.begin(fixed).after(fixed, jnp.bool_(True)).scale) == 128.0
    rising = LossScale(2.0**127, True, scale_window=1)
    assert float(Scaling.begin(rising).after(rising, jnp.bool_(False)).scale) == 2.0**127


class Model(nnx.Module):
    def __init__(self) -> None:
        self.parts = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(n)) for n in range(4)])
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen[...] += x.astype(jnp.float32).mean()
        for part in self.parts:
            x = jnp.tanh(part(x))
        return x


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    """The factor is of one sample's loss, so that one microbatch's gradients can be made to overflow."""
    return (jnp.square(model(batch["x"])).mean(-1) * batch["factor"]).mean()


def function_loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    x = batch["x"] @ params["before"]
    for weight in params["layers"]:
        x = x + jnp.tanh(x @ weight["w"])
    return (jnp.square(x @ params["after"]).mean(-1) * batch["factor"]).mean()


def function_params() -> Any:
    wide = 2 * WIDTH
    return {
        "before": jnp.eye(WIDTH, wide),
        "layers": [{"w": jnp.eye(wide)} for _ in range(4)],
        "after": jnp.eye(wide, WIDTH),
    }


def batch(bad: int | None = None) -> dict[str, np.ndarray]:
    """Four microbatches of two samples; with a factor of 4096 in microbatch ``bad``."""
    given = np.random.default_rng(0).standard_normal((BATCH, WIDTH)).astype(np.float32)
    factor = np.ones(BATCH, np.float32)
    if bad is not None:
        factor[2 * bad : 2 * bad + 2] = 4096.0
    return {"x": given, "factor": factor}


SCALE = 2.0**12
DYNAMIC: dict[str, Any] = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": SCALE, "scale_window": 3}}
FORMS = ("one program", "dp 2 shard 3", "pipeline", "stages in one program")


def begin(form: str, precision: str = "fp16", **options: Any) -> tuple[sw.TrainStep, sw.TrainState]:
    stages = {"schedule": "gpipe", "virtual_stages": 1}
    pins: dict[str, Any] = {
        "one program": {"pp": 1, "dp": 1},
        "dp 2 shard 3": {"pp": 1, "dp": 2, "shard": 3},
        "pipeline": {"pp": 2, "dp": 1, **stages},
        "stages in one program": {"pp": 2, "dp": 1, **stages},
    }[form]
    is_module = form != "stages in one program"
    if is_module:
        graph = sw.capture(nnx.eval_shape(Model), {"x": jnp.ones((BATCH, WIDTH))}, lambda made: jnp.square(made).mean())
    else:
        graph = sw.capture(function_loss, (function_params(), batch()))
    devices = jax.devices()[: pins["pp"] * pins["dp"]]
    plan = sw.plan(
        graph, sw.Cluster("cpu", devices_per_node=len(devices)), batch=BATCH, tp=1, microbatch=2 // pins["dp"],
        **({"precision": precision, "recompute": "none", "shard": 0, "loss_scope": "replica"} | pins),
    )  # fmt: skip
    train = sw.train_step(
        loss_fn if is_module else function_loss, optax.adam(1e-2), plan, devices=devices, reduction="mean",
        one_program=True if form == "stages in one program" else None, **options,
    )  # fmt: skip
    return train, train.init(Model() if is_module else function_params())


def kept(state: sw.TrainState) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.optimizer, state.other))]


@pytest.mark.parametrize("form", FORMS)
def test_an_overflow_in_one_microbatch_skips_the_step_and_is_said(form: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing but the number of the step and the factor changes; what comes after trains on."""
    train, state = begin(form, **DYNAMIC)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "shardwright"):
        warnings.simplefilter("error", UserWarning)
        state, loss = train(state, batch())
        assert (float(state.loss_scale), bool(train.overflow)) == (SCALE, False)
        before = kept(state)
        state, loss = train(state, batch(bad=2))
        assert bool(train.overflow)
        assert np.isfinite(loss)
        Comparison().equal(kept(state), before).require()
        assert (int(state.step), float(state.loss_scale)) == (2, SCALE / 2)
        state, _ = train(state, batch())
        assert not bool(train.overflow)
        train.settle()
    said = "step 1 is skipped: gradients overflowed at a loss scale of 4096; the next is 2048"
    assert [record.message for record in caplog.records] == [said]
    assert any((one != other).any() for one, other in zip(kept(state), before, strict=True))
    for _ in range(2):
        state, _ = train(state, batch())
    assert float(state.loss_scale) == SCALE, "three steps after the overflow"


@pytest.mark.parametrize("form", ["one program", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_fixed_factor_skips_too_and_stays(form: str, caplog: pytest.LogCaptureFixture) -> None:
    train, state = begin(form, static_loss_scale=SCALE, nonfinite="ignore")
    before = kept(state)
    with caplog.at_level(logging.WARNING, "shardwright"):
        state, _ = train(state, batch(bad=0))
        train.settle()
    Comparison().equal(kept(state), before).require()
    assert float(state.loss_scale) == SCALE
    assert "step 0 is skipped: gradients overflowed at a loss scale of 4096" in caplog.text


@pytest.mark.parametrize("form", [pytest.param("one program", marks=pytest.mark.slow), "pipeline"])
def test_an_overflow_is_no_fault_and_a_loss_that_is_not_finite_is_one(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    train, state = begin(form, nonfinite="error", **DYNAMIC)
    state, _ = train(state, batch(bad=1))
    train.settle()
    before = kept(state), float(state.loss_scale)
    caplog.clear()
    bad = batch()
    bad["factor"][3] = np.nan
    state, _ = train(state, bad)
    with pytest.raises(NonFiniteError, match="step 1: the loss of microbatch 1 is nan"):
        train.settle()
    Comparison().equal(kept(state), before[0]).require()
    assert (int(state.step), float(state.loss_scale)) == (1, before[1])
    assert not caplog.records
    train, state = begin(form, **DYNAMIC)
    train(state, bad)
    with pytest.warns(UserWarning, match="step 0: the loss of microbatch 1 is nan"):
        train.settle()


def test_a_state_goes_on_with_its_factor_where_it_is_placed_again() -> None:
    train, state = begin("one program", **DYNAMIC)
    state, _ = train(state, batch(bad=1))
    saved = jax.device_get(train.original(state))
    assert float(train.held(saved).loss_scale) == SCALE / 2
    other, _ = begin("dp 2 shard 3", **DYNAMIC)
    assert float(other.held(saved).loss_scale) == SCALE / 2
    wide, _ = begin("one program", "bf16")
    held = wide.held(saved)
    assert held.scaling is None
    held, _ = wide(held, batch())
    assert float(train.held(jax.device_get(wide.original(held))).loss_scale) == SCALE


def test_a_pipelines_state_is_placed_with_its_factor() -> None:
    train, state = begin("pipeline", **DYNAMIC)
    state, _ = train(state, batch(bad=1))
    placed = train.place(jax.device_get(state))
    placed, _ = train(placed, batch())
    assert float(placed.loss_scale) == SCALE / 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"static_loss_scale": 8.0, "dynamic_loss_scale": True}, "are both given: keep one"),
        ({"dynamic_loss_args": {"scale_window": 5}}, "scale_window goes with dynamic_loss_scale=True"),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"window": 5}}, "a dynamic loss scale has no 'window'"),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 0}}, "scale_window=0: expected"),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": [5]}, r"dynamic_loss_args=\[5\]: expected a dict"),
        ({"static_loss_scale": 0.0}, "a loss scale of 0.0: expected a finite number above 0"),
        ({"static_loss_scale": "8"}, "static_loss_scale='8': expected a number"),
        ({"dynamic_loss_scale": 1}, "dynamic_loss_scale=1: expected True or False"),
    ],
)
def test_arguments_that_are_not_possible_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(sw.ShardwrightError, match=said):
        begin("one program", **options)


def test_scaling_without_float16_and_float16_without_scaling() -> None:
    for precision in ("fp32", "bf16"):
        with pytest.raises(sw.ShardwrightError, match=f"the plan's precision is '{precision}': losses are scaled in"):
            begin("one program", precision, static_loss_scale=8.0)
        with pytest.raises(sw.ShardwrightError, match="dynamic_loss_scale=True was given, and the plan's precision is"):
            begin("one program", precision, dynamic_loss_scale=True)
    with pytest.warns(PlanWarning, match="losses are not scaled, so that small gradients become zero"):
        begin("one program")
    with pytest.raises(sw.ShardwrightError, match="precision"):
        begin("one program", "bf16,fp16")
