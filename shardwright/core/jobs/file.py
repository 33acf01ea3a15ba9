"""The file of a plan of jobs: JSON with a version and a schema, parsed and validated, never executed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import ValidationError

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanFileError, ShardwrightError
from shardwright.core.jobs.finish import require_policy
from shardwright.core.jobs.job import require_apart, require_data, require_name, require_whole_microbatches
from shardwright.core.jobs.jobs_plan import JobsPlan, PlannedJob, PredictedEnds
from shardwright.core.jobs.planning import require_budget, require_host
from shardwright.core.plan.file import json_of, problem_of
from shardwright.core.plan.sections import from_section, section_of, to_section
from shardwright.core.values.amounts import bytes_text
from shardwright.core.values.fields import Amount, Count
from shardwright.core.values.text_files import path_of, read_text, write_text

FORMAT: Literal["shardwright-jobs"] = "shardwright-jobs"
VERSION = 1


@dataclass(frozen=True, slots=True)
class JobsDocument:
    """One file of a plan of jobs."""

    format: Literal["shardwright-jobs"]
    version: int
    policy: str
    budget_bytes: Count
    host_memory_bytes: Amount | None
    double_buffering: bool
    copies_beside: bool
    buffer_bytes: Amount
    predicted: PredictedEnds
    jobs: tuple[PlannedJob, ...]
    cluster: Cluster
    digest: str


def to_document(plan: JobsPlan) -> dict[str, Any]:
    """The plan as plain JSON values."""
    own = {name: getattr(plan, name) for name in get_type_hints(JobsDocument) if name not in ("format", "version")}
    document: dict[str, Any] = to_section(JobsDocument(FORMAT, VERSION, **own))
    return document


def write(plan: JobsPlan, path: str | Path) -> None:
    """Write a plan, whole or not at all. Raises PlanFileError when it cannot be written."""
    text = json.dumps(to_document(plan), indent=1, ensure_ascii=False) + "\n"
    write_text(path_of(path, PlanFileError), text, PlanFileError)


def read(path: str | Path) -> JobsPlan:
    """The plan in a file. Raises PlanFileError that names the first thing that is wrong and where it stands."""
    where = path_of(path, PlanFileError)
    return from_text(read_text(where, PlanFileError, "jobs plan"), str(path))


def from_text(text: str, source: str) -> JobsPlan:
    """The plan in the text of a file; ``source`` names it in errors. Raises as `read`."""
    document = json_of(text, source)
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        hint = " (a plan of one model: see shardwright show)" if _is_plan(document) else ""
        raise PlanFileError(f"{source}: not a plan of jobs{hint}: expected format: {FORMAT!r} at the top")
    if (version := document.get("version")) != VERSION:
        raise PlanFileError(
            f"{source}: version is {version!r}, and this Shardwright reads {VERSION}: plan the jobs again"
        )
    try:
        section = section_of(JobsDocument).model_validate_json(text)
    except ValidationError as error:
        raise PlanFileError(f"{source}: {problem_of(error)}") from error
    try:
        held = {
            name: from_section(getattr(section, name), hint)
            for name, hint in get_type_hints(JobsDocument, include_extras=True).items()
            if name not in ("format", "version")
        }
        plan = JobsPlan(**held)
        _require_consistent(plan)
    except ShardwrightError as error:
        raise PlanFileError(f"{source}: {error}") from error
    return plan


def _is_plan(document: Any) -> bool:
    return isinstance(document, Mapping) and document.get("format") == "shardwright-plan"


def _require_consistent(plan: JobsPlan) -> None:
    """Raise ShardwrightError for what a schema cannot show."""
    require_apart([(job.name, job.output) for job in plan.jobs])
    for number, job in enumerate(plan.jobs):
        _require_job(f"jobs.{number}", job)
    require_budget(plan.cluster, plan.budget_bytes)
    require_policy(plan.policy, copies_beside=plan.copies_beside)
    if plan.digest != plan.counted_digest:
        raise PlanFileError(
            f"digest: {plan.digest!r} does not belong to the shards, passes and devices of this file "
            f"({plan.counted_digest!r}): what is counted from the models was edited; plan the jobs again, or restore "
            f"it. Names, outputs, steps, policy and budget may be edited"
        )
    if plan.device_bytes > plan.budget_bytes:
        raise PlanFileError(
            f"budget_bytes: {plan.budget_bytes}, and the shards take {plan.device_bytes} of a device "
            f"({bytes_text(plan.device_bytes)}): give at least that, or plan the jobs again"
        )
    require_host(plan.jobs, plan.host_memory_bytes)


def _require_job(where: str, job: PlannedJob) -> None:
    """Raise PlanFileError unless a job's parts go together."""
    require_name("name", job.name)
    require_name("output", job.output)
    require_whole_microbatches(job.name, job.batch, job.microbatch)
    require_data(job.name, job.steps, job.batches)
    shards = [(shard.first_unit, shard.end_unit) for shard in job.shards]
    borders = [first for first, _ in shards] + [end for _, end in shards[-1:]]
    if not shards or borders[0] != 0 or [end for _, end in shards] != borders[1:] or sorted(set(borders)) != borders:
        raise PlanFileError(f"{where}.shards: units {shards}: expected runs that follow each other from unit 0")
    kinds = [(own.kind, own.shard) for own in job.passes]
    if kinds != _expected_passes(len(shards), [shard for kind, shard in kinds if kind == "update"]):
        raise PlanFileError(
            f"{where}.passes: {kinds}: expected the forwards of all shards but the last, that one's fused pass, the "
            f"backwards in the other order, and updates that wait"
        )


def _expected_passes(shards: int, updates: Sequence[int]) -> list[tuple[str, int]]:
    ahead = [("forward", shard) for shard in range(shards - 1)]
    back = [("backward", shard) for shard in reversed(range(shards - 1))]
    waiting = [("update", shard) for shard in sorted(set(updates), reverse=True) if shard < shards]
    return [*ahead, ("fused", shards - 1), *back, *waiting]
