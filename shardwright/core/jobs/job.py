"""Jobs: independent models that train on the same devices, each as it would alone."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.core.errors import PlanError, few
from shardwright.core.model.graph import Graph
from shardwright.core.plan.decision import OptimizerName, near_multiple
from shardwright.core.tables.memory import Precision, SumPrecision
from shardwright.core.values.fields import Count, Rate, require_fields
from shardwright.core.values.text_files import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One model, its data, its optimizer, and how long it trains.

    Attributes:
        name: the name of the job; no other job of a list has it.
        model: the captured model.
        steps: optimizer steps.
        batch: samples per step.
        microbatch: samples that pass a shard at once; None: the whole batch.
        optimizer: the optimizer whose states are counted.
        clip_norm: the norm over all gradients to which they are clipped; None: they are not clipped.
        precision: as in `plan`; None: the fastest of the devices.
        gradient_precision: as in `plan`.
        data: the batches, one for every step; where it tells how many there are (``len``), they must suffice.
        output: where the trained model is saved; no other job of a list is saved there.

    Raises:
        PlanError: a field is none that it may be, or the batch is not a multiple of the microbatch.
    """

    name: str
    model: Graph
    steps: Count
    batch: Count
    microbatch: Count | None = None
    optimizer: OptimizerName = "adamw"
    clip_norm: Rate | None = None
    precision: Precision | None = None
    gradient_precision: SumPrecision | None = None
    data: Any = None
    output: str | None = None

    def __post_init__(self) -> None:
        for field in ("name", "output"):
            require_name(field, getattr(self, field))
        if not isinstance(self.model, Graph):
            raise PlanError(
                f"job {self.name!r}: its model is a {type(self.model).__name__}: expected a captured graph; call "
                f"shardwright.capture first"
            )
        try:
            require_fields(self, PlanError)
        except PlanError as error:
            raise PlanError(f"job {self.name!r}: {error}") from error
        require_whole_microbatches(self.name, self.batch, self.microbatch)

    @property
    def microbatches(self) -> int:
        """The microbatches of a step."""
        return self.batch // (self.microbatch or self.batch)

    @property
    def batches(self) -> int | None:
        """The number of batches in the data; None where it is not known before they have been read."""
        try:
            return len(self.data)
        except TypeError:
            return None


def require_name(field: str, value: object) -> None:
    """Raise PlanError unless a job may have this name, or be saved there."""
    if value is None and field == "output":
        return
    if not isinstance(value, str) or not value.strip():
        raise PlanError(f"{field}={value!r} of a job: expected a text that is not empty")
    try:
        printable(value)
    except ValueError as error:
        raise PlanError(f"{field}={value!r} of a job {error}: leave it out") from error


def require_whole_microbatches(name: str, batch: int, microbatch: int | None) -> None:
    """Raise PlanError unless a job's batch is made of whole microbatches."""
    if microbatch is not None and batch % microbatch:
        raise PlanError(
            f"job {name!r}: batch={batch} is not a multiple of microbatch={microbatch}: use "
            f"batch={near_multiple(batch, microbatch)}, or another microbatch"
        )


def require_jobs(jobs: object) -> tuple[Job, ...]:
    """The jobs of a list. Raises PlanError for what is no list of jobs, for an empty one, for two jobs of one name or
    one output, and for data that end before the steps do."""
    if not isinstance(jobs, Sequence) or isinstance(jobs, str):
        raise PlanError(f"plan_jobs takes a list of jobs, not a {type(jobs).__name__}")
    for job in jobs:
        if not isinstance(job, Job):
            raise PlanError(f"plan_jobs takes a list of jobs, and {type(job).__name__} is none: make each a Job")
    require_apart([(job.name, job.output) for job in jobs])
    for job in jobs:
        require_data(job.name, job.steps, job.batches)
    return tuple(jobs)


def require_apart(jobs: Sequence[tuple[str, str | None]]) -> None:
    """Raise PlanError unless there are jobs, given by their names and outputs, and no two have the same."""
    if not jobs:
        raise PlanError("there are no jobs: give at least one")
    names = [name for name, _ in jobs]
    if twice := list(dict.fromkeys(name for name in names if names.count(name) > 1)):
        raise PlanError(f"{few([repr(name) for name in twice])}: several jobs have this name; each needs its own")
    saved: dict[str, str] = {}
    for name, output in jobs:
        if output is None:
            continue
        where = os.path.abspath(output)
        if where in saved:
            raise PlanError(
                f"jobs {saved[where]!r} and {name!r} are both saved at {output}: one would overwrite the other; give "
                f"each an output of its own"
            )
        saved[where] = name


def require_data(name: str, steps: int, batches: int | None) -> None:
    """Raise PlanError for data that are known to end before a job's steps do."""
    if batches is not None and batches < steps:
        raise PlanError(
            f"job {name!r}: its data have {batches} batches, and it takes {steps} steps: give steps={batches}, or data "
            f"that begin anew when they end"
        )
