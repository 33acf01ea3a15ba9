"""The training of a file of jobs: one process for each device, and what became of each job."""

import os
import subprocess
import sys
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from shardwright.backends.registry import framework_of, require_framework
from shardwright.commands.jobs_given import GivenJobs
from shardwright.commands.model_file import load_model
from shardwright.core.errors import PlanError
from shardwright.core.jobs.jobs_file import JobRow
from shardwright.core.jobs.jobs_plan import JobsPlan
from shardwright.core.jobs.results import JobsResult
from shardwright.core.values.amounts import seconds_text

_LAUNCHED = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def launch(devices: int, first: JobRow) -> int | None:
    """Run this command in a process for each device, by torchrun, and return the exit code. None in one of them, and
    where jobs are JAX's, as the model of the ``first`` is: one process has all its devices then."""
    if any(name in os.environ for name in _LAUNCHED):
        return None
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(devices))  # read when JAX first looks for devices
    if framework_of(load_model(first.model, first.loss).model) != "torch":
        return None
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
    return subprocess.run([*command, "-m", "shardwright", *sys.argv[1:]], check=False).returncode


def run_result(plan: JobsPlan, given: GivenJobs, seed: int) -> tuple[JobsResult, bool]:
    """Train the jobs; what became of them, and whether this process is the one that says so.

    Raises:
        PlanError: the plan is of other jobs than the file, or jobs are of several frameworks.
        ShardwrightError: as `training_of` and `run_jobs` of their framework.
    """
    _require_same_jobs(plan, given)
    frameworks = dict.fromkeys(job.model.framework for job in given.jobs)
    if len(frameworks) > 1:
        raise PlanError(
            f"the jobs of the file are of {' and '.join(frameworks)}: give each framework a file of its own"
        )
    return (_run_in_jax if "jax" in frameworks else _run_in_torch)(plan, given, seed)


def _run_in_torch(plan: JobsPlan, given: GivenJobs, seed: int) -> tuple[JobsResult, bool]:
    require_framework("torch")
    from shardwright.backends.torch.jobs.from_file import training_of
    from shardwright.backends.torch.jobs.run_jobs import run_jobs
    from shardwright.backends.torch.machine.process import this_launch

    training = {}
    for row, job, model, function in zip(given.rows, given.jobs, given.models, given.functions, strict=True):
        training[row.name] = training_of(
            row.name, job.model, model.model, model.sample, model.loss, job.data, optimizer=row.optimizer,
            learning_rate=row.learning_rate, loss_is_mean=row.reduction == "mean", optimizer_of=function,
        )  # fmt: skip
    result = run_jobs(plan, training, seed=seed)
    return result, this_launch().rank == 0


def _run_in_jax(plan: JobsPlan, given: GivenJobs, seed: int) -> tuple[JobsResult, bool]:
    require_framework("jax")
    import jax

    from shardwright.backends.jax.jobs.from_file import training_of
    from shardwright.backends.jax.jobs.run_jobs import run_jobs

    training = {}
    for row, job, model, function in zip(given.rows, given.jobs, given.models, given.functions, strict=True):
        training[row.name] = training_of(
            row.name, job.model, model.model, model.loss, job.data, optimizer=row.optimizer,
            learning_rate=row.learning_rate, reduction=row.reduction, optimizer_of=function,
        )  # fmt: skip
    return run_jobs(plan, training, devices=jax.local_devices()[: plan.devices], seed=seed), True


def _require_same_jobs(plan: JobsPlan, given: GivenJobs) -> None:
    planned = {
        job.name: (job.steps, job.batch, job.microbatch, job.optimizer, job.clip_norm, job.output, job.precision)
        for job in plan.jobs
    }
    precisions = {job.name: job.precision for job in plan.jobs}
    wanted = {
        job.name: (
            job.steps, job.batch, job.microbatch or job.batch, job.optimizer, job.clip_norm, job.output,
            job.precision or precisions.get(job.name),
        )
        for job in given.jobs
    }  # fmt: skip
    for name in [*wanted, *planned]:
        if planned.get(name) != wanted.get(name):
            here, there = (of.get(name, "nothing") for of in (wanted, planned))
            raise PlanError(
                f"job {name!r}: the file says {here} and the plan {there} (steps, batch, microbatch, optimizer, "
                f"clip_norm, output, precision): plan the jobs of the file again"
            )


def to_document(result: JobsResult) -> dict[str, Any]:
    """What became of the jobs, as plain values."""
    return {
        "makespan_s": result.timeline.makespan_s,
        "jobs": {
            name: {"steps": len(own.losses), "losses": [list(row) for row in own.losses], "failure": own.failure}
            for name, own in result.jobs.items()
        },
    }


def result_view(plan: JobsPlan, result: JobsResult) -> RenderableType:
    """What became of the jobs, as a table."""
    from shardwright.report.tables import new_table

    table = new_table("Jobs", "job", ">steps", ">first loss", ">last loss", "saved at", "failure")
    for job in plan.jobs:
        own = result.jobs[job.name]
        first, last = (
            (f"{sum(row) / len(row):.4f}" for row in (own.losses[0], own.losses[-1])) if own.losses else ("", "")
        )
        table.add_row(
            Text(job.name), str(len(own.losses)), first, last, Text("" if own.failure else job.output or ""),
            Text(own.failure),
        )  # fmt: skip
    table.caption = f"{seconds_text(result.timeline.makespan_s)} on {plan.devices} devices"
    return table
