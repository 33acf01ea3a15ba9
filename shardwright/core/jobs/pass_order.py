"""Whose pass runs next while the jobs of a plan are trained: the decisions of the plan's policy, one after another.

What is decided follows from the order of events alone, so that processes which see the same events decide alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shardwright.core.jobs.jobs_plan import JobsPlan
from shardwright.core.jobs.policies import queue_of
from shardwright.core.jobs.units import Unit
from shardwright.core.schedule.timeline import MemoryOverTime, Span, Timeline


@dataclass(slots=True)
class Progress:
    """How far a job has come."""

    passes: int
    """The passes of a step."""
    steps: int
    left_s: float
    """Seconds of work that it has left, as planned."""
    done: int = 0
    """The passes that have run."""
    device: int | None = None
    """The device that runs its next pass; None where none does."""
    failure: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """The step and the pass within it that come next."""
        return divmod(self.done, self.passes)

    @property
    def has_ended(self) -> bool:
        return bool(self.failure) or self.done == self.passes * self.steps


class PassOrder:
    """The order of the passes of a plan's jobs, which all begin at once, as `simulate_jobs` decides it too.

    Args:
        seed: of the policy ``random``.
        failures: why jobs cannot begin, by their number.

    Raises:
        ScheduleError: a policy that is no queue.
    """

    def __init__(self, plan: JobsPlan, seed: int = 0, failures: Mapping[int, str] = MappingProxyType({})) -> None:
        self.devices = plan.devices
        self._seconds = [
            [each.run_s if plan.copies_beside else each.seconds(beside=False) for each in own.passes]
            for own in plan.jobs
        ]
        self.jobs = [
            Progress(len(own.passes), own.steps, sum(seconds * own.steps))
            for own, seconds in zip(plan.jobs, self._seconds, strict=True)
        ]
        self._queue = queue_of(plan.policy, [0.0] * len(self.jobs), seed)
        for number, job in enumerate(self.jobs):
            job.failure = failures.get(number, "")
            if not job.has_ended:
                self._queue.put(number, job.left_s)
        self.spans = list[Span[Unit]]()

    @property
    def is_over(self) -> bool:
        """Whether every job has ended."""
        return all(job.has_ended for job in self.jobs)

    def take(self, device: int) -> int | None:
        """The job whose next pass a device runs; None where none may run now."""
        chosen = self._queue.take()
        if chosen is not None:
            self.jobs[chosen].device = device
        return chosen

    def end(self, number: int, start_s: float, end_s: float, failure: str = "") -> None:
        """A job's pass has ended, or failed with the job."""
        job = self.jobs[number]
        assert job.device is not None
        self.spans.append(Span(job.device, Unit(number, job.done), start_s, end_s))
        job.left_s -= self._seconds[number][job.done % job.passes]
        job.done += 1
        job.device, job.failure = None, failure
        if not job.has_ended:
            self._queue.put(number, job.left_s)

    @property
    def is_running(self) -> bool:
        """Whether a device runs a pass."""
        return any(job.device is not None for job in self.jobs)

    def timeline(self, held: Sequence[MemoryOverTime] | None = None) -> Timeline[Unit]:
        """When the passes ran, by device. ``held``: what each device held meanwhile, as for `Timeline.measured`."""
        return Timeline.measured(self.spans, self.devices, held=held, lane="device")
