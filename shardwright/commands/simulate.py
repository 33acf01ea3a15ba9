"""`shardwright simulate`: the times at which every action of a plan's pipeline would run."""

from dataclasses import asdict
from typing import Annotated

import typer

from shardwright.api import simulate
from shardwright.backends.registry import registered
from shardwright.commands.output import (
    JsonOption,
    PlanArgument,
    print_json,
    print_view,
    require_folder,
    view_width,
)
from shardwright.commands.saved import CsvOption, SvgOption, TraceOption, save_schedule
from shardwright.core.capabilities import PLAIN_MEMORY
from shardwright.core.plan.breakdown import break_down
from shardwright.core.plan.memory_over_time import Moment, memory_over_time
from shardwright.core.plan.plan import Plan, stale_note


def simulate_command(
    plan: PlanArgument,
    csv: CsvOption = None,
    svg: SvgOption = None,
    trace: TraceOption = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also what every rank holds over time, by class.")] = False,
    json: JsonOption = False,
) -> None:
    """Simulate a plan's step with its own costs: where the time of every rank goes, and its live activations."""
    for path in (csv, svg, trace):
        require_folder(path)
    given = Plan.load(plan)
    loaded = given.as_counted  # an edited plan has the costs of the one before, and is simulated when it is rescored
    note = stale_note(given)
    if note is not None and loaded is not given:
        note = f"this is the step of the plan before it was edited: {note}"
    timeline = simulate(loaded)
    parts = break_down(loaded)
    own = registered().get(loaded.provenance.captured_from)
    held = memory_over_time(loaded, PLAIN_MEMORY if own is None else own.memory_traits) if memory else ()
    title = f"{loaded.model_name}: {loaded.summary()}"
    saved = save_schedule(loaded.build_schedule(), timeline, title, csv=csv, svg=svg, trace=trace)
    if json:
        live, activations = timeline.peak_live_activations, timeline.peak_activation_bytes
        print_json(
            {
                "plan": str(plan),
                "note": note,
                "schedule": loaded.decision.schedule,
                "microbatches": loaded.microbatches,
                "makespan_s": timeline.makespan_s,
                "step_time_s": loaded.predicted.step_time_s,
                "ranks": [
                    {
                        "rank": rank,
                        "actions": len(timeline.actions[rank]),
                        "bubble_fraction": timeline.bubble_fraction[rank],
                        "peak_live_activations": live[rank],
                        "peak_activation_bytes": activations[rank],
                        "step": asdict(parts[rank]),
                        **({"memory": [_moment(moment) for moment in held[rank]]} if memory else {}),
                    }
                    for rank in range(timeline.ranks)
                ],
                **saved,
            }
        )
        return
    from shardwright.report.tables import memory_view, step_view, timeline_view
    from shardwright.report.terminal import timeline_text

    drawing = timeline_text(timeline, view_width() - len("rank 000  "))
    print_view(
        *(() if note is None else (f"NOTE: {note}",)),
        timeline_view(loaded, timeline),
        "",
        step_view(parts),
        "",
        *((memory_view(held, loaded.predicted.step_time_s), "") if memory else ()),
        drawing,
        *(f"{kind} saved to {path}" for kind, path in saved.items()),
    )


def _moment(moment: Moment) -> dict[str, float]:
    use = asdict(moment.memory)
    return {"start_s": moment.start_s, "end_s": moment.end_s, **use, "total_bytes": moment.memory.total_bytes}
