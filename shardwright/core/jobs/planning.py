"""Planning a list of jobs: a cut of each, one buffer for all, what stays on the device, and the ends by simulation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanError
from shardwright.core.jobs.cut import SAME, Choices, Cut, choices_of, refusal
from shardwright.core.jobs.job import Job, require_jobs
from shardwright.core.jobs.jobs_plan import HostBytes, JobsPlan, PlannedJob, PredictedEnds, Shard, Waiting
from shardwright.core.jobs.keep import keeping
from shardwright.core.jobs.shard_pass import ShardPass
from shardwright.core.jobs.shard_tables import ShardTables
from shardwright.core.values.amounts import bytes_text

BUFFERS = 64
"""The most sizes of the buffer that are tried."""
DEFAULT_POLICY = "sharded-lrtf"


@dataclass(frozen=True, slots=True)
class Counted:
    """A job with its tables and the shards that fit a device by themselves."""

    job: Job
    tables: ShardTables
    choices: Choices


def plan_jobs(
    jobs: Sequence[Job],
    cluster: Cluster,
    *,
    budget_bytes: int | None = None,
    host_memory_bytes: int | None = None,
    policy: str = DEFAULT_POLICY,
    double_buffering: bool = True,
) -> JobsPlan:
    """Cut the models of jobs into shards, and predict when each job ends.

    Args:
        jobs: independent jobs; each ends with the weights that it would have trained to alone.
        cluster: the devices, all of one kind.
        budget_bytes: what the jobs may hold of each device's memory; None: all that a model may use.
        host_memory_bytes: what they may hold of the host's memory; None: what the devices have of it, if that is known.
        policy: which job's pass runs next on a free device.
        double_buffering: whether the next pass is copied in while one runs.

    Raises:
        PlanError: there are no jobs; two have one name or one output; data end before the steps do; a budget above the
            device; a model that has no cut that fits (which unit is too large, and by how much); jobs that do not fit
            the host's memory (how many do).
    """
    given = require_jobs(jobs)
    budget = require_budget(cluster, budget_bytes)
    beside = double_buffering and cluster.device(0).kind != "cpu"
    counted = _counted(given, cluster, budget, beside=beside)
    buffer, cuts = _cuts(counted, budget, double_buffering=double_buffering)
    made = [_passes(own.tables, cut) for own, cut in zip(counted, cuts, strict=True)]
    if cluster.world_size == 1:
        room = budget - buffer - max(each.device_bytes for passes in made for each in passes)
        cuts = keeping([own.tables for own in counted], cuts, room, beside=beside)
    planned = tuple(_planned(own, cut, beside=beside) for own, cut in zip(counted, cuts, strict=True))
    if host_memory_bytes is None and (own := cluster.device(0).host_memory_bytes) is not None:
        host_memory_bytes = own * cluster.world_size
    require_host(planned, host_memory_bytes)
    plan = JobsPlan(
        planned, cluster, budget, buffer, host_memory_bytes, policy, double_buffering, counted[0].tables.copies_beside,
        PredictedEnds(0.0, (), ""), "",
    )  # fmt: skip
    return replace(plan, digest=plan.counted_digest).simulated()


def require_budget(cluster: Cluster, budget_bytes: int | None) -> int:
    """The budget of each device. Raises PlanError for devices that differ, and for a budget above the device."""
    if not isinstance(cluster, Cluster):
        raise PlanError(f"plan_jobs takes a Cluster, not {cluster!r}: write Cluster({cluster!r})")
    if not cluster.is_uniform:
        kinds = ", ".join(dict.fromkeys(group.device.name for group in cluster.groups))
        raise PlanError(f"a pass may run on any device, and these differ ({kinds}): plan the jobs of each kind apart")
    usable = cluster.device(0).usable_memory_bytes
    if budget_bytes is None:
        return usable
    if type(budget_bytes) is not int or budget_bytes < 1:
        raise PlanError(f"budget_bytes={budget_bytes!r}: expected a whole number of at least 1")
    if budget_bytes > usable:
        raise PlanError(
            f"budget_bytes={budget_bytes}: a model may use {usable} bytes of a {cluster.device(0).name} "
            f"({bytes_text(usable)}): give at most that"
        )
    return budget_bytes


def require_host(jobs: Sequence[PlannedJob], host_memory_bytes: int | None) -> None:
    """Raise PlanError where the jobs take more of the host's memory than there is: how many fit."""
    needed = sum(job.host.total for job in jobs)
    if host_memory_bytes is None or needed <= host_memory_bytes:
        return
    fitting, total = list[str](), 0
    for job in sorted(jobs, key=lambda job: job.host.total):
        if total + job.host.total <= host_memory_bytes:
            total += job.host.total
            fitting.append(job.name)
    names = f", the smallest: {', '.join(map(repr, fitting[:8]))}" if fitting else ""
    raise PlanError(
        f"the {len(jobs)} jobs take {bytes_text(needed)} of the host's memory, and there are "
        f"{bytes_text(host_memory_bytes)}: {len(fitting)} of them fit{names}. Plan fewer at a time, or give more memory"
    )


def _counted(jobs: Sequence[Job], cluster: Cluster, budget: int, *, beside: bool) -> list[Counted]:
    """The jobs with their tables, which are counted once for jobs that differ in name, length and data alone."""
    known: dict[object, Counted] = {}
    found = []
    for job in jobs:
        numbers = job.batch, job.microbatch, job.precision, job.gradient_precision, job.optimizer, job.clip_norm is None
        key = id(job.model), numbers
        if key not in known:
            tables = ShardTables(job, cluster)
            known[key] = Counted(job, tables, choices_of(tables, budget, beside=beside))
        found.append(replace(known[key], job=job))
    return found


def _cuts(counted: Sequence[Counted], budget: int, *, double_buffering: bool) -> tuple[int, list[Cut]]:
    """The buffer under which the jobs take least time together, and their cuts."""
    sizes: list[int | None] = [None]
    if double_buffering:
        every = np.unique(np.concatenate([own.choices.buffer_bytes for own in counted]))
        every = every[every < budget]
        some = np.linspace(0, len(every) - 1, min(len(every), BUFFERS)).round().astype(int)
        sizes = [int(size) for size in every[some]]
    best: tuple[float, int, list[Cut]] | None = None
    able = [list[int]() for _ in counted]
    for size in sizes:
        found = [own.choices.cut(budget, size) for own in counted]
        for sizes_of, cut in zip(able, found, strict=True):
            sizes_of += [size or 0] if cut is not None else []
        cuts = [cut for cut in found if cut is not None]
        if len(cuts) < len(counted):
            continue
        cost_s = sum(cut.cost_s * own.job.steps for cut, own in zip(cuts, counted, strict=True))
        shards = sum(len(cut.starts) for cut in cuts)
        if best is None or cost_s < best[0] * (1 - SAME) or (cost_s <= best[0] * (1 + SAME) and shards < best[1]):
            best = cost_s, shards, cuts
    if best is None:
        raise _no_cuts(counted, able, budget, double_buffering=double_buffering)
    *_, cuts = best
    passes = [each for own, cut in zip(counted, cuts, strict=True) for each in _passes(own.tables, cut)]
    return max(each.buffer_bytes for each in passes) if double_buffering else 0, cuts


def _no_cuts(
    counted: Sequence[Counted], able: Sequence[Sequence[int]], budget: int, *, double_buffering: bool
) -> PlanError:
    for own, sizes in zip(counted, able, strict=True):
        if not sizes:
            return refusal(own.job.name, own.tables, budget, double=double_buffering)
    hungry = max(range(len(counted)), key=lambda number: min(able[number]))
    large = min(range(len(counted)), key=lambda number: max(able[number]))
    return PlanError(
        f"jobs {counted[hungry].job.name!r} and {counted[large].job.name!r} do not fit {bytes_text(budget)} together: "
        f"shards of the first need a buffer of {bytes_text(min(able[hungry]))} beside those of the second, which leave "
        f"{bytes_text(max(able[large]))}. Give a larger budget, smaller microbatches, or double_buffering=False"
    )


def _passes(tables: ShardTables, cut: Cut) -> tuple[ShardPass, ...]:
    """The passes of a step, in order: forwards, the last shard's, backwards, and updates that wait."""
    found = [
        tables.passes(a, b, label, shard)
        for shard, ((a, b), label) in enumerate(zip(cut.ends(tables.units), cut.labels, strict=True))
    ]
    every = [each for shard in found for each in shard]
    back = [each for shard in reversed(found) for each in shard if each.kind == "backward"]
    ahead = [each for each in every if each.kind in ("forward", "fused")]
    return (*ahead, *back, *(each for each in reversed(every) if each.kind == "update"))


def _planned(own: Counted, cut: Cut, *, beside: bool) -> PlannedJob:
    job, tables = own.job, own.tables
    units = tables.tables.folded.units
    parameters, gradients, states = tables.state_host_bytes(cut.starts)
    ends = cut.ends(tables.units)
    offloaded = sum(
        tables.activations_bytes(a, b) for (a, b), label in zip(ends, cut.labels, strict=True) if label == "offload"
    )
    values = tables.crossing.host_bytes(cut.starts[1:])
    passes = _passes(tables, cut)

    def module(unit: int, place: int) -> str:
        calls = units[unit].calls
        return calls[place].path if calls else ""

    return PlannedJob(
        name=job.name,
        model_name=job.model.model_name,
        model_digest=tables.tables.structure.digest,
        parameter_count=job.model.parameter_count(),
        steps=job.steps,
        batch=job.batch,
        microbatch=tables.microbatch,
        optimizer=job.optimizer,
        clip_norm=None if job.clip_norm is None else float(job.clip_norm),
        precision=tables.precision,
        gradient_precision=job.gradient_precision,
        output=job.output,
        batches=job.batches,
        shards=tuple(
            Shard(
                a, b, label, module(a, 0), module(b - 1, -1), tables.parameters_bytes(a, b),
                tables.trained(a, b) * tables.gradient_width, tables.optimizer_bytes(a, b),
                tables.activations_bytes(a, b),
            )
            for (a, b), label in zip(ends, cut.labels, strict=True)
        ),
        passes=passes,
        host=HostBytes(
            parameters, gradients, states, values * tables.microbatches, offloaded * tables.microbatches
        ),
        waiting=_waiting(job, tables, cut, passes, gradients, beside=beside),
    )  # fmt: skip


def _waiting(
    job: Job, tables: ShardTables, cut: Cut, passes: Sequence[ShardPass], gradients: int, *, beside: bool
) -> Waiting:
    """The price of updates that wait, over the same shards that are updated at once."""
    if tables.updates == "at once":
        return Waiting("", 0, 0.0, 0)
    at_once = [
        each
        for shard, ((a, b), label) in enumerate(zip(cut.ends(tables.units), cut.labels, strict=True))
        for each in tables.passes(a, b, label, shard, "at once")
    ]
    seconds = [sum(each.seconds(beside=beside) for each in those) for those in (passes, at_once)]
    copied = [sum(each.in_bytes + each.out_bytes for each in those) for those in (passes, at_once)]
    reason = f"gradients are clipped to a norm of {job.clip_norm:g} over all of them"
    return Waiting(reason, gradients, max(0.0, seconds[0] - seconds[1]), max(0, copied[0] - copied[1]))
