"""A job of a plain function of parameters, with state beside them: a Linen ResNet and its batch statistics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.jax import JobTraining, run_jobs
from tests.comparison import Comparison
from tests.jax import zoo_linen, zoo_nnx
from tests.jax.chains import named

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]
STEPS, MICROBATCH = 2, 4


def test_a_linen_model_keeps_its_batch_statistics() -> None:
    module, of_outputs = zoo_linen.MODELS["resnet"]
    batches = zoo_nnx.batches("resnet", STEPS)
    variables = jax.jit(module.init)(jax.random.key(0), jnp.asarray(batches[0]["image"]))
    params, statistics = variables["params"], variables["batch_stats"]

    def loss(params: Any, batch: Any, *, state: Any) -> Any:
        changed: dict[str, Any] = {}

        def apply(image: jax.Array) -> jax.Array:
            out, after = module.apply({"params": params, "batch_stats": state}, image, mutable=["batch_stats"])
            changed.update(after)
            return out

        return of_outputs(apply, batch), changed["batch_stats"]

    def captured(apply: Any, batch: Any) -> Any:
        return of_outputs(lambda image: apply(image, mutable=["batch_stats"])[0], batch)

    shapes = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in batches[0].items()}
    graph = sw.capture((module, jax.eval_shape(lambda: variables)), shapes, captured)
    job = sw.Job(
        name="linen", model=graph, steps=STEPS, batch=zoo_nnx.BATCH, microbatch=MICROBATCH, precision="fp32",
        optimizer="momentum",
    )  # fmt: skip
    cluster = sw.Cluster("cpu", devices_per_node=2)
    plan = sw.plan_jobs([job], cluster, budget_bytes=sw.plan_jobs([job], cluster).device_bytes // 2)
    assert len(plan.jobs[0].shards) > 2
    optimizer = optax.sgd(1e-2, momentum=0.9)
    training = JobTraining(
        graph=graph, model=params, state=statistics, loss=loss, optimizer=optimizer, data=batches, reduction="mean"
    )
    found = run_jobs(plan, {"linen": training}, devices=jax.devices()[:2]).jobs["linen"]
    assert not found.failure
    assert found.state is not None
    gradient = jax.jit(lambda p, batch, state: jax.value_and_grad(loss, has_aux=True)(p, batch, state=state))
    state, losses = optimizer.init(params), []
    for batch in batches:
        summed = jax.tree.map(jnp.zeros_like, params)
        for start in range(0, zoo_nnx.BATCH, MICROBATCH):
            part = {key: value[start : start + MICROBATCH] for key, value in batch.items()}
            (value, statistics), own = gradient(params, part, statistics)
            losses.append(float(value))
            summed = jax.tree.map(lambda a, b: a + b / 2, summed, own)
        updates, state = optimizer.update(summed, state, params)
        params = optax.apply_updates(params, updates)
    same = Comparison("linen").losses(np.ravel(found.losses).tolist(), losses, moving=1e-4)
    same.values(named(found.model), named(params), relative=1e-4, absolute=1e-5, what="weights")
    same.values(named(found.state.other), named(statistics), relative=1e-4, absolute=1e-5, what="statistics")
    same.require()
