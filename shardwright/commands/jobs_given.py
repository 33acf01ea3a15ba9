"""The jobs of a file: models, data and functions that it names, loaded."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.api import capture
from shardwright.commands.model_file import ModelGiven, load_data, load_function, load_model
from shardwright.commands.progress import DelayedProgress
from shardwright.core.errors import PlanError, ShardwrightError
from shardwright.core.jobs.job import Job
from shardwright.core.jobs.jobs_file import JobRow
from shardwright.core.model.graph import Graph


@dataclass(frozen=True, slots=True)
class GivenJobs:
    """The jobs of a file, each with its model, and the function that makes its optimizer, where it names one."""

    rows: tuple[JobRow, ...]
    jobs: tuple[Job, ...]
    models: tuple[ModelGiven, ...]
    functions: tuple[Callable[..., Any] | None, ...]


def given_jobs(rows: Sequence[JobRow], bar: DelayedProgress, *, apart: bool = False) -> GivenJobs:
    """The jobs of a file. A model that several of them train is captured once.

    Args:
        apart: whether each job is given a model of its own, to train it.

    Raises:
        PlanError: there are no jobs.
        ShardwrightError: a model, data or a function that cannot be loaded, with the name of the job.
    """
    captured: dict[tuple[str, str | None], tuple[Graph, ModelGiven]] = {}
    data: dict[str | None, Any] = {None: None}
    jobs, models, functions = [], [], []
    for row in rows:
        key = row.model, row.loss
        try:
            if key not in captured:
                bar.stage(f"capturing {row.model}")
                given = load_model(row.model, row.loss)
                captured[key] = capture(given.model, given.sample, given.loss), given
            if row.data is not None and (apart or row.data not in data):
                data[row.data] = load_data(row.data)
            functions.append(
                load_function(row.training, "training is FILE.py:FUNCTION, a function of the model")
                if apart and row.training is not None
                else None
            )
        except ShardwrightError as error:
            raise type(error)(f"job {row.name!r}: {error}") from error
        graph, given = captured[key]
        models.append(ModelGiven(copy.deepcopy(given.model), given.sample, given.loss) if apart else given)
        jobs.append(Job(model=graph, data=data[row.data], **row.beside_model))
    if not jobs:
        raise PlanError("there are no jobs: give at least one")
    return GivenJobs(tuple(rows), tuple(jobs), tuple(models), tuple(functions))
