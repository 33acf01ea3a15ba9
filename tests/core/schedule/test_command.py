"""`shardwright schedule`: tables for people, JSON for programs, files, and errors that name the option."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shardwright.commands.schedule import schedule_command
from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import AUTO, Schedule, schedule_names
from shardwright.core.schedule.files import load_csv

app = typer.Typer()
app.command()(schedule_command)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_one_schedule_is_drawn_and_measured() -> None:
    shown = run("1f1b", "--ranks", 2, "--microbatches", 4, "--b", 1, "--w", 1)
    assert "rank 0  F" in shown
    found = document("1f1b", "--ranks", 2, "--microbatches", 4)
    assert found["makespan_s"] == 15.0
    assert found["peak_live_activations"] == [2, 1]
    assert found["digest"] == Schedule.build("1f1b", ranks=2, microbatches=4).digest
    assert found["table"][1][:2] == ["1F0", "1B0"]


def test_files_are_written(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"schedule.{kind}" for kind in ("csv", "svg", "trace")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    shown = run("zbv", "--ranks", 2, "--microbatches", 3, "--virtual-stages", 2, *options)
    assert load_csv(files["csv"]).digest == Schedule.build("zbv", ranks=2, microbatches=3, virtual_stages=2).digest
    assert files["svg"].read_text().startswith("<svg")
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert "csv saved to" in shown


def test_all_are_compared_and_auto_comes_first() -> None:
    rows = document("--all", "--ranks", 3, "--microbatches", 6, "--f", "1,1.5,0.5", "--transfer", 0.1)["schedules"]
    assert {row["name"] for row in rows} == {*schedule_names(), AUTO}
    training = [row for row in rows if "makespan_s" in row and row["name"] != "forward-only"]
    auto = next(row for row in training if row["name"] == AUTO)
    assert auto["makespan_s"] == min(row["makespan_s"] for row in training)
    assert "must be 2" in next(row for row in rows if row["name"] == "zbv")["refused"]
    assert "zbv" in run("--all", "--ranks", 2, "--microbatches", 2)


def test_a_memory_limit_is_kept_by_all_that_remain() -> None:
    rows = document("--all", "--ranks", 3, "--microbatches", 6, "--memory-limit", 3)["schedules"]
    assert all(max(row["peak_activation_bytes"]) <= 3 for row in rows if "makespan_s" in row)
    assert "the least that gpipe keeps is 6" in next(row for row in rows if row["name"] == "gpipe")["refused"]


BAD = [
    ((), "which schedule"),
    (("1f1b", "--all"), "leave out the name"),
    (("1f1b", "--f", "1,2,3"), "--f has 3 numbers: expected one, or one for each stage, 4"),
    (("1f1b", "--b", "-1"), "--b: -1.0 for stage 0: expected finite and 0 or more"),
    (("1f1b", "--w", "nan"), "--w: nan for stage 0"),
    (("1f1b", "--transfer", "inf"), "--transfer: inf for boundary 0"),
    (("1f1b", "--f", "fast"), "--f 'fast' is not a number"),
    (("1f1b", "--ranks", 0), "--ranks 0 is not possible"),
    (("1f1b", "--memory-limit", "1,2"), "--memory-limit has 2 numbers"),
    (("1f1b", "--svg", "no/such/folder/a.svg"), "there is no folder"),
    (("1g1b",), "did you mean '1f1b'"),
    (("auto", "--memory-limit", "0"), "the least is 1"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_options_are_named(arguments: tuple[object, ...], message: str) -> None:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    if "folder" not in message:
        assert isinstance(result.exception, ScheduleError)
