"""`shardwright show`: what a plan file says."""

from shardwright.commands.output import JsonOption, PlanArgument, print_json, print_view
from shardwright.core.plan.plan import Plan


def show_command(plan: PlanArgument, json: JsonOption = False) -> None:
    """Show a plan: degrees, stages, layouts, predicted time and memory, and what was not chosen."""
    loaded = Plan.load(plan)
    if json:
        from shardwright.core.plan.file import to_document

        print_json(to_document(loaded))
        return
    from shardwright.report.tables import plan_view

    print_view(plan_view(loaded))
