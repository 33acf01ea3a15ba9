"""Jobs on two devices: the weights of training alone, and what ends or refuses one of them."""

import jax
import numpy as np
import optax

import shardwright as sw
from shardwright.jax import JobTraining, run_jobs
from tests.comparison import Comparison
from tests.jax import chains

STEPS = 3
OPTIMIZERS = {"clipped": optax.adamw(1e-2), "momentum": optax.sgd(1e-2, momentum=0.9)}


def made() -> tuple[sw.JobsPlan, dict[str, JobTraining]]:
    create = chains.maker(6)
    graph = chains.graph_of(create)
    usual = {"model": graph, "steps": STEPS, "batch": chains.BATCH, "precision": "fp32"}
    jobs = [
        sw.Job(name="clipped", microbatch=8, clip_norm=0.1, **usual),
        sw.Job(name="momentum", microbatch=16, optimizer="momentum", **usual),
    ]
    cluster = sw.Cluster("cpu", devices_per_node=2)
    whole = sw.plan_jobs(jobs, cluster)
    given = {
        name: JobTraining(
            graph=graph, model=create(), loss=chains.plain_loss, optimizer=optimizer, data=chains.batches(STEPS)
        )
        for name, optimizer in OPTIMIZERS.items()
    }
    return sw.plan_jobs(jobs, cluster, budget_bytes=whole.device_bytes * 3 // 5), given


def test_jobs_train_to_the_weights_of_training_alone() -> None:
    plan, given = made()
    assert min(len(job.shards) for job in plan.jobs) > 1
    found = run_jobs(plan, given, devices=jax.devices()[:2])
    same = Comparison("jobs")
    for name, optimizer in OPTIMIZERS.items():
        clip = optax.clip_by_global_norm(0.1) if name == "clipped" else optax.identity()
        microbatch = next(job.microbatch for job in plan.jobs if job.name == name)
        alone = chains.module_reference(
            chains.plain_loss, chains.maker(6), optax.chain(clip, optimizer), chains.batches(STEPS), microbatch
        )
        job = found.jobs[name]
        assert not job.failure
        same.where = name
        same.losses([np.mean(each) for each in job.losses], alone.losses)
        same.values(chains.named(job.state.params), alone.params, relative=1e-4, absolute=1e-5, what="weights")
    same.require()
    assert 0 < max(found.peak_bytes) <= plan.budget_bytes
    assert sorted(unit.text for row in found.timeline.actions for unit in row) == sorted(
        f"{n}U{k}" for n, job in enumerate(plan.jobs) for k in range(len(job.passes) * STEPS)
    )
