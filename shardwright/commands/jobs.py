"""`shardwright jobs`: many models on few devices, cut into shards that share the devices."""

from pathlib import Path
from typing import Annotated

import typer

from shardwright.commands.jobs_given import given_jobs
from shardwright.commands.jobs_run import launch, result_view, run_result, to_document
from shardwright.commands.output import JsonOption, print_json, print_view, require_folder
from shardwright.commands.plan import load_cluster
from shardwright.commands.progress import DelayedProgress
from shardwright.core.jobs.jobs_file import read_jobs
from shardwright.core.jobs.jobs_plan import JobsPlan
from shardwright.core.jobs.planning import DEFAULT_POLICY, plan_jobs

jobs_app = typer.Typer(
    no_args_is_help=True, help="Many models on few devices: plan them together, show a plan, train them."
)
JobsArgument = Annotated[Path, typer.Argument(metavar="JOBS.toml", help="A list of jobs.", show_default=False)]


@jobs_app.command("plan")
def jobs_plan_command(
    jobs: JobsArgument,
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
        given = given_jobs(rows, bar)
        bar.stage("cutting")
        plan = plan_jobs(
            given.jobs, devices, budget_bytes=budget_bytes, host_memory_bytes=host_memory_bytes, policy=policy,
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


@jobs_app.command("run")
def jobs_run_command(
    jobs: JobsArgument,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.json",
            help="The plan of the jobs; default: they are planned for one device of this machine's kind.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random numbers of every job.")] = 0,
    json: JsonOption = False,
) -> None:
    """Train a list of jobs on the devices of its plan, in PyTorch a process for each; jobs with an output are saved."""
    rows = read_jobs(jobs)
    chosen = None if plan is None else JobsPlan.load(plan)
    if chosen is not None and chosen.devices > 1 and (code := launch(chosen.devices, rows[0])) is not None:
        raise typer.Exit(code)
    with DelayedProgress() as bar:
        given = given_jobs(rows, bar, apart=True)
        if chosen is None:
            bar.stage("cutting")
            chosen = plan_jobs(given.jobs, load_cluster("cpu"))
        bar.stage("training")
        result, is_first = run_result(chosen, given, seed)
    if not is_first:
        return
    if json:
        print_json(to_document(result))
    else:
        print_view(result_view(chosen, result))
    if any(own.failure for own in result.jobs.values()):
        raise typer.Exit(1)
