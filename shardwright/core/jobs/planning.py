"""Planning a list of jobs: a cut of each, one buffer for all, what stays on the device, and the ends by simulation."""

from collections.abc import Sequence
from dataclasses import replace

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanError
from shardwright.core.jobs.cut import Cut
from shardwright.core.jobs.finish import require_policy
from shardwright.core.jobs.job import Job, require_jobs
from shardwright.core.jobs.jobs_plan import HostBytes, JobsPlan, PlannedJob, PredictedEnds, Shard, Waiting
from shardwright.core.jobs.joint_cut import Counted, JointCut
from shardwright.core.jobs.keep import keeping
from shardwright.core.jobs.shard_pass import ShardPass
from shardwright.core.jobs.shard_tables import ShardTables
from shardwright.core.values.amounts import bytes_text

DEFAULT_POLICY = "sharded-lrtf"


def plan_jobs(
    jobs: Sequence[Job],
    cluster: Cluster,
    *,
    budget_bytes: int | None = None,
    host_memory_bytes: int | None = None,
    policy: str = DEFAULT_POLICY,
    double_buffering: bool | None = None,
) -> JobsPlan:
    """Cut the models of jobs into shards, and predict when each job ends.

    Args:
        jobs: independent jobs; each ends with the weights that it would have trained to alone.
        cluster: the devices, all of one kind and in one node, whose memory is the host's.
        budget_bytes: what the jobs may hold of each device's memory; None: all that a model may use.
        host_memory_bytes: what they may hold of the host's memory; None: what the devices have of it, if that is known.
        policy: which job's pass runs next on a free device.
        double_buffering: whether what the next pass needs is copied in while one runs; None: where copies run beside
            computing, as they do not on CPUs.

    Raises:
        PlanError: there are no jobs; two have one name or one output; data end before the steps do; a budget above the
            device; a model that has no cut that fits (which unit is too large, and by how much); jobs that do not fit
            the host's memory (how many do).
    """
    given = require_jobs(jobs)
    budget = require_budget(cluster, budget_bytes)
    copies_beside = cluster.device(0).kind != "cpu"
    require_policy(policy, copies_beside=copies_beside)
    if double_buffering is not None and not isinstance(double_buffering, bool):
        raise PlanError(f"double_buffering={double_buffering!r}: expected True, False or None")
    if host_memory_bytes is not None and (type(host_memory_bytes) is not int or host_memory_bytes < 1):
        raise PlanError(f"host_memory_bytes={host_memory_bytes!r}: expected a whole number of at least 1, or None")
    double_buffering = copies_beside if double_buffering is None else double_buffering
    beside = double_buffering and copies_beside
    if host_memory_bytes is None and (own := cluster.device(0).host_memory_bytes) is not None:
        host_memory_bytes = own * cluster.world_size
    planned: tuple[PlannedJob, ...] = ()
    # Activations wait for their backward only where it runs on the same device: of several it may be another. Where the
    # host has no room for them, they are computed again too.
    for may_offload in (True, False) if cluster.world_size == 1 else (False,):
        joint = JointCut(given, cluster, budget, double_buffering=double_buffering, may_offload=may_offload)
        counted, cuts = joint.found()
        made = [_passes(own.tables, cut) for own, cut in zip(counted, cuts, strict=True)]
        buffer = max(each.buffer_bytes for passes in made for each in passes) if double_buffering else 0
        if cluster.world_size == 1:
            room = budget - buffer - max(each.device_bytes for passes in made for each in passes)
            cuts = keeping([own.tables for own in counted], cuts, room, beside=beside)
        planned = tuple(_planned(own, cut, beside=beside) for own, cut in zip(counted, cuts, strict=True))
        if host_memory_bytes is None or sum(job.host.total for job in planned) <= host_memory_bytes:
            break
    require_host(planned, host_memory_bytes)
    plan = JobsPlan(
        planned, cluster, budget, buffer, host_memory_bytes, policy, double_buffering, copies_beside,
        PredictedEnds(0.0, (), ""), "",
    )  # fmt: skip
    return replace(plan, digest=plan.counted_digest).simulated()


def require_budget(cluster: Cluster, budget_bytes: int | None) -> int:
    """The budget of each device. Raises PlanError for devices that differ or are in several nodes, and for a budget
    above the device."""
    if not isinstance(cluster, Cluster):
        raise PlanError(f"plan_jobs takes a Cluster, not {cluster!r}: write Cluster({cluster!r})")
    if not cluster.is_uniform:
        kinds = ", ".join(dict.fromkeys(group.device.name for group in cluster.groups))
        raise PlanError(f"a pass may run on any device, and these differ ({kinds}): plan the jobs of each kind apart")
    if (nodes := sum(group.nodes for group in cluster.groups)) > 1:
        raise PlanError(
            f"shards come from the memory of one host, and these devices are in {nodes} nodes: plan the jobs of each "
            f"node apart, with a cluster of one node"
        )
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
        nesting=tables.nesting,
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
        waiting=_waiting(tables, cut, passes, gradients, beside=beside),
    )  # fmt: skip


def _waiting(tables: ShardTables, cut: Cut, passes: Sequence[ShardPass], gradients: int, *, beside: bool) -> Waiting:
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
    return Waiting(tables.waits_because, gradients, max(0.0, seconds[0] - seconds[1]), max(0, copied[0] - copied[1]))
