"""Models on the tensor axis, dropout on: losses of 20 steps and first gradients as the unsplit model's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from shardwright.backends.jax.capture.tree import Parts
from shardwright.backends.jax.tensor_parallel.constrained_loss import FusedParameters
from tests.comparison import Comparison
from tests.jax import chains, zoo_dropout, zoo_linen
from tests.jax.chains import Run, named, recording, require_same_gradients, require_same_run
from tests.jax.chains import plan_of as plan_of_graph
from tests.jax.test_pipeline_models import case
from tests.jax.zoo_dropout import BATCH, MODELS

pytestmark = pytest.mark.usefixtures("quick_compilation")

STEPS, MICROBATCH = 20, 2
OPTIMIZER = optax.adamw(1e-3)


def reference(model: str) -> Run:
    """The unsplit model, every random key folded with the step and the number of the microbatch."""
    create, loss = MODELS[model]
    graphdef, params, random, rest = nnx.split(create(), nnx.Param, nnx.RngState, ...)

    def drawing(params: Any, batch: dict[str, jax.Array]) -> Any:
        step, number = batch["step"][0], batch["number"][0]

        def fold(leaf: jax.Array) -> jax.Array:
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.zeros_like(leaf)
            return jax.random.fold_in(jax.random.fold_in(leaf, step), number)

        parts = jax.tree.map(lambda leaf: leaf, (params, jax.tree.map(fold, random), rest))
        return loss(
            nnx.merge(graphdef, *parts), {name: batch[name] for name in batch if name not in ("step", "number")}
        )

    numbers = np.arange(BATCH, dtype=np.int32)
    steps = [
        batch | {"step": np.full_like(numbers, step), "number": numbers // MICROBATCH}
        for step, batch in enumerate(zoo_dropout.batches(model, STEPS))
    ]
    return chains.reference(drawing, params, OPTIMIZER, steps, MICROBATCH)


_GRAPHS: dict[str, sw.Graph] = {}
_REFERENCES: dict[str, Run] = {}


def graph_of(model: str) -> sw.Graph:
    if model not in _GRAPHS:
        create, loss = MODELS[model]
        first = zoo_dropout.batches(model, 1)[0]
        sample = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in first.items()}
        _GRAPHS[model] = sw.capture(nnx.eval_shape(create), sample, loss)
    return _GRAPHS[model]


def plan_of(model: str, pp: int, tp: int, dp: int, **pins: Any) -> sw.Plan:
    given: dict[str, Any] = {"microbatch": MICROBATCH, "precision": "fp32", "recompute": "none", "shard": 0,
                             "loss_scope": "replica"}  # fmt: skip
    cluster = sw.Cluster("h100", nodes=1, devices_per_node=pp * tp * dp)
    return sw.plan(graph_of(model), cluster, batch=BATCH, pp=pp, tp=tp, dp=dp, **(given | pins))


def gradients_of(state: sw.TrainState, plan: sw.Plan) -> dict[str, np.ndarray]:
    """Those that the optimizer keeps, in the order of the model's own."""
    gradients = state.optimizer[1]
    names = Parts(gradients, None, None, state.graphdef).names
    return named(FusedParameters.of(plan, names).restore(jax.device_get(gradients)))


STEPS_OF = {"resnet": 4}
"""Where fewer steps are compared: of this one, weights that differ in the seventh digit give losses that differ by 1e-3
from the fifth step on, on one device too (statistics of two samples, and kinks)."""


def require_same(model: str, plan: sw.Plan) -> None:
    """Losses 1e-5 relative for all steps, the gradients of the first."""
    if model not in _REFERENCES:
        _REFERENCES[model] = reference(model)
    expected = _REFERENCES[model]
    create, loss = MODELS[model]
    train = sw.train_step(loss, recording(OPTIMIZER), plan, devices=jax.devices()[: plan.mesh.size])
    state, losses = train.init(create), []
    steps = STEPS_OF.get(model, STEPS)
    for batch in zoo_dropout.batches(model, steps):
        state, value = train(state, batch)
        if not losses:
            require_same_gradients(gradients_of(state, plan), expected.gradients)
        losses.append(float(value))
    Comparison().losses(losses, expected.losses[:steps], moving=1e-4).require()


QUICK = {("llama", 4)}


@pytest.mark.parametrize(
    ("model", "tp"),
    [
        pytest.param(model, tp, marks=() if (model, tp) in QUICK else pytest.mark.slow)
        for model in MODELS
        for tp in (2, 4)
    ],
)
def test_the_tensor_axis_changes_nothing(model: str, tp: int) -> None:
    plan = plan_of(model, 1, tp, 1)
    assert any(not layout.is_replicated for layout in plan.parameter_layouts("jax").values())
    require_same(model, plan)


@pytest.mark.parametrize(
    ("model", "tp"),
    [("llama", 2), *(pytest.param(m, 4, marks=pytest.mark.slow) for m in ("gpt2", "bert", "t5", "vit"))],
)
def test_divided_sequences_change_nothing(model: str, tp: int) -> None:
    require_same(model, plan_of(model, 1, tp, 1, sequence_parallel=True))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(2, 2, 1), (1, 2, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_with_pipelines_and_replicas(model: str, degrees: tuple[int, int, int]) -> None:
    require_same(model, plan_of(model, *degrees))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pins"),
    [
        ("llama", {"sequence_parallel": True}),
        ("t5", {"sequence_parallel": True}),
        ("gpt2", {"recompute": "full"}),
        ("llama", {"recompute": "selective"}),
        ("gpt2", {"schedule": "zb-h1"}),
    ],
    ids=str,
)
def test_stages_with_other_policies(model: str, pins: dict[str, Any]) -> None:
    require_same(model, plan_of(model, 2, 2, 1, **pins))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("model", zoo_linen.MODELS)
def test_linen_models(model: str, degrees: tuple[int, int, int]) -> None:
    """Stages, replicas, ranks of the tensor axis."""
    made = case("linen", model)
    plan = plan_of_graph(made.graph, *degrees, batch=BATCH)
    assert any(not layout.is_replicated for layout in plan.parameter_layouts("jax").values())
    train, state = made.start(plan)
    require_same_run(train, state, made.expected, made.steps)
