"""One planned job under way: its model, data and programs, and how far it has come."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from shardwright.backends.jax.capture.samples import batch_size, of_no_mesh, resolve_batch_dims
from shardwright.backends.jax.capture.tree import take_apart
from shardwright.backends.jax.jobs.device_memory import DeviceMemory
from shardwright.backends.jax.jobs.host_state import HostState
from shardwright.backends.jax.jobs.job_run import JobRun
from shardwright.backends.jax.jobs.optimizer_parts import OptimizerParts, UpdateFunctions, require_updates
from shardwright.backends.jax.jobs.programs import TRACING, Devices, JobPrograms, job_programs
from shardwright.backends.jax.jobs.saved_job import save_job
from shardwright.backends.jax.loss.microbatches import LossFunction
from shardwright.backends.jax.machine.mesh import no_mesh
from shardwright.backends.jax.pipeline.microbatch import CutMicrobatch
from shardwright.backends.jax.program.python_values import PythonValues, with_values
from shardwright.backends.jax.state.checks import require_model
from shardwright.backends.jax.training.arguments import require_functions
from shardwright.backends.jax.training.compiled_steps import CompiledSteps
from shardwright.core.errors import MissingCapabilityError, PlanError
from shardwright.core.jobs.as_stages import shards_as_stages
from shardwright.core.jobs.jobs_plan import JobsPlan, PlannedJob
from shardwright.core.model.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobTraining:
    """What a planned job trains: its model and optimizer, its loss, and its data.

    Args:
        graph: the captured model that the plan is of.
        model: what `TrainStep.init` takes: an NNX module, or a pytree of parameters. It is copied to the host's memory.
        loss: the loss function, as `train_step` takes it; it is handed one microbatch at a time.
        optimizer: an optax transformation. Where the job is planned with clip_norm, gradients are clipped to it, by the
            optimizer itself if it looks at the norm of all gradients, else before the optimizer.
        data: the batches, one for every step.
        state: what a plain loss function keeps beside its parameters.
        batch_dims, reduction: as in `train_step`.
    """

    graph: Graph
    model: Any
    loss: Callable[..., Any]
    optimizer: optax.GradientTransformation
    data: Iterable[Any]
    state: Any = None
    batch_dims: Any = None
    reduction: str | None = None


@dataclass(slots=True, eq=False)
class PlannedTraining:
    """A job that is planned, and what it trains."""

    planned: PlannedJob
    given: JobTraining
    devices: Devices
    run: JobRun
    loss: LossFunction
    steps: CompiledSteps
    stages: Any
    """The plan of the pipeline whose stages are the job's shards."""
    batches: Iterator[Any]
    losses: list[tuple[float, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, plan: JobsPlan, own: PlannedJob, given: JobTraining, devices: Devices, seed: int) -> "PlannedTraining":
        """The job, ready for its first step, with programs for its first batch under compilation. Raises
        ShardwrightError for a model, loss, optimizer or data that are not the plan's, or that cannot be cut so."""
        if own.precision != "fp32":
            raise MissingCapabilityError(
                f"job {own.name!r} is planned in {own.precision}, and jobs in shards compute in fp32 in this version: "
                f"plan it with precision='fp32'"
            )
        require_functions(given.loss, given.optimizer, given.reduction)
        stages = shards_as_stages(own, given.graph, plan.cluster)
        with no_mesh(), TRACING:
            parts = take_apart(given.model, seed, given.state)
            if parts.is_abstract:
                raise PlanError(f"job {own.name!r}: its model has shapes without values: give it arrays")
            require_model(stages, parts)
            python = PythonValues.of(given.loss)
            if isinstance(given.model, nnx.Module):
                python.follow(given.model)
            loss = LossFunction.of(given.loss, stages, reduction=given.reduction, python=python)
            state = HostState.of(parts, given.optimizer)
        found = cls(own, given, devices, JobRun(own, state), loss, CompiledSteps(python), stages, iter(given.data))
        first = found._next_batch()
        found._programs(first)
        found.batches = chain([first], found.batches)
        return found

    def finish_compiling(self) -> None:
        """Wait until all programs of the first step are compiled."""
        for step in self.steps:
            programs: Any = step
            programs.finish(self.devices.devices)

    def run_pass(self, at: int, memory: DeviceMemory) -> None:
        """Run a pass of a step, by its number, on a device. Behind the last one a job with an output is saved."""
        if at == 0:
            with TRACING:
                programs, leaves = self._programs(self._next_batch())
            self.run.begin(programs, leaves)
        self.run.run(self.planned.passes[at], memory)
        if at + 1 == len(self.planned.passes):
            self.losses.append(self.run.finish(memory))
            if len(self.losses) == self.planned.steps and self.planned.output is not None:
                save_job(self.planned.output, self.run.state.as_train_state(), self.losses)

    def _next_batch(self) -> Any:
        try:
            return next(self.batches)
        except StopIteration:
            raise PlanError(f"its data have ended, and it takes {self.planned.steps} steps") from None

    def _programs(self, batch: Any) -> tuple[JobPrograms, tuple[Any, ...]]:
        """The programs for a batch, and the batch's leaves. Raises PlanError for another number of samples than
        planned."""
        with no_mesh():
            dims = resolve_batch_dims(batch, self.given.batch_dims)
            if (samples := batch_size(batch, dims)) != self.planned.batch:
                raise PlanError(
                    f"job {self.planned.name!r} is planned for batches of {self.planned.batch} samples, and one of "
                    f"{samples} came"
                )
            batch = jax.tree.map(of_no_mesh, batch)
            leaves, structure = jax.tree.flatten(batch)
            form = structure, dims, tuple((np.shape(leaf), jax.numpy.result_type(leaf)) for leaf in leaves)
            parts = self.run.state.parts

            def compile_step(values: list[np.ndarray[Any, Any]], known: Any) -> Any:
                given = with_values(batch, dims, values)
                labels = [shard.activations for shard in self.planned.shards]
                found = known or job_programs(self.loss, self.stages, parts, given, labels, self._updates, self.devices)
                return found, given.leaves

            found: Any = self.steps.find(form, parts.graphdef, compile_step)
            return found  # type: ignore[no-any-return]

    def _updates(self, micro: CutMicrobatch) -> UpdateFunctions:
        """The optimizer's update, divided by the shards of a cut."""
        own, weights = self.planned, micro.cut.weights
        homes = [weight.holding.stage for weight in sorted(weights, key=lambda weight: weight.holding.leaf)]
        if self.run.waits:
            require_updates(own.name, homes, [each.shard for each in own.passes if each.kind == "update"])
        live = sorted(weight.holding.leaf for weight in weights if weight.value in micro.cut.live)
        return OptimizerParts(
            own.name, self.given.optimizer, self.run.state.parts.params, homes, live, micro.divisor, own.clip_norm,
            self.run.waits,
        ).functions()  # fmt: skip


def require_apart(jobs: Mapping[str, JobTraining]) -> None:
    """Raise PlanError where two jobs read the same data, an iterator that each would take batches away from."""
    owners: dict[int, str] = {}
    for name, given in jobs.items():
        if not isinstance(given.data, Iterator):
            continue
        other = owners.setdefault(id(given.data), name)
        if other != name:
            raise PlanError(f"jobs {other!r} and {name!r} take batches from one iterator: give each its own")
