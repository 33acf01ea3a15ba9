"""Pipelines of whole models, in NNX and in Linen: losses of 20 steps and first gradients as the unsplit model's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from tests.comparison import Comparison
from tests.jax import zoo_linen, zoo_nnx
from tests.jax.chains import Run, module_reference, named, plan_of, recording, reference, require_same_run

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, STEPS = zoo_nnx.BATCH, 20


def shapes(batch: dict[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch.items()}


def optimizer(model: str) -> optax.GradientTransformation:
    """Of some weights of a ResNet the gradient is rounding alone, by which AdamW with its usual eps moves them a whole
    learning rate: single-device runs whose first weights differ by half a unit in the last place then part by 1e-3."""
    return optax.adamw(1e-3, eps=1e-6 if model == "resnet" else 1e-8)


class Nnx:
    def __init__(self, name: str) -> None:
        self.create, self.loss = zoo_nnx.MODELS[name]
        self.optimizer = optimizer(name)
        self.steps = zoo_nnx.batches(name, STEPS)
        self.graph = sw.capture(nnx.eval_shape(self.create), shapes(self.steps[0]), self.loss)
        self.expected = module_reference(self.loss, self.create, self.optimizer, self.steps)

    def start(self, plan: sw.Plan) -> tuple[sw.TrainStep, sw.TrainState]:
        devices = jax.devices()[: plan.mesh.size]
        train = sw.train_step(self.loss, recording(self.optimizer), plan, devices=devices)
        return train, train.init(self.create)


class Linen:
    def __init__(self, name: str) -> None:
        self.module, loss = zoo_linen.MODELS[name]
        self.optimizer = optimizer(name)
        self.steps = zoo_nnx.batches(name, STEPS)
        first = [jnp.asarray(v) for k, v in self.steps[0].items() if k in INPUTS]
        variables = jax.jit(self.module.init)(jax.random.key(0), *first)
        self.params, self.statistics = variables["params"], variables.get("batch_stats")

        def applied(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
            if state is None:
                return loss(lambda *given: self.module.apply({"params": params}, *given), batch), None
            after = {}

            def apply(*given: Any) -> Any:
                full = {"params": params, "batch_stats": state}
                out, changed = self.module.apply(full, *given, mutable=["batch_stats"])
                after.update(changed)
                return out

            return loss(apply, batch), after["batch_stats"]

        def with_state(params: Any, batch: Any, *, state: Any = None) -> Any:
            found, after = applied(params, state, batch)
            return found if after is None else (found, after)

        def captured(apply: Any, batch: Any) -> Any:
            if self.statistics is None:
                return loss(apply, batch)
            return loss(lambda *given: apply(*given, mutable=["batch_stats"])[0], batch)

        self.loss = with_state
        self.graph = sw.capture((self.module, jax.eval_shape(lambda: variables)), shapes(self.steps[0]), captured)
        self.expected: Run = reference(
            lambda params, batch: applied(params, self.statistics, batch)[0], self.params, self.optimizer, self.steps
        )

    def start(self, plan: sw.Plan) -> tuple[sw.TrainStep, sw.TrainState]:
        devices = jax.devices()[: plan.mesh.size]
        train = sw.train_step(self.loss, recording(self.optimizer), plan, devices=devices)
        return train, train.init(self.params, state=self.statistics)


INPUTS = ("ids", "attended", "source", "target", "user", "item", "image")
KINDS = {"nnx": Nnx, "linen": Linen}
_MADE: dict[tuple[str, str], Any] = {}


def case(kind: str, name: str) -> Any:
    if (kind, name) not in _MADE:
        _MADE[(kind, name)] = KINDS[kind](name)
    return _MADE[(kind, name)]


SIZES = [(2, 1, 1), (4, 1, 1), (2, 2, 2), (4, 2, 1), (4, 1, 2)]
"""Stages, replicas, tensor axis."""
OFTEN = {
    ("nnx", "t5", (2, 1, 1)),
    ("nnx", "resnet", (2, 1, 1)),
    ("linen", "ncf", (2, 2, 2)),
}
CASES = [
    pytest.param(kind, name, *size, marks=() if (kind, name, size) in OFTEN else pytest.mark.slow)
    for kind in KINDS
    for name in zoo_nnx.MODELS
    for size in SIZES
]


@pytest.mark.parametrize(("kind", "name", "pp", "dp", "tp"), CASES)
def test_models_train_as_on_one_device(kind: str, name: str, pp: int, dp: int, tp: int) -> None:
    made = case(kind, name)
    train, state = made.start(plan_of(made.graph, pp, dp, tp, batch=BATCH))
    require_same_run(train, state, made.expected, made.steps)


@pytest.mark.parametrize("kind", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
def test_batch_statistics_follow_the_microbatches(kind: str) -> None:
    made = case(kind, "resnet")
    train, state = made.start(plan_of(made.graph, 2, batch=BATCH))
    state, _ = train(state, made.steps[0])
    parts = [{k: v[start : start + 2] for k, v in made.steps[0].items()} for start in range(0, BATCH, 2)]
    if kind == "nnx":
        alone = made.create()
        for part in parts:
            alone(part["image"])
        expected = nnx.split(alone, nnx.Param, ...)[2]
        found = state.other
    else:
        expected, found = made.statistics, state.other
        for part in parts:
            expected = made.loss(made.params, part, state=expected)[2]
    Comparison().values(jax.tree.leaves(found), jax.tree.leaves(expected), relative=1e-4, absolute=1e-6).require()


def test_parameters_come_back_by_their_own_paths() -> None:
    made = case("linen", "ncf")
    train, state = made.start(plan_of(made.graph, 4, batch=BATCH))
    assert named(train.params(state)).keys() == named(made.params).keys()
