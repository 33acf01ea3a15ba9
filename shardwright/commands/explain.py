"""`shardwright explain`: why a plan is as it is."""

from typing import Annotated

import typer
from rich.text import Text

from shardwright.commands.output import JsonOption, PlanArgument, print_json, print_view
from shardwright.core.plan.explain import explain
from shardwright.core.plan.plan import Plan


def explain_command(
    plan: PlanArgument,
    parameter: Annotated[
        str | None,
        typer.Argument(help="A parameter, by the name that either framework gives it.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what was decided, what it costs, what was not chosen and why; or where one parameter lies and why."""
    text = explain(Plan.load(plan), parameter)
    if json:
        print_json({"plan": str(plan), "parameter": parameter, "lines": text.splitlines()})
    else:
        print_view(Text(text))
