"""A list of jobs on the devices of their plan: whose pass runs next is the plan's policy."""

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from shardwright.backends.torch.jobs.shared_run import SharedRun, ranks_of_launch
from shardwright.backends.torch.jobs.training import JobTraining, RunningJob
from shardwright.backends.torch.machine.process import choose_device, this_launch
from shardwright.core.errors import ClusterError, MissingCapabilityError, PlanError, few
from shardwright.core.jobs.jobs_plan import JobsPlan
from shardwright.core.jobs.pass_order import PassOrder
from shardwright.core.jobs.policies import OPTIMUM
from shardwright.core.jobs.results import JobsResult
from shardwright.core.jobs.saved_job import require_output

TIMEOUT_S = 60.0
"""The time in seconds that a process may give no sign of life."""


def run_jobs(
    plan: JobsPlan,
    jobs: Mapping[str, JobTraining],
    *,
    device: torch.device | None = None,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> JobsResult:
    """Train the jobs of a plan, pass by pass, each as it would train alone.

    Of a plan for several devices every device has a process, which torchrun starts, all on one host, and all call this
    with the same jobs: the first process's weights are taken. Models, optimizers and their states are left in the
    host's memory, trained, in every process, and the result is the same in all. A job that fails, or whose loss is not
    finite, ends there, its weights as they are then; the others go on. A job with an output is saved there when its
    last step has ended.

    Args:
        plan: the plan of the jobs.
        jobs: what each job trains, by its name in the plan.
        device: where passes run; None: of a plan for several devices this process's own, else the CPU.
        seed: of the random numbers of every job, and of the policy ``random``.
        timeout_s: the time that another process may give no sign of life.

    Raises:
        PlanError: the plan names other jobs, two jobs train one model or optimizer or read one iterator, a plan is of
            another model, or an output cannot be written.
        MissingCapabilityError: the policy ``optimum``, or as `JobRun`.
        ClusterError: another number of processes than the plan has devices, or processes on several hosts.
        DisagreementError: the processes have different plans, seeds, models or data.
        PeerError: another process is gone.
    """
    if plan.devices == 1:
        _require_runnable(plan, jobs)
        return _in_one_process(plan, jobs, device, seed)
    _require_ranks(plan)
    device, failure = device or choose_device(this_launch()), None
    try:
        _require_runnable(plan, jobs)
    except Exception as error:
        failure = error  # which the other ranks are told
    shared = SharedRun(plan, device, seed, timeout_s, failure)
    try:
        found = _over_processes(shared, jobs, device, seed)
    except BaseException as error:
        shared.leave(error)
        raise
    shared.leave()
    return found


def _in_one_process(
    plan: JobsPlan, jobs: Mapping[str, JobTraining], device: torch.device | None, seed: int
) -> JobsResult:
    running = [RunningJob(own, jobs[own.name], device, seed, None) for own in plan.jobs]
    for job in running:
        job.prepare()
    order = PassOrder(plan, seed)
    while (chosen := order.take(0)) is not None:
        begin_s = time.perf_counter()
        failure = running[chosen].advance(*order.jobs[chosen].place)
        _synchronize(device)
        order.end(chosen, begin_s, time.perf_counter(), failure)
    return _result(running, order)


def _over_processes(shared: SharedRun, jobs: Mapping[str, JobTraining], device: torch.device, seed: int) -> JobsResult:
    running = list[RunningJob]()

    def begin() -> None:
        for own, host in zip(shared.plan.jobs, shared.hosts, strict=True):
            running.append(RunningJob(own, jobs[own.name], device, seed, host))
            host.tell()

    if shared.rank == 0:
        begin()
    shared.meet("the first has put its models into the host's memory")
    if shared.rank > 0:
        begin()
    for job in running:
        job.prepare()
    shared.meet("all are prepared")

    def run(job: int, step: int, at: int) -> str:
        failure = running[job].advance(step, at)
        _synchronize(device)
        return failure

    shared.passes(run)
    result = _result(running, shared.order)
    shared.meet("all jobs have ended")
    for host, job in zip(shared.hosts, running, strict=True):
        host.keep_apart()
        job.run.state.keep_apart()
    return result


def _result(running: Sequence[RunningJob], order: PassOrder) -> JobsResult:
    for job in running:
        job.end()
    found = {job.planned.name: job.result(own.failure) for job, own in zip(running, order.jobs, strict=True)}
    return JobsResult(found, order.timeline())


def _synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def _require_ranks(plan: JobsPlan) -> None:
    """Raise ClusterError unless there is a process for each device of a plan."""
    ranks = ranks_of_launch()
    if ranks != plan.devices:
        this = "this is one process" if ranks == 1 else f"there are {ranks} processes"
        raise ClusterError(
            f"the jobs are planned for {plan.devices} devices, and {this}: start one for each device, with torchrun "
            f"--nproc-per-node {plan.devices}, or plan the jobs for {ranks}"
        )


def _held_by(given: JobTraining) -> Iterator[tuple[str, object]]:
    """What no other job may have, and what to say where one does."""
    yield "train one model", given.model
    yield "train one optimizer", given.optimizer
    for name, tensor in (*given.model.named_parameters(), *given.model.named_buffers()):
        yield f"hold one tensor, {name}", tensor
    data = getattr(given.data, "source", given.data)
    if isinstance(data, Iterator):
        yield "take batches from one iterator", data


def _require_runnable(plan: JobsPlan, jobs: Mapping[str, JobTraining]) -> None:
    """Raise ShardwrightError for a plan that is not run, and for jobs that are not those of the plan."""
    if plan.policy == OPTIMUM:
        raise MissingCapabilityError("policy='optimum' is for simulations: take another, which the file may name")
    names = [own.name for own in plan.jobs]
    if wrong := sorted(set(names) ^ set(jobs)):
        raise PlanError(f"{few([repr(name) for name in wrong])}: expected what each job of the plan trains, {names}")
    owners: dict[int, str] = {}
    for name, given in jobs.items():
        for what, held in _held_by(given):
            if (other := owners.setdefault(id(held), name)) != name:
                raise PlanError(f"jobs {other!r} and {name!r} {what}: give each its own")
    for own in plan.jobs:
        if own.output is not None:
            require_output(own.name, own.output)
