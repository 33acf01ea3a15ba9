"""A list of jobs on the devices of one process: a thread for each device takes the pass that the policy says."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax

from shardwright.backends.jax.capture.tree import put_together
from shardwright.backends.jax.jobs.device_memory import DeviceMemory
from shardwright.backends.jax.jobs.planned_training import JobTraining, PlannedTraining, planned_seconds, require_apart
from shardwright.backends.jax.jobs.programs import Devices
from shardwright.backends.jax.machine.mesh import require_devices
from shardwright.backends.jax.state.train_state import TrainState, parts_of
from shardwright.core.errors import ClusterError, MissingCapabilityError, PlanError, few
from shardwright.core.jobs.jobs_plan import JobsPlan
from shardwright.core.jobs.policies import OPTIMUM, JobQueue, queue_of
from shardwright.core.jobs.units import Unit
from shardwright.core.schedule.timeline import Span, Timeline


@dataclass(frozen=True, slots=True, eq=False)
class JobResult:
    """What became of one job."""

    losses: tuple[tuple[float, ...], ...]
    """The loss of every microbatch of every step that has ended."""
    failure: str
    """Why it ended before its last step; "" where it did not."""
    state: TrainState | None
    """The state of training behind its last step, with arrays in the host's memory; `TrainStep.place` takes it. None
    where the job failed before its first step."""

    @property
    def model(self) -> object:
        """The trained model as it was given: an NNX module, or a pytree of parameters. Raises PlanError without a
        state."""
        if self.state is None:
            raise PlanError(f"the job has not begun: {self.failure}")
        return put_together(parts_of(self.state))


@dataclass(frozen=True, slots=True, eq=False)
class JobsResult:
    """What became of a list of jobs, and when their passes ran."""

    jobs: Mapping[str, JobResult]
    timeline: Timeline[Unit]
    """The measured times of all passes, with the copies before and behind them, as units of jobs, and what each device
    held meanwhile."""
    peak_bytes: tuple[int, ...]
    """The most bytes that each device held of jobs: arrays, and what programs took beside them."""


@dataclass(slots=True, eq=False)
class _Job:
    """A job under way. ``training`` is None where it could not begin."""

    training: PlannedTraining | None
    seconds: Sequence[float]
    left_s: float
    failure: str = ""


@dataclass(slots=True, eq=False)
class _Run:
    """All jobs under way, whose next passes the threads of the devices take in turn."""

    jobs: Sequence[_Job]
    queue: JobQueue
    changed: threading.Condition = field(default_factory=threading.Condition)
    in_flight: int = 0
    is_stopped: bool = False
    spans: list[Span[Unit]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def drive(self, lane: int, memory: DeviceMemory) -> None:
        """Run passes on a device until none is left."""
        try:
            while (chosen := self._take()) is not None:
                self._advance(chosen, lane, memory)
        except BaseException as error:  # it is raised in the thread that waits
            with self.changed:
                self.errors.append(error)
                self.is_stopped = True
                self.changed.notify_all()

    def _take(self) -> int | None:
        """The job whose pass is next, once there is one; None where there will be none."""
        with self.changed:
            while not self.is_stopped:
                chosen = self.queue.take()
                if chosen is not None:
                    self.in_flight += 1
                    return chosen
                if not self.in_flight:
                    break
                self.changed.wait()
            return None

    def _advance(self, chosen: int, lane: int, memory: DeviceMemory) -> None:
        """Run the next pass of a job. An error is noted, and ends this job alone."""
        job = self.jobs[chosen]
        training = job.training
        assert training is not None, "a job that has not begun is in no queue"
        memory.job = chosen
        unit, begin_s = Unit(chosen, training.done), time.perf_counter()
        try:
            training.advance(memory)
        except Exception as error:  # whatever a user's loss or data raise
            job.failure = _reason(len(training.losses), error)
            memory.release(chosen)
        end_s = time.perf_counter()
        job.left_s -= job.seconds[training.done % len(job.seconds)]
        training.done += 1
        with self.changed:
            self.spans.append(Span(lane, unit, begin_s, end_s))
            self.in_flight -= 1
            if not (job.failure or training.has_ended):
                self.queue.put(chosen, job.left_s)
            self.changed.notify_all()

    def stop(self) -> None:
        """Take no further passes."""
        with self.changed:
            self.is_stopped = True
            self.changed.notify_all()


def run_jobs(
    plan: JobsPlan, jobs: Mapping[str, JobTraining], *, devices: Sequence[jax.Device] | None = None, seed: int = 0
) -> JobsResult:
    """Train the jobs of a plan, pass by pass, each as it would train alone.

    Each device has a thread, which takes the pass that the plan's policy says, whenever the device is free. What jobs
    hold of a device is counted, and a pass that would hold more than the plan's budget ends its job. A job that fails,
    whose data end, or whose loss is not finite, ends there, its state as it was behind its last step or, where updates
    had begun, as it is then; the others go on.

    Args:
        plan: the plan of the jobs.
        jobs: what each job trains, by its name in the plan.
        devices: where passes run, as many as the plan is for; None: all of this process.
        seed: of the random numbers of every job, and of the policy ``random``.

    Raises:
        PlanError: the plan names other jobs, or two of them take batches from one iterator.
        ClusterError: another number of devices than the plan's, or devices of other processes.
        MissingCapabilityError: a plan with outputs, or the policy ``optimum``.
    """
    _require_runnable(plan, jobs)
    on = _devices_of(plan, devices)
    shared = Devices(on)
    running = [_begun(plan, number, jobs, shared, seed) for number in range(len(plan.jobs))]
    queue = queue_of(plan.policy, [0.0] * len(running), seed)
    for number, job in enumerate(running):
        if not job.failure:
            queue.put(number, job.left_s)
    run = _Run(running, queue)
    memories = [DeviceMemory(device, plan.budget_bytes) for device in on]
    threads = [
        threading.Thread(target=run.drive, args=(lane, memory), name=f"jobs on {memory.device}", daemon=True)
        for lane, memory in enumerate(memories)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        run.stop()
        shared.compiler.cancel()
    if run.errors:
        raise run.errors[0]
    held = [memory.use.over_time() for memory in memories]
    return JobsResult(
        {own.name: _result(job) for own, job in zip(plan.jobs, running, strict=True)},
        Timeline.measured(run.spans, len(on), held=held, lane="device"),
        tuple(memory.peak_bytes for memory in memories),
    )


def _begun(plan: JobsPlan, number: int, jobs: Mapping[str, JobTraining], devices: Devices, seed: int) -> _Job:
    """A job with its programs compiled, or why it cannot begin."""
    own = plan.jobs[number]
    seconds = planned_seconds(own, copies_beside=plan.copies_beside)
    try:
        training = PlannedTraining.of(plan, own, jobs[own.name], devices, seed)
        training.finish_compiling()
    except Exception as error:  # whatever a user's loss or data raise
        return _Job(None, seconds, 0.0, _reason(0, error))
    return _Job(training, seconds, sum(seconds) * own.steps)


def _reason(step: int, error: Exception) -> str:
    return f"step {step}: {type(error).__name__}: {error}"


def _result(job: _Job) -> JobResult:
    if job.training is None:
        return JobResult((), job.failure, None)
    return JobResult(tuple(job.training.losses), job.failure, job.training.run.state.as_train_state())


def _devices_of(plan: JobsPlan, devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """The devices of a run. Raises ClusterError for another number than the plan's, or for other processes'."""
    given = jax.local_devices() if devices is None else require_devices(devices)
    if any(device.process_index != jax.process_index() for device in given):
        raise ClusterError("jobs run on devices of one process, and some of those given are other processes'")
    if len(given) != plan.devices or len(set(given)) != len(given):
        raise ClusterError(
            f"the jobs are planned for {plan.devices} devices, and {len(set(given))} are given: give as many with "
            f"devices=jax.devices()[:{plan.devices}], or plan the jobs for them"
        )
    return given


def _require_runnable(plan: JobsPlan, jobs: Mapping[str, JobTraining]) -> None:
    """Raise ShardwrightError for a plan that cannot be run, and for jobs that are not those of the plan."""
    if not isinstance(plan, JobsPlan):
        raise PlanError(f"run_jobs takes a plan of jobs, not a {type(plan).__name__}: give what plan_jobs returned")
    if plan.policy == OPTIMUM:
        raise MissingCapabilityError("policy='optimum' is for simulations: take another, which the file may name")
    if saved := [own.name for own in plan.jobs if own.output is not None]:
        raise MissingCapabilityError(
            f"{few([repr(name) for name in saved])} name an output, and run_jobs saves none: leave it out, and save "
            f"the state that the result has"
        )
    names = [own.name for own in plan.jobs]
    if wrong := sorted(set(names) ^ set(jobs)):
        raise PlanError(f"{few([repr(name) for name in wrong])}: expected what each job of the plan trains, {names}")
    require_apart(jobs)
