"""A list of jobs as a TOML file: a table ``[[jobs]]`` for each, with its model and data as FILE.py:FUNCTION.

[[jobs]]
name = "lr-1e-3"
model = "models.py:gpt2"
steps = 1000
batch = 8
clip_norm = 1.0
learning_rate = 1e-3
data = "data.py:batches"
output = "runs/lr-1e-3"
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from shardwright.core.cluster.hardware.profile_fields import read_toml
from shardwright.core.errors import ClusterError, PlanFileError, nearest
from shardwright.core.jobs.job import require_apart
from shardwright.core.plan.file import problem_of
from shardwright.core.values.text_files import path_of


class JobRow(BaseModel):
    """One job of a file: the arguments of `Job`, with files and functions in place of model and data, and what `jobs
    run` takes beside."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    model: str
    steps: int
    batch: int
    loss: str | None = None
    microbatch: int | None = None
    optimizer: str = "adamw"
    clip_norm: float | None = None
    precision: str | None = None
    gradient_precision: str | None = None
    data: str | None = None
    output: str | None = None
    learning_rate: float | None = None
    reduction: Literal["mean"] | None = None
    """What the loss is over samples, where a batch has several microbatches."""
    training: str | None = None
    """A function of the model that returns its optimizer, or a tuple of that and its learning-rate schedules."""

    @property
    def beside_model(self) -> dict[str, Any]:
        """The arguments of `Job` without model and data."""
        return self.model_dump(exclude={"model", "loss", "data", "learning_rate", "reduction", "training"})


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    jobs: list[JobRow]


def read_jobs(path: str | Path) -> tuple[JobRow, ...]:
    """The jobs in a file, with the files of models and data as seen from its folder.

    Raises PlanFileError for what is no such file, with the place of the fault, and for jobs that `require_apart`
    refuses.
    """
    where = path_of(path, PlanFileError)
    try:
        document = read_toml(where, "file of jobs")
    except ClusterError as error:
        raise PlanFileError(str(error)) from error
    if unknown := [key for key in document if key != "jobs"]:
        raise PlanFileError(f"{path}: {unknown[0]}: {nearest(unknown[0], ['jobs'])}: each job is a table [[jobs]]")
    rows = document.get("jobs", [])
    for number, row in enumerate(rows if isinstance(rows, list) else []):
        known = list(JobRow.model_fields)
        if isinstance(row, dict) and (odd := [key for key in row if key not in known]):
            raise PlanFileError(f"{path}: jobs.{number}.{odd[0]}: {nearest(odd[0], known)}")
    try:
        found = _File.model_validate({"jobs": rows}).jobs
    except ValidationError as error:
        raise PlanFileError(f"{path}: {problem_of(error)}") from error
    require_apart([(job.name, job.output) for job in found])
    return tuple(job.model_copy(update=_seen_from(where.parent, job)) for job in found)


def _seen_from(folder: Path, job: JobRow) -> dict[str, str]:
    """The files of a job's functions, as seen from the folder of the file that names them."""
    named = {field: getattr(job, field) for field in ("model", "loss", "data", "training")}
    return {field: str(folder / target) for field, target in named.items() if target is not None}
