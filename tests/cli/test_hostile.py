"""The command line and input that means ill or makes no sense: what reaches the terminal, and what is asked in vain."""

import json
from pathlib import Path

import pytest

from shardwright.core.errors import PlanWarning
from tests.cli.conftest import run

ESCAPES = "net\x1b]0;owned\x07\x9b31m\u202e"


def with_text(plan: Path, to: Path, **changes: str) -> Path:
    document = json.loads(plan.read_text())
    document["model"] |= changes
    to.write_text(json.dumps(document))
    return to


@pytest.mark.parametrize("command", ["show", "explain", "simulate"])
def test_no_escape_code_of_a_plan_reaches_the_terminal(plans: dict[str, Path], tmp_path: Path, command: str) -> None:
    spoilt = with_text(plans["pipeline"], tmp_path / "plan.json", name=ESCAPES)
    for options in ([], ["--json"]):
        ran = run(command, spoilt, *options)
        assert ran.code == 2
        said = ran.out + ran.err
        assert "control character" in said
        assert not any(character in said for character in "\x1b\x07\x9b\u202e")


@pytest.mark.parametrize("name", ["[/b]", "[bold red]x", "\ttab", "🙂" * 40])
def test_names_are_shown_as_they_are(plans: dict[str, Path], tmp_path: Path, name: str) -> None:
    spoilt = with_text(plans["pipeline"], tmp_path / "plan.json", name=name)
    for command in ("show", "explain", "simulate"):
        ran = run(command, spoilt)
        assert ran.code == 0, ran.err
    assert name.strip().split("x")[0] in run("explain", spoilt).out.replace("\n", "")


def test_no_escape_code_of_a_path_or_a_name_reaches_the_terminal(tmp_path: Path) -> None:
    for arguments in (
        ("show", tmp_path / ESCAPES),
        ("schedule", ESCAPES),
        ("plan", f"{ESCAPES}.py:f", "--cluster", "cpu", "--batch", 1),
        ("schedule", "1f1b", "--csv", tmp_path / ESCAPES / "x.csv"),
    ):
        for options in ([], ["--json"]):
            ran = run(*arguments, *options)
            assert ran.code == 2
            assert not any(character in ran.out + ran.err for character in "\x1b\x07\x9b\u202e")


MARKED = """
import torch
import shardwright.torch as sw

def free():
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
    return model, torch.zeros(4, 256), lambda out: out.mean()

def marked():
    given = free()
    sw.set_tensor_parallelism(given[0], False)
    return given
"""


def test_marks_on_the_model_are_pins_of_the_command_too(tmp_path: Path) -> None:
    (tmp_path / "marked.py").write_text(MARKED)
    degrees = ("--pp", 1, "--dp", 1, "--tp", 2)
    layouts = {}
    for name in ("free", "marked"):
        ran = run(
            "plan", f"{tmp_path}/marked.py:{name}", "--cluster", "a100-80gb", "--devices-per-node", 2, "--batch", 8,
            *degrees, "--json",
        )  # fmt: skip
        assert ran.code == 0, ran.out
        layouts[name] = ran.document["decision"]["layouts"]
    assert layouts["free"], "what is not marked is split"
    assert not layouts["marked"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("schedule", "1f1b", "--ranks", 10**9),
        ("schedule", "1f1b", "--microbatches", 10**9),
        ("schedule", "--all", "--ranks", 10**6, "--microbatches", 10**6),
        ("schedule", "1f1b", "--ranks", 10**30),
        ("schedule", "1f1b", "--f", "1e300"),
        ("schedule", "1f1b", "--activation-bytes", "1e300"),
        ("schedule", "1f1b", "--memory-limit", "1.5e400"),
        ("schedule", "1f1b", "--f", "nan"),
    ],
)
def test_sizes_beyond_all_are_refused_at_once(arguments: tuple[object, ...]) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.err.startswith("error: ")


def test_a_plan_that_was_edited_says_so(plans: dict[str, Path], tmp_path: Path) -> None:
    document = json.loads(plans["pipeline"].read_text())
    document["decision"]["microbatch"] = 4
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.warns(PlanWarning, match="counted for another decision"):
        assert "are old: they were counted for another decision" in " ".join(run("show", path).out.split())
