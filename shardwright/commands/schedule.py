"""`shardwright schedule`: one pipeline schedule, or all of them side by side."""

from typing import Annotated, Any

import typer
from rich.console import Console

from shardwright.commands.output import JsonOption, print_json, print_view, require_folder
from shardwright.commands.saved import CsvOption, SvgOption, TraceOption, save_schedule
from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import AUTO, Schedule, StageCosts, schedule_names
from shardwright.core.schedule.schedule import require_buildable
from shardwright.core.schedule.simulate import simulate_schedule
from shardwright.core.schedule.timeline import Timeline

_LEAST_WIDTH = 40


def schedule_command(
    name: Annotated[
        str | None, typer.Argument(help="1f1b, zbv, auto, …; leave it out with --all.", show_default=False)
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks of the pipeline.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 8,
    virtual_stages: Annotated[int, typer.Option(help="Stages on each rank.")] = 1,
    slices: Annotated[
        int, typer.Option(help="Slices of each microbatch's sequence; costs are then those of one slice.")
    ] = 1,
    f: Annotated[
        str, typer.Option("--f", help="Seconds of a stage's forward: one number, or one per stage: 1,1.2")
    ] = "1",
    b: Annotated[str, typer.Option("--b", help="Seconds of its input gradient, likewise.")] = "1",
    w: Annotated[str, typer.Option("--w", help="Seconds of its weight gradient, likewise.")] = "1",
    transfer: Annotated[str, typer.Option(help="Seconds over a boundary: one number, or one per boundary.")] = "0",
    activation_bytes: Annotated[
        str, typer.Option(help="Bytes that one microbatch holds on a stage: one number, or one per stage.")
    ] = "1",
    memory_limit: Annotated[
        str | None,
        typer.Option(help="Bytes of activations a rank may hold: one number, or one per rank.", show_default=False),
    ] = None,
    active_microbatches: Annotated[
        int | None, typer.Option(help="How many may be under way (simple, interleaved).", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Compare every schedule that admits the sizes.")] = False,
    csv: CsvOption = None,
    svg: SvgOption = None,
    trace: TraceOption = None,
    json: JsonOption = False,
) -> None:
    """Build a pipeline schedule and simulate it; or, with --all, compare all of them on the same costs."""
    for path in (csv, svg, trace):
        require_folder(path)
    if every and (name or csv or svg or trace):
        raise ScheduleError("--all compares every schedule: leave out the name, --csv, --svg and --trace")
    if not every and name is None:
        raise ScheduleError(f"which schedule? Name one ({', '.join((*schedule_names(), AUTO))}), or ask for --all")
    request: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches, "virtual_stages": virtual_stages}
    request["slices"] = _positive("slices", slices)
    stages = _positive("ranks", ranks) * _positive("virtual-stages", virtual_stages)
    require_buildable(stages, _positive("microbatches", microbatches) * slices)
    costs = StageCosts(
        _numbers("f", f, stages, "stage"),
        _numbers("b", b, stages, "stage"),
        _numbers("w", w, stages, "stage"),
        _numbers("transfer", transfer, stages - 1, "boundary"),
        tuple(int(size) for size in _numbers("activation-bytes", activation_bytes, stages, "stage")),
    )
    limits = None
    if memory_limit is not None:
        limits = tuple(int(limit) for limit in _numbers("memory-limit", memory_limit, ranks, "rank"))
    request |= {"costs": costs, "memory_limit_bytes": limits}
    if every:
        _compare(request, active_microbatches, json)
        return
    schedule = Schedule.build(name or "", active_microbatches=active_microbatches, **request)
    timeline = simulate_schedule(schedule, costs)
    saved = save_schedule(schedule, timeline, schedule.name, csv=csv, svg=svg, trace=trace)
    if json:
        document = _figures(schedule.name, timeline)
        document |= {"placement": schedule.placement, "digest": schedule.digest}
        document["table"] = [[action.text for action in order] for order in schedule.table]
        print_json(document | saved)
        return
    from shardwright.report.schedules import ranks_view
    from shardwright.report.terminal import timeline_text

    width = max(_LEAST_WIDTH, Console().width - len(f"rank {ranks}  "))
    sliced = f" of {slices} slices" if slices > 1 else ""
    title = f"{schedule.name}: {ranks} ranks, {microbatches} microbatches{sliced}, {schedule.stages} stages"
    print_view(title, timeline_text(timeline, width), ranks_view(schedule, timeline))
    print_view(*(f"{kind} saved to {path}" for kind, path in saved.items()))


def _compare(request: dict[str, Any], active_microbatches: int | None, json: bool) -> None:
    """Print every schedule on the same costs, the shortest first, and then those that refuse the request."""
    rows: list[dict[str, Any]] = []
    for name in (*schedule_names(), AUTO):
        active = active_microbatches if name in ("simple", "interleaved") else None
        try:
            schedule = Schedule.build(name, active_microbatches=active, **request)
        except ScheduleError as error:
            rows.append({"name": name, "refused": str(error)})
            continue
        rows.append(_figures(name, simulate_schedule(schedule, request["costs"])))
    # A schedule that does not train is not compared by its makespan: it comes behind.
    rows.sort(key=lambda row: (row["name"] == "forward-only", row.get("makespan_s", float("inf"))))
    if json:
        print_json({"schedules": rows})
        return
    from shardwright.report.schedules import comparison_view

    print_view(comparison_view(rows))


def _figures(name: str, timeline: Timeline) -> dict[str, Any]:
    return {
        "name": name,
        "makespan_s": timeline.makespan_s,
        "bubble_fraction": list(timeline.bubble_fraction),
        "bubble_s": list(timeline.bubble_s),
        "peak_live_activations": list(timeline.peak_live_activations),
        "peak_activation_bytes": list(timeline.peak_activation_bytes),
    }


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise ScheduleError(f"--{option} {value} is not possible: expected an integer of at least 1")
    return value


def _numbers(option: str, text: str, count: int, what: str) -> tuple[float, ...]:
    """The numbers of an option: one for all, or one for each, separated by commas."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ScheduleError(
            f"--{option} {text!r} is not a number, nor numbers with commas between, as 1,1.5,2"
        ) from None
    if len(numbers) == 1:
        numbers *= count
    if len(numbers) != count:
        raise ScheduleError(f"--{option} has {len(numbers)} numbers: expected one, or one for each {what}, {count}")
    for index, number in enumerate(numbers):
        if not 0 <= number < float("inf"):
            raise ScheduleError(f"--{option}: {number} for {what} {index}: expected finite and 0 or more")
    return numbers
