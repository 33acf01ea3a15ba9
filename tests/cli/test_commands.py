"""What all commands have in common."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli import app
from tests.cli.conftest import run

COMMANDS = {command.name: command.callback for command in app.registered_commands}


def test_the_commands_are_those_of_the_readme() -> None:
    assert set(COMMANDS) >= {"plan", "show", "compare", "simulate", "schedule", "explain", "doctor"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json_and_help(name: str) -> None:
    function = COMMANDS[name]
    assert function is not None
    assert "json" in inspect.signature(function).parameters
    shown = run(name, "--help")
    assert shown.code == 0
    assert "--json" in shown.out


def test_an_unknown_command_is_an_error() -> None:
    ran = run("shwo")
    assert ran.code == 2
    assert "shwo" in ran.err


def test_schedule_is_reached_from_the_command_line() -> None:
    found = run("schedule", "gpipe", "--ranks", 2, "--microbatches", 3, "--json").document
    assert found["table"][1] == ["1F0", "1F1", "1F2", "1B0", "1B1", "1B2"]
    unknown = run("schedule", "gpip", "--json")
    assert unknown.code == 2
    assert "did you mean 'gpipe'?" in unknown.document["error"]["message"]


@pytest.mark.parametrize("module", ["shardwright", "shardwright.cli"])
def test_python_dash_m_is_the_command_line(module: str) -> None:
    """Where the script is not on the path. A module that ran nothing would end well and say nothing."""
    command = [sys.executable, "-m", module, "schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--json"]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)
    wrong = subprocess.run([*command[:4], "1f1bb"], cwd=root, capture_output=True, timeout=60, check=False)
    assert wrong.returncode == 2
