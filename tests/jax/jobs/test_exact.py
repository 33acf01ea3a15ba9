"""Models together on two devices, each three times as large as what a device may hold: GPT-2, BERT with dropout, an
encoder-decoder with tied embeddings, a ResNet with batch norms. What training leaves is what training alone does."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright as sw
from shardwright.core.model.graph import Graph
from shardwright.jax import JobTraining, TrainState, run_jobs, train_step
from tests.comparison import Comparison
from tests.jax import zoo_nnx

pytestmark = pytest.mark.usefixtures("quick_compilation")
STEPS, MICROBATCH, NORM = 2, 2, 0.5
DROPOUT = zoo_nnx.Size(zoo_nnx.WIDTH, zoo_nnx.HEADS, zoo_nnx.VOCABULARY, zoo_nnx.LENGTH, dropout=0.1)
CREATE: dict[str, Callable[[], nnx.Module]] = {
    "gpt": lambda: zoo_nnx.Gpt(7, nnx.Rngs(0)),
    "bert": lambda: zoo_nnx.Bert(7, nnx.Rngs(0), DROPOUT),
    "t5": lambda: zoo_nnx.T5(3, nnx.Rngs(0)),
    "resnet": lambda: zoo_nnx.ResNet(6, nnx.Rngs(0)),
}
SCHEDULE = optax.linear_schedule(1e-3, 1e-2, STEPS)
PLAIN = optax.adamw(SCHEDULE, eps=1e-4)
"""The gradient of a key's bias is zero but for rounding, which Adam would scale up with a smaller epsilon."""
CLIPPED = optax.chain(optax.clip_by_global_norm(NORM), PLAIN)
OPTIMIZERS = {"gpt": CLIPPED, "bert": PLAIN, "t5": CLIPPED, "resnet": optax.sgd(1e-2, momentum=0.9)}
"""Of BERT's job the plan clips; GPT-2's and T5's optimizers clip themselves."""
ALONE = OPTIMIZERS | {"bert": CLIPPED}


def graph_of(name: str) -> Graph:
    sample = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in zoo_nnx.batches(name, 1)[0].items()}
    return sw.capture(nnx.eval_shape(CREATE[name]), sample, zoo_nnx.MODELS[name][1])


def job_of(name: str, graph: Graph) -> sw.Job:
    clips: Any = {"optimizer": "momentum"} if name == "resnet" else {"clip_norm": NORM}
    return sw.Job(
        name=name, model=graph, steps=STEPS, batch=zoo_nnx.BATCH, microbatch=MICROBATCH, precision="fp32", **clips
    )


def training_of(name: str, graph: Graph) -> JobTraining:
    return JobTraining(
        graph=graph, model=CREATE[name](), loss=zoo_nnx.MODELS[name][1], optimizer=OPTIMIZERS[name],
        data=zoo_nnx.batches(name, STEPS), reduction=reduction_of(name),
    )  # fmt: skip


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "names", [("t5", "resnet"), pytest.param(tuple(CREATE), marks=pytest.mark.slow)], ids=["two", "four"]
)
def test_models_train_together_as_each_alone(names: tuple[str, ...]) -> None:
    graphs = {name: graph_of(name) for name in names}
    jobs = [job_of(name, graph) for name, graph in graphs.items()]
    cluster = sw.Cluster("cpu", devices_per_node=2)
    least = min(job.device_bytes for job in sw.plan_jobs(jobs, cluster).jobs)
    plan = sw.plan_jobs(jobs, cluster, budget_bytes=least // 3)
    found = run_jobs(plan, {name: training_of(name, graphs[name]) for name in names}, devices=jax.devices()[:2])
    same = Comparison("jobs together")
    for name, graph in graphs.items():
        job = found.jobs[name]
        assert not job.failure
        assert job.state is not None
        state, losses = alone(name, graph)
        same.where = name
        if name != "bert":  # whose microbatches weigh differently
            same.losses([np.mean(each) for each in job.losses], losses, moving=1e-4)
        bounds: Any = {"relative": 1e-4, "absolute": 1e-5}
        same.values(leaves(job.state.params), leaves(state.params), **bounds, what="weights")
        same.values(leaves(job.state.optimizer), leaves(state.optimizer), **bounds, what="states")
        if name == "resnet":
            same.values(leaves(job.state.other), leaves(state.other), **bounds, what="statistics")
    same.require()
    assert max(found.peak_bytes) <= plan.device_bytes <= plan.budget_bytes


def alone(name: str, graph: Graph) -> tuple[TrainState, list[float]]:
    """The state and the losses of a model that is trained whole, on one device."""
    pins: Any = {"pp": 1, "dp": 1, "tp": 1, "recompute": "none", "shard": 0, "precision": "fp32"}
    plan = sw.plan(graph, sw.Cluster("cpu"), batch=zoo_nnx.BATCH, microbatch=MICROBATCH, **pins)
    train = train_step(
        zoo_nnx.MODELS[name][1], ALONE[name], plan, devices=jax.devices()[:1], reduction=reduction_of(name),
        log_every=0,
    )  # fmt: skip
    state, losses = train.init(CREATE[name]()), []
    for batch in zoo_nnx.batches(name, STEPS):
        state, loss = train(state, batch)
        losses.append(float(loss))
    return state, losses


def reduction_of(name: str) -> str | None:
    """How the losses of microbatches combine: BERT's come with weights."""
    return None if name == "bert" else "mean"
