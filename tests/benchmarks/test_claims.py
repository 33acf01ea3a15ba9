"""Every benchmark behind a line of the table of claims can fail, and its command exists."""

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import claims

from tests.benchmarks.judged import Judged, failures, memory, predictions, slices_and_jobs, training

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8").split("| claim | shown by |")[1].split("\n\n")[0]
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("|---")]
COMMANDS = re.findall(r"`((?:python|pytest) [^`]+)`", TABLE)
BENCHMARKS = sorted({command.split()[1] for command in COMMANDS if command.startswith("python ")})
BEHIND_FIGURES = ("benchmarks/twins.py", "benchmarks/found_plans.py")
"""Whose figures the table links to."""

JUDGED: Judged = {
    **training.JUDGED,
    **predictions.JUDGED,
    **memory.JUDGED,
    **slices_and_jobs.JUDGED,
    **failures.JUDGED,
}


@pytest.mark.parametrize("name", JUDGED)
def test_figures_that_hold_end_well_and_others_do_not(name: str) -> None:
    good, bad = JUDGED[name]
    assert good().exit_code == 0, good().verdict()
    assert good().verdict().endswith(f"{len(good().rows)} of {len(good().rows)} figures hold.")
    assert bad
    for number, found in enumerate(bad):
        assert found().exit_code == 1, f"{number}: {found().verdict()}"
        assert "FAILS" in found().verdict() or not found().rows


def test_what_fails_is_named() -> None:
    found = claims.pipeline_fidelity({"gpt2, auto": 0.2, "t5, auto": 0.0})
    assert found.failed == ["gpt2, auto: error: 0.2, at most 0.05"]
    assert "1 of 2 figures hold." in found.verdict()


def test_every_line_of_the_table_has_a_command_or_figures() -> None:
    assert len(ROWS) > 15
    for row in ROWS:
        assert re.search(r"`(python|pytest) [^`]+`|\]\(benchmarks/results/", row.split("|")[-2]), row


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_table_exist(command: str) -> None:
    file = command.split()[1]
    assert (ROOT / file).exists(), command
    if file.endswith(".py") and file.startswith("tests"):
        assert "def test_" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("file", [*BENCHMARKS, *BEHIND_FIGURES])
def test_a_benchmark_behind_a_claim_ends_with_the_verdict(file: str) -> None:
    """Its `main` judges by the function of its name, and what that returns is the exit code."""
    name = Path(file).stem
    assert name in JUDGED, f"no test says that {file} can fail"
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    called = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert any(call.startswith(f"claims.{name}(") for call in called), f"{file} does not judge what it measures"
    assert "sys.exit(main())" in called
    returned = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    assert any(text.endswith(".exit_code") for text in returned)


def test_every_judge_is_tested() -> None:
    judges: list[Any] = [name for name, value in vars(claims).items() if inspect.isfunction(value)]
    assert sorted(judges) == sorted(JUDGED)
