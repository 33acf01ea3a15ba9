"""`shardwright jobs`: many models on few devices, cut into shards that share the devices."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.api import capture
from shardwright.commands.model_file import load_data, load_model
from shardwright.commands.output import JsonOption, print_json, print_view, require_folder
from shardwright.commands.plan import load_cluster
from shardwright.commands.progress import DelayedProgress
from shardwright.core.errors import PlanError, ShardwrightError
from shardwright.core.jobs.job import Job
from shardwright.core.jobs.jobs_file import JobRow, read_jobs
from shardwright.core.jobs.jobs_plan import JobsPlan
from shardwright.core.jobs.planning import DEFAULT_POLICY, plan_jobs
from shardwright.core.model.graph import Graph

jobs_app = typer.Typer(no_args_is_help=True, help="Many models on few devices: plan them together, show a plan.")


@jobs_app.command("plan")
def jobs_plan_command(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.toml", help="A list of jobs.", show_default=False)],
    cluster: Annotated[
        str,
        typer.Option(
            help="Hardware by name (a100-80gb, v100, cpu …), or a cluster file (TOML); all devices alike, in one node.",
            show_default=False,
        ),
    ],
    devices_per_node: Annotated[
        int | None, typer.Option(help="How many devices; 1 where not given.", show_default=False)
    ] = None,
    budget_bytes: Annotated[
        int | None,
        typer.Option(help="What the jobs may hold of each device's memory; default: all of it.", show_default=False),
    ] = None,
    host_memory_bytes: Annotated[
        int | None,
        typer.Option(
            help="What they may hold of the host's memory; default: what the devices have of it.", show_default=False
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="Whose pass runs next on a free device.")] = DEFAULT_POLICY,
    double_buffering: Annotated[
        bool | None,
        typer.Option(
            help="Copy in what the next pass needs while one runs; default: where copies run beside computing.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to save the plan file.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Cut the models of a list of jobs into shards that fit the devices, and predict when each job ends."""
    require_folder(output)
    devices = load_cluster(cluster, devices_per_node=devices_per_node)
    rows = read_jobs(jobs)
    with DelayedProgress() as bar:
        given = _jobs_of(rows, bar)
        bar.stage("cutting")
        plan = plan_jobs(
            given, devices, budget_bytes=budget_bytes, host_memory_bytes=host_memory_bytes, policy=policy,
            double_buffering=double_buffering,
        )  # fmt: skip
    if output is not None:
        plan.save(output)
    if json:
        print_json(plan.to_document())
        return
    from shardwright.report.jobs import jobs_view

    saved = f"saved to {output}" if output is not None else "not saved: give -o plan.json to keep it"
    print_view(jobs_view(plan), saved)


@jobs_app.command("show")
def jobs_show_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan of jobs.", show_default=False)],
    json: JsonOption = False,
) -> None:
    """Show a plan of jobs: the shards of each, bytes on devices and host, and when each job ends."""
    loaded = JobsPlan.load(plan)
    edited = "NOTE: steps, names, the policy or the ends were edited: the ends are simulated anew"
    note = edited if loaded.is_stale else None
    loaded = loaded.simulated() if loaded.is_stale else loaded
    if json:
        print_json(loaded.to_document())
        return
    from shardwright.report.jobs import jobs_view

    print_view(*(() if note is None else (note,)), jobs_view(loaded))


def _jobs_of(rows: tuple[JobRow, ...], bar: DelayedProgress) -> list[Job]:
    """The jobs of a file. A model that several of them train is captured once."""
    captured: dict[tuple[str, str | None], Graph] = {}
    data: dict[str | None, Any] = {None: None}
    found = []
    for row in rows:
        key = row.model, row.loss
        try:
            if key not in captured:
                bar.stage(f"capturing {row.model}")
                given = load_model(row.model, row.loss)
                captured[key] = capture(given.model, given.sample, given.loss)
            if row.data not in data and row.data is not None:
                data[row.data] = load_data(row.data)
        except ShardwrightError as error:
            raise type(error)(f"job {row.name!r}: {error}") from error
        found.append(Job(model=captured[key], data=data[row.data], **row.beside_model))
    if not found:
        raise PlanError("there are no jobs: give at least one")
    return found
