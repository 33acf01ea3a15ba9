"""A list of jobs on one device, in one process: whose pass runs next is the policy of their plan."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.jobs.job_run import Body, JobRun
from shardwright.core.errors import MissingCapabilityError, PlanError, few
from shardwright.core.jobs.jobs_plan import JobsPlan, PlannedJob
from shardwright.core.jobs.policies import OPTIMUM, queue_of
from shardwright.core.jobs.units import Unit
from shardwright.core.model.graph import Graph
from shardwright.core.schedule.timeline import Span, Timeline


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobTraining:
    """What a planned job trains: its model and optimizer, the body of its step, and its data.

    Args:
        graph: the captured model that the plan is of.
        model: the model; its weights are in the host's memory from then on.
        optimizer: made of the model's parameters.
        step: the body of a step for one microbatch, given the job's run and the microbatch's tensors: it calls
            ``run.model`` and gives the loss to ``run.backward(loss, weight=None, reduction=None)``.
        data: the batches, one for every step; each is a tensor, or several, with the samples in dim 0.
    """

    graph: Graph
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Body
    data: Iterable[torch.Tensor | Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of one job."""

    losses: tuple[tuple[float, ...], ...]
    """The loss of every microbatch of every step that has ended."""
    failure: str
    """Why it ended before its last step; "" where it did not."""


@dataclass(frozen=True, slots=True, eq=False)
class JobsResult:
    """What became of a list of jobs, and when their passes ran."""

    jobs: Mapping[str, JobResult]
    timeline: Timeline[Unit]
    """The measured times of all passes, with the copies before and behind them, as units of jobs."""


@dataclass(slots=True)
class _Running:
    """A job under way."""

    planned: PlannedJob
    run: JobRun
    batches: Iterator[Any]
    seconds: list[float]
    """Of each pass of a step, as planned."""
    left_s: float
    done: int = 0
    """The passes that have run."""
    losses: list[tuple[float, ...]] = field(default_factory=list)
    failure: str = ""

    @property
    def has_ended(self) -> bool:
        return bool(self.failure) or len(self.losses) == self.planned.steps

    def advance(self) -> None:
        """Run the next pass; a failure is noted, and ends this job alone."""
        at = self.done % len(self.planned.passes)
        try:
            if at == 0:
                self.run.begin(self._batch())
            self.run.run(self.planned.passes[at])
            if at + 1 == len(self.planned.passes):
                self._end_step()
        except Exception as error:  # whatever a user's step or data raise
            self.failure = f"step {len(self.losses)}: {type(error).__name__}: {error}"
        self.left_s -= self.seconds[at]
        self.done += 1

    def _batch(self) -> Sequence[torch.Tensor]:
        try:
            batch = next(self.batches)
        except StopIteration:
            raise PlanError(f"its data have ended, and it takes {self.planned.steps} steps") from None
        tensors = (batch,) if isinstance(batch, torch.Tensor) else batch
        if (
            not isinstance(tensors, Sequence)
            or not tensors
            or not all(isinstance(each, torch.Tensor) for each in tensors)
        ):
            raise PlanError(f"a batch is a {type(batch).__name__}: expected a tensor, or a sequence of tensors")
        return tensors

    def _end_step(self) -> None:
        losses = tuple(self.run.finish())
        if not all(map(math.isfinite, losses)):
            raise FloatingPointError(f"a loss is not finite ({', '.join(f'{loss:g}' for loss in losses)})")
        self.losses.append(losses)


def run_jobs(
    plan: JobsPlan, jobs: Mapping[str, JobTraining], *, device: torch.device | None = None, seed: int = 0
) -> JobsResult:
    """Train the jobs of a plan for one device, pass by pass, each as it would train alone.

    The models, optimizers and their states are left in the host's memory, trained. A job that fails, or whose loss is
    not finite, ends there, its weights as they are then; the others go on.

    Args:
        plan: the plan of the jobs.
        jobs: what each job trains, by its name in the plan.
        device: where passes run; None: the CPU.
        seed: of the random numbers of every job, and of the policy ``random``.

    Raises:
        PlanError: the plan names other jobs, two jobs train one model or optimizer, or a plan is of another model.
        MissingCapabilityError: a plan for several devices, or with outputs, the policy ``optimum``, or as `JobRun`.
    """
    _require_runnable(plan, jobs)
    running = [_begun(own, jobs[own.name], plan, device, seed) for own in plan.jobs]
    queue = queue_of(plan.policy, [0.0] * len(running), seed)
    for number, job in enumerate(running):
        queue.put(number, job.left_s)
    spans = list[Span[Unit]]()
    while (chosen := queue.take()) is not None:
        job = running[chosen]
        unit, begin_s = Unit(chosen, job.done), time.perf_counter()
        job.advance()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        spans.append(Span(0, unit, begin_s, time.perf_counter()))
        if not job.has_ended:
            queue.put(chosen, job.left_s)
    results = {job.planned.name: JobResult(tuple(job.losses), job.failure) for job in running}
    return JobsResult(results, Timeline.measured(spans, 1, lane="device"))


def _begun(own: PlannedJob, given: JobTraining, plan: JobsPlan, device: torch.device | None, seed: int) -> _Running:
    run = JobRun(own, given.graph, given.model, given.optimizer, given.step, device, seed)
    seconds = [each.run_s if plan.copies_beside else each.seconds(beside=False) for each in own.passes]
    return _Running(own, run, iter(given.data), seconds, sum(seconds) * own.steps)


def _require_runnable(plan: JobsPlan, jobs: Mapping[str, JobTraining]) -> None:
    """Raise ShardwrightError for a plan that is not run in one process, and for jobs that are not those of the plan."""
    if plan.devices > 1:
        raise MissingCapabilityError(
            f"the jobs are planned for {plan.devices} devices, and this version runs them on one: plan them for one"
        )
    if plan.policy == OPTIMUM:
        raise MissingCapabilityError("policy='optimum' is for simulations: take another, which the file may name")
    if saved := [own.name for own in plan.jobs if own.output is not None]:
        raise MissingCapabilityError(
            f"{few([repr(name) for name in saved])} name an output, and this version saves none: leave it out, and "
            f"save the model after the run"
        )
    names = [own.name for own in plan.jobs]
    if wrong := sorted(set(names) ^ set(jobs)):
        raise PlanError(f"{few([repr(name) for name in wrong])}: expected what each job of the plan trains, {names}")
    for what in ("model", "optimizer"):
        owners: dict[int, str] = {}
        for name, given in jobs.items():
            other = owners.setdefault(id(getattr(given, what)), name)
            if other != name:
                raise PlanError(f"jobs {other!r} and {name!r} train one {what}: give each its own")
