"""A plan of jobs as tables for a terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.jobs.jobs_plan import JobsPlan, PlannedJob, Shard
from shardwright.core.values.amounts import bytes_text, count_text, seconds_text
from shardwright.report.tables import new_table


def jobs_view(plan: JobsPlan) -> RenderableType:
    """The tables of a plan of jobs: what each takes and when it ends, and its shards."""
    parts: list[RenderableType] = [_heading(plan), _jobs(plan)]
    parts += [_shards(job) for job in plan.jobs]
    return Group(*parts)


def _heading(plan: JobsPlan) -> Text:
    lines = [
        plan.summary(),
        f"buffer for the next pass: {bytes_text(plan.buffer_bytes)}"
        if plan.double_buffering
        else "no double buffering: a device waits for the copies of each pass",
    ]
    if plan.devices > 1 and any(len(job.shards) > 1 for job in plan.jobs):
        lines.append("activations are computed again: a backward may run on another device than its forward")
    if not plan.copies_beside:
        lines.append("copies take the devices' own time")
    if plan.host_memory_bytes is not None:
        lines.append(f"the host has {bytes_text(plan.host_memory_bytes)} for the jobs")
    lines += [
        f"{job.name}: updates wait, as {job.waiting.reason}: a step takes {seconds_text(job.waiting.step_s)} more, "
        f"copies {bytes_text(job.waiting.copied_bytes)} more, and {bytes_text(job.waiting.host_bytes)} of gradients "
        f"are on the host meanwhile"
        for job in plan.jobs
        if job.waiting.reason
    ]
    return Text("\n".join(lines))


def _jobs(plan: JobsPlan) -> RenderableType:
    table = new_table(
        "Jobs", "job", "model", ">parameters", ">steps", ">shards", ">a step computes", ">and copies", ">device",
        ">host", ">ends after",
    )  # fmt: skip
    ends = dict(plan.predicted.finish_s)
    for job in plan.jobs:
        table.add_row(
            Text(job.name),
            Text(job.model_name),
            count_text(job.parameter_count),
            str(job.steps),
            str(len(job.shards)),
            seconds_text(job.run_s),
            bytes_text(job.copied_bytes),
            bytes_text(job.device_bytes),
            bytes_text(job.host.total),
            seconds_text(ends[job.name]),
        )
    return table


def _shards(job: PlannedJob) -> RenderableType:
    table = new_table(
        f"Shards of {job.name}", "shard", "units", "modules", "activations", ">parameters", ">gradients",
        ">optimizer states", ">activations of a microbatch", ">most at once",
    )  # fmt: skip
    for number, shard in enumerate(job.shards):
        held = max(own.device_bytes for own in job.passes if own.shard == number)
        table.add_row(
            str(number),
            f"{shard.first_unit}-{shard.end_unit - 1}",
            Text(_modules(shard)),
            {"recompute": "computed again", "offload": "on the host", "keep": "kept"}[shard.activations],
            *map(
                bytes_text,
                (
                    shard.parameters_bytes,
                    shard.gradients_bytes,
                    shard.optimizer_bytes,
                    shard.activations_bytes,
                    held,
                ),
            ),
        )
    return table


def _modules(shard: Shard) -> str:
    if shard.first_module == shard.last_module:
        return shard.first_module
    return f"{shard.first_module} … {shard.last_module}"
