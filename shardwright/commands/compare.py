"""`shardwright compare`: two plans side by side."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardwright.commands.output import JsonOption, print_json, print_view
from shardwright.core.plan.compare import compare
from shardwright.core.plan.plan import Plan


def compare_command(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="A plan file.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.", show_default=False)],
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 when the decisions differ.")] = False,
    names: Annotated[
        str | None,
        typer.Option(
            help="Of twins in two frameworks, the map of names by which checkpoints cross (as in convert): is it the "
            "alignment that the plans have?",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show two plans side by side: what was decided differently, and what was predicted."""
    comparison = compare(Plan.load(first), Plan.load(second), names)
    if json:
        print_json(
            {
                "first": str(first),
                "second": str(second),
                "same_decision": comparison.same_decision,
                "faster": comparison.faster,
                "notes": list(comparison.notes),
                "differences": [
                    asdict(each) | {"expected_between_frameworks": each not in comparison.unexpected}
                    for each in comparison.differences
                ],
            }
        )
    else:
        from shardwright.report.tables import comparison_view

        print_view(comparison_view(comparison, str(first), str(second)))
    if exit_code and not comparison.same_decision:
        raise typer.Exit(1)
