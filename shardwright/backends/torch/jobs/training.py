"""A job under way: its run, its data, and what is saved of it."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shardwright.backends.torch.jobs.host_tensors import HostTensors
from shardwright.backends.torch.jobs.job_run import Body, JobRun
from shardwright.backends.torch.jobs.saved_job import save_job
from shardwright.backends.torch.machine.digests import fingerprint
from shardwright.core.errors import DisagreementError, PlanError
from shardwright.core.jobs.jobs_plan import PlannedJob
from shardwright.core.jobs.results import JobResult
from shardwright.core.model.graph import Graph


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
        schedulers: the learning-rate schedules of the optimizer, which go on by one behind every step.
    """

    graph: Graph
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Body
    data: Iterable[torch.Tensor | Sequence[torch.Tensor]]
    schedulers: Sequence[LRScheduler] = ()


class RunningJob:
    """A job under way in this process, and maybe in others."""

    def __init__(
        self, planned: PlannedJob, given: JobTraining, device: torch.device | None, seed: int, host: HostTensors | None
    ) -> None:
        self.planned = planned
        self.run = JobRun(
            planned, given.graph, given.model, given.optimizer, given.step, device, seed, given.schedulers, host
        )
        self.host = self.run.host
        self._batches: Iterator[Any] = iter(given.data)
        self._read = 0
        """The batches that were read here."""
        self._first: Any = None
        if self.host.is_shared:
            self.run.require_same_options()
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Read the first batch ahead. Raises DisagreementError where another process has another one."""
        try:
            first = next(self._batches)
        except StopIteration:
            return
        except Exception as error:  # comes again in the first step
            self._batches = _raising(error)
            return
        self._batches = itertools.chain([first], self._batches)
        self._first = first
        if self.host.is_shared and _is_batch(first):
            self._require_same(0, _of(first))

    def prepare(self) -> None:
        """Record the body of the step ahead of the first, on the first batch. What fails here fails again in the first
        step."""
        first, self._first = self._first, None
        try:
            self.run.prepare(_tensors(first))
        except Exception:  # whatever a user's step raises
            return

    def advance(self, step: int, at: int) -> str:
        """Run a pass of a step; returns why the job ends there, or "". A failure ends this job alone."""
        passes = self.planned.passes
        try:
            self.run.take_up()
            if at == 0:
                self.run.begin(self._batch(step))
            self.run.run(passes[at])
            if at + 1 == len(passes):
                losses = self.run.finish()
                self.host.note(f"losses of step {step}", losses)
                if step + 1 == self.planned.steps and self.planned.output is not None:
                    self._save(self.planned.output)
        except Exception as error:  # whatever a user's step or data raise
            return f"step {step}: {type(error).__name__}: {error}"
        finally:
            self.host.tell()
        return ""

    def _save(self, output: str) -> None:
        """Save the model, the optimizer and the losses, behind the last step."""
        self.run.close()
        save_job(output, self.run.model, self.run.state.optimizer, self.result("").losses)

    def _batch(self, step: int) -> Sequence[torch.Tensor]:
        """The batch of a step; those of steps that began elsewhere are read and left.

        Raises DisagreementError where another process had another batch for one of them."""
        while True:
            try:
                tensors = _tensors(next(self._batches))
            except StopIteration:
                raise PlanError(f"its data have ended, and it takes {self.planned.steps} steps") from None
            number, self._read = self._read, self._read + 1
            if not self.host.is_shared:
                return tensors
            self._require_same(number, tensors)
            if number == step:
                return tensors

    def _require_same(self, step: int, batch: Sequence[torch.Tensor]) -> None:
        """Raise DisagreementError where another process had another batch for a step."""
        prints = [fingerprint(tensor) for tensor in batch]
        if self.host.noted(key := f"data of step {step}", prints) != prints:
            raise DisagreementError(
                f"job {self.planned.name!r}: the data of step {step} are others than in another process: give all the "
                f"same batches in the same order, shuffled from one seed"
            )
        self.host.note(key, prints)

    def end(self) -> None:
        """Leave the model and the optimizer on the host."""
        self.run.state.take_up(self.host.read())
        self.run.close()

    def result(self, failure: str) -> JobResult:
        """What became of the job."""
        rows = (self.host.noted(f"losses of step {step}") for step in range(self.run.steps_run))
        return JobResult(tuple(tuple(row) for row in rows), failure)


def _raising(error: Exception) -> Iterator[Any]:
    yield from ()
    raise error


def _tensors(batch: Any) -> Sequence[torch.Tensor]:
    """The tensors of a batch. Raises PlanError for what is none."""
    if not _is_batch(batch):
        raise PlanError(f"a batch is a {type(batch).__name__}: expected a tensor, or a sequence of tensors")
    return tuple(_of(batch))


def _is_batch(batch: Any) -> bool:
    tensors = _of(batch)
    return isinstance(tensors, Sequence) and bool(tensors) and all(isinstance(t, torch.Tensor) for t in tensors)


def _of(batch: Any) -> Any:
    return (batch,) if isinstance(batch, torch.Tensor) else batch
