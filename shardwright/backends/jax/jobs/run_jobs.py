"""A list of jobs on the devices of one process: a thread for each device takes the pass that the policy says."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax

from shardwright.backends.jax.capture.tree import put_together
from shardwright.backends.jax.jobs.device_memory import DeviceMemory
from shardwright.backends.jax.jobs.planned_training import JobTraining, PlannedTraining, require_apart
from shardwright.backends.jax.jobs.programs import Devices
from shardwright.backends.jax.machine.mesh import require_devices
from shardwright.backends.jax.state.train_state import TrainState, parts_of
from shardwright.core.errors import ClusterError, MissingCapabilityError, PlanError, few
from shardwright.core.jobs import results
from shardwright.core.jobs.jobs_plan import JobsPlan
from shardwright.core.jobs.pass_order import PassOrder
from shardwright.core.jobs.policies import OPTIMUM
from shardwright.core.jobs.saved_job import require_output


@dataclass(frozen=True, slots=True, eq=False)
class JobResult(results.JobResult):
    """What became of one job."""

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
class JobsResult(results.JobsResult):
    """What became of a list of jobs, and when their passes ran, with what each device held meanwhile."""

    jobs: Mapping[str, JobResult]
    peak_bytes: tuple[int, ...]
    """The most bytes that each device held of jobs: arrays, and what programs took beside them."""


@dataclass(slots=True, eq=False)
class _Run:
    """All jobs under way, whose next passes the threads of the devices take in turn. ``trainings``: None of a job that
    could not begin."""

    trainings: Sequence[PlannedTraining | None]
    order: PassOrder
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_stopped: bool = False
    errors: list[BaseException] = field(default_factory=list)

    def drive(self, lane: int, memory: DeviceMemory) -> None:
        """Run passes on a device until none is left."""
        try:
            while (chosen := self._take(lane)) is not None:
                self._advance(chosen, memory)
        except BaseException as error:  # it is raised in the thread that waits
            with self.changed:
                self.errors.append(error)
                self.is_stopped = True
                self.changed.notify_all()

    def _take(self, lane: int) -> int | None:
        """The job whose pass is next, once there is one; None where there will be none."""
        with self.changed:
            while not self.is_stopped:
                chosen = self.order.take(lane)
                if chosen is not None:
                    return chosen
                if not self.order.is_running:
                    break
                self.changed.wait()
            return None

    def _advance(self, chosen: int, memory: DeviceMemory) -> None:
        """Run the next pass of a job. An error is noted, and ends this job alone."""
        training, failure = self.trainings[chosen], ""
        assert training is not None, "a job that has not begun is never taken"
        memory.job = chosen
        begin_s = time.perf_counter()
        try:
            training.run_pass(self.order.jobs[chosen].place[1], memory)
        except Exception as error:  # whatever a user's loss or data raise
            failure = _reason(len(training.losses), error)
            memory.release(chosen)
        end_s = time.perf_counter()
        with self.changed:
            self.order.end(chosen, begin_s, end_s, failure)
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
    had begun, as it is then; the others go on. A job with an output is saved there behind its last step.

    Args:
        plan: the plan of the jobs.
        jobs: what each job trains, by its name in the plan.
        devices: where passes run, as many as the plan is for; None: all of this process.
        seed: of the random numbers of every job, and of the policy ``random``.

    Raises:
        PlanError: the plan names other jobs, two of them take batches from one iterator, or an output that cannot be
            written to.
        ClusterError: another number of devices than the plan's, or devices of other processes.
        MissingCapabilityError: the policy ``optimum``.
    """
    _require_runnable(plan, jobs)
    on = _devices_of(plan, devices)
    shared = Devices(on)
    begun = [_begun(plan, number, jobs, shared, seed) for number in range(len(plan.jobs))]
    trainings = [each if isinstance(each, PlannedTraining) else None for each in begun]
    failures = {number: each for number, each in enumerate(begun) if isinstance(each, str)}
    run = _Run(trainings, PassOrder(plan, seed, failures))
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
    ended = (_result(training, job.failure) for training, job in zip(trainings, run.order.jobs, strict=True))
    return JobsResult(
        dict(zip((own.name for own in plan.jobs), ended, strict=True)),
        run.order.timeline(held),
        tuple(memory.peak_bytes for memory in memories),
    )


def _begun(
    plan: JobsPlan, number: int, jobs: Mapping[str, JobTraining], devices: Devices, seed: int
) -> PlannedTraining | str:
    """A job with its programs compiled, or why it cannot begin."""
    own = plan.jobs[number]
    try:
        training = PlannedTraining.of(plan, own, jobs[own.name], devices, seed)
        training.finish_compiling()
    except Exception as error:  # whatever a user's loss or data raise
        return _reason(0, error)
    return training


def _reason(step: int, error: Exception) -> str:
    return f"step {step}: {type(error).__name__}: {error}"


def _result(training: PlannedTraining | None, failure: str) -> JobResult:
    if training is None:
        return JobResult((), failure, None)
    return JobResult(tuple(training.losses), failure, training.run.state.as_train_state())


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
    names = [own.name for own in plan.jobs]
    if wrong := sorted(set(names) ^ set(jobs)):
        raise PlanError(f"{few([repr(name) for name in wrong])}: expected what each job of the plan trains, {names}")
    require_apart(jobs)
    for own in plan.jobs:
        if own.output is not None:
            require_output(own.name, own.output)
