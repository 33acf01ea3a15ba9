"""Jobs on two devices: the weights of training alone, and what ends or refuses one of them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.backends.jax.jobs.device_memory import DeviceMemory
from shardwright.core.errors import ClusterError, MissingCapabilityError, PlanError
from shardwright.jax import JobTraining, run_jobs
from tests.comparison import Comparison
from tests.jax import chains
from tests.jax import test_pipeline_stacks as stacks

pytestmark = pytest.mark.usefixtures("quick_compilation")
STEPS = 3
CREATE = chains.maker(6)
OPTIMIZERS = {"clipped": optax.adamw(1e-2), "momentum": optax.sgd(1e-2, momentum=0.9)}


@cache
def planned() -> sw.JobsPlan:
    usual: dict[str, Any] = {
        "model": chains.graph_of(CREATE), "steps": STEPS, "batch": chains.BATCH, "precision": "fp32",
    }  # fmt: skip
    jobs = [
        sw.Job(name="clipped", microbatch=8, clip_norm=0.1, **usual),
        sw.Job(name="momentum", microbatch=16, optimizer="momentum", **usual),
    ]
    cluster = sw.Cluster("cpu", devices_per_node=2)
    return sw.plan_jobs(jobs, cluster, budget_bytes=sw.plan_jobs(jobs, cluster).device_bytes * 3 // 5)


def given() -> dict[str, JobTraining]:
    return {
        name: JobTraining(
            graph=chains.graph_of(CREATE), model=CREATE(), loss=chains.plain_loss, optimizer=optimizer,
            data=chains.batches(STEPS),
        )
        for name, optimizer in OPTIMIZERS.items()
    }  # fmt: skip


def two() -> list[jax.Device]:
    return jax.devices()[:2]


def test_jobs_train_to_the_weights_of_training_alone() -> None:
    plan = planned()
    assert min(len(job.shards) for job in plan.jobs) > 1
    found = run_jobs(plan, given(), devices=two())
    same = Comparison("jobs")
    for name, optimizer in OPTIMIZERS.items():
        clip = optax.clip_by_global_norm(0.1) if name == "clipped" else optax.identity()
        microbatch = next(job.microbatch for job in plan.jobs if job.name == name)
        alone = chains.module_reference(
            chains.plain_loss, CREATE, optax.chain(clip, optimizer), chains.batches(STEPS), microbatch
        )
        job = found.jobs[name]
        assert not job.failure
        assert job.state is not None
        same.where = name
        same.losses([np.mean(each) for each in job.losses], alone.losses)
        same.values(chains.named(job.state.params), alone.params, relative=1e-4, absolute=1e-5, what="weights")
    same.require()
    assert 0 < max(found.peak_bytes) <= plan.budget_bytes
    assert found.timeline.peak_activation_bytes == found.peak_bytes
    assert sorted(unit.text for row in found.timeline.actions for unit in row) == sorted(
        f"{n}U{k}" for n, job in enumerate(plan.jobs) for k in range(len(job.passes) * STEPS)
    )


def test_activations_may_wait_for_their_backward_where_there_is_one_device() -> None:
    (job,) = planned().jobs[1:]
    assert len(job.shards) >= 4
    labels = ("keep", "offload", "recompute", *(shard.activations for shard in job.shards[3:]))
    shards = tuple(replace(shard, activations=label) for shard, label in zip(job.shards, labels, strict=True))
    plan = replace(
        planned(), jobs=(replace(job, shards=shards, microbatch=8),), cluster=sw.Cluster("cpu"), budget_bytes=1 << 20
    )
    create = chains.maker(6, 0.3)  # masks are drawn again where a forward runs again
    given_job = replace(given()["momentum"], model=create(), reduction="mean")
    found = run_jobs(plan, {"momentum": given_job}, devices=jax.devices()[1:2])
    everywhere = replace(plan, jobs=(replace(job, microbatch=8),))
    again = run_jobs(everywhere, {"momentum": replace(given_job, model=create())}, devices=two()[:1])
    states = [each.jobs["momentum"].state for each in (found, again)]
    losses = [each.jobs["momentum"].losses for each in (found, again)]
    assert not found.jobs["momentum"].failure
    same = Comparison("labels").losses(*losses, moving=1e-3)
    same.values(*(chains.named(state.params) for state in states if state), relative=1e-5, absolute=1e-6).require()
    held = found.timeline.memory(0)[1]
    assert held[-1] == 0


def not_finite(model: chains.Chain, batch: dict[str, jax.Array]) -> jax.Array:
    return chains.plain_loss(model, batch) / batch["below"].min()


def test_a_job_that_fails_ends_alone() -> None:
    batches, jobs = chains.batches(STEPS), given()
    divided = [batch | {"below": np.full(chains.BATCH, float(n != 1), np.float32)} for n, batch in enumerate(batches)]
    plan = planned()
    graph = chains.graph_of(CREATE)
    third = replace(plan.jobs[1], name="raises")
    plan = replace(plan, jobs=(*plan.jobs, third, replace(third, name="fourth")))

    def ending() -> Iterator[Any]:
        yield batches[0]
        raise OSError("the disk is gone")

    found = run_jobs(
        plan,
        {
            "clipped": replace(jobs["clipped"], loss=not_finite, data=divided, reduction="mean"),
            "momentum": replace(jobs["momentum"], data=batches[:2]),
            "raises": replace(jobs["momentum"], graph=graph, model=CREATE(), data=ending()),
            "fourth": replace(jobs["momentum"], model=CREATE()),
        },
        devices=two(),
    ).jobs
    assert found["clipped"].failure.startswith("step 1: FloatingPointError: a loss is not finite (inf")
    assert found["momentum"].failure == "step 2: PlanError: its data have ended, and it takes 3 steps"
    assert found["raises"].failure == "step 1: OSError: the disk is gone"
    assert found["fourth"].failure == ""
    assert [len(job.losses) for job in found.values()] == [1, 2, 1, 3]
    state = found["clipped"].state
    assert state is not None
    assert int(state.step) == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_what_cannot_be_run_ends_a_job_before_its_first_step() -> None:
    jobs, one = given(), replace(planned(), jobs=planned().jobs[1:])

    def failure(plan: sw.JobsPlan = one, **changed: Any) -> str:
        name = plan.jobs[0].name
        return run_jobs(plan, {name: replace(jobs[name], **changed)}, devices=two()).jobs[name].failure

    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-2))
    said = failure(optimizer=clipped)
    assert "the optimizer's clip_by_global_norm looks at the gradients of several shards" in said
    assert "plan it with clip_norm=" in said
    waiting = replace(planned(), jobs=planned().jobs[:1])
    said = failure(waiting, optimizer=optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(1e-2)))
    assert "planned with clip_norm=0.1" in said
    assert "looks at several parameters together" in failure(waiting, optimizer=mixing())
    assert "planned in bf16" in failure(replace(one, jobs=(replace(one.jobs[0], precision="bf16"),)))
    assert "planned for another model" in failure(graph=chains.graph_of(chains.maker(4)))
    assert "batches of 16 samples, and one of 8" in failure(
        data=[{key: value[:8] for key, value in batch.items()} for batch in chains.batches(1)]
    )
    assert "its data have ended" in failure(data=[])
    assert "more than the budget" in failure(replace(one, budget_bytes=20_000))


def test_a_stack_of_layers_in_several_shards_is_refused() -> None:
    graph = sw.capture(stacks.loss_fn, (stacks.params(), stacks.SAMPLE))
    job = sw.Job(name="stack", model=graph, steps=1, batch=chains.BATCH, precision="fp32", optimizer="momentum")
    plan = sw.plan_jobs([job], sw.Cluster("cpu", devices_per_node=2))
    (own,) = plan.jobs
    (whole,) = own.shards
    parts = tuple(
        replace(whole, first_unit=a, end_unit=b, activations="recompute") for a, b in ((0, 3), (3, whole.end_unit))
    )
    training = JobTraining(
        graph=graph, model=stacks.params(), loss=stacks.loss_fn, optimizer=optax.sgd(1e-2), data=chains.batches(1)
    )
    found = run_jobs(replace(plan, jobs=(replace(own, shards=parts),)), {"stack": training}, devices=two())
    assert "parameter layers.b is a stack whose layers lie in several shards" in found.jobs["stack"].failure
    assert found.jobs["stack"].state is None
    with pytest.raises(PlanError, match="the job has not begun"):
        _ = found.jobs["stack"].model


def mixing() -> optax.GradientTransformation:
    """An optimizer that adds to each gradient something of all others."""

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradients)])
        return jax.tree.map(lambda leaf: leaf + jnp.sort(flat)[0], gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def test_what_is_not_run_is_refused() -> None:
    plan, jobs = planned(), given()
    with pytest.raises(PlanError, match="'momentum': expected what each job of the plan trains"):
        run_jobs(plan, {"clipped": jobs["clipped"]}, devices=two())
    spoiled = replace(plan.jobs[1], output=f"{__file__}/out")
    with pytest.raises(PlanError, match="job 'momentum' cannot be saved at"):
        run_jobs(replace(plan, jobs=(plan.jobs[0], spoiled)), jobs, devices=two())
    with pytest.raises(MissingCapabilityError, match="policy='optimum' is for simulations"):
        run_jobs(replace(plan, policy="optimum"), jobs, devices=two())
    with pytest.raises(ClusterError, match="planned for 2 devices, and 3 are given"):
        run_jobs(plan, jobs, devices=jax.devices()[:3])
    data = iter(chains.batches(6))
    shared = {name: replace(own, data=data) for name, own in jobs.items()}
    with pytest.raises(PlanError, match="take batches from one iterator"):
        run_jobs(plan, shared, devices=two())


def test_what_is_put_on_a_device_is_a_copy_and_is_counted() -> None:
    memory, host = DeviceMemory(jax.devices()[1], 3000), np.arange(256, dtype=np.float32)
    (array,) = memory.put([host])
    host[0] = 7.0
    assert array.devices() == {jax.devices()[1]}
    assert float(array[0]) == 0.0
    (back,) = memory.take([array])
    assert array.is_deleted()
    assert isinstance(back, np.ndarray)
    assert back.flags.owndata
    assert (memory.use.used_bytes, memory.peak_bytes) == (0, 1024)
    with pytest.raises(PlanError, match="more than the budget"):
        memory.put([np.zeros(1024, np.float32)])
