"""The command line: `shardwright plan | partition | show | compare | rescore | convert | simulate | explain |
schedule | jobs | profile | hardware | doctor`.

Neither framework is imported before a model file asks for one.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardwright.commands.compare import compare_command
from shardwright.commands.convert import convert_command
from shardwright.commands.doctor import doctor_command
from shardwright.commands.explain import explain_command
from shardwright.commands.hardware import hardware_command
from shardwright.commands.jobs import jobs_app
from shardwright.commands.output import USER_ERROR, print_error
from shardwright.commands.partition import partition_command
from shardwright.commands.plan import plan_command
from shardwright.commands.profile import profile_command
from shardwright.commands.rescore import rescore_command
from shardwright.commands.schedule import schedule_command
from shardwright.commands.show import show_command
from shardwright.commands.simulate import simulate_command
from shardwright.core.errors import ShardwrightError

_JSON_ASKED = "shardwright.json_asked"


class _Commands(TyperGroup):
    """The commands, which turn errors into one message, or JSON where it was asked for, and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_JSON_ASKED] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        as_json: bool = ctx.meta[_JSON_ASKED]
        try:
            return super().invoke(ctx)
        except ShardwrightError as error:
            print_error(str(error), type(error).__name__, as_json)
            raise typer.Exit(USER_ERROR) from error
        except Exception as error:
            # Wrong options: typer says it well by itself, but as text. What has no message of its own is a bug.
            if as_json and hasattr(error, "format_message"):
                print_error(error.format_message(), "UsageError", as_json)
                raise typer.Exit(USER_ERROR) from error
            raise


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        try:
            typer.echo(f"shardwright {version('shardwright')}")
        except PackageNotFoundError:
            typer.echo("shardwright, run from its source tree")
        raise typer.Exit


@app.callback()
def _shardwright(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Plan model-parallel training once, and run the plan in PyTorch or in JAX."""


app.command("plan")(plan_command)
app.command("partition")(partition_command)
app.command("show")(show_command)
app.command("compare")(compare_command)
app.command("rescore")(rescore_command)
app.command("convert")(convert_command)
app.command("simulate")(simulate_command)
app.command("explain")(explain_command)
app.command("schedule")(schedule_command)
app.add_typer(jobs_app, name="jobs")
app.command("profile")(profile_command)
app.command("hardware")(hardware_command)
app.command("doctor")(doctor_command)


def main() -> None:
    """The entry point. Exit code 2: what was given is wrong; 1: the answer is no, or a bug."""
    app(prog_name="shardwright")


if __name__ == "__main__":  # else `python -m shardwright.cli` would do nothing, and say nothing
    main()
