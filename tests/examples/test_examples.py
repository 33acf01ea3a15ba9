"""The examples run, and the demo fails when it should."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import shardwright as sw

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """examples/demo.py, imported and not run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("_demo", EXAMPLES / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = list(sys.path)
    yield module
    sys.path[:] = before


def python(*arguments: object, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=timeout_s,
        check=False,
        capture_output=True,
        text=True,
    )


def test_the_demo(tmp_path: Path) -> None:
    ran = python(EXAMPLES / "demo.py", "--steps", 3, "--output", tmp_path, timeout_s=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("the unsplit model's losses") == 2
    assert ran.stdout.count("Same decision") == 2
    torch_plan, jax_plan = (sw.Plan.load(tmp_path / f"{name}.json") for name in ("torch_pp2_dp2", "jax_dp4_tp2"))
    assert (torch_plan.decision.pp, torch_plan.decision.dp) == (2, 2)
    assert (jax_plan.decision.dp, jax_plan.decision.tp) == (4, 2)
    assert any(not layout.is_replicated for layout in jax_plan.parameter_layouts("jax").values())
    assert xml.etree.ElementTree.parse(tmp_path / "timeline.svg").getroot().tag.endswith("svg")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


def test_the_demo_measures_the_largest_difference(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(2.0, 2.0), (4.0, 4.004), (1.0, 1.0001)]
    run = demo.print_losses(iter(rows), "pp 2", 3)
    assert run.losses == (2.0, 4.004, 1.0001)
    assert run.largest_difference == pytest.approx(1e-3)
    assert demo.print_losses(iter([(1.0, float("nan")), (1.0, 1.0)]), "pp 2", 2).largest_difference == float("inf")
    with pytest.raises(SystemExit, match="2 steps came back, 3 were asked for"):
        demo.print_losses(iter(rows[:2]), "pp 2", 3)
    capsys.readouterr()


def test_the_demo_fails_where_losses_differ(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("capture_both", "plan_both", "draw", "stay_on_the_cpu"):
        monkeypatch.setattr(demo, name, lambda *given: {("torch", "pipeline"): None})
    monkeypatch.setattr(demo, "compare_both", lambda plans: True)
    monkeypatch.setattr(demo, "train_torch", lambda *given: demo.Run((3.0,), 2e-6))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output", str(tmp_path)])
    monkeypatch.setattr(demo, "train_jax", lambda *given: demo.Run((3.0,), 9e-6))
    assert demo.main() == 0
    monkeypatch.setattr(demo, "train_jax", lambda *given: demo.Run((3.0,), 1.1e-5))
    assert demo.main() == 1
    assert "over 1e-05 apart" in capsys.readouterr().out
    monkeypatch.setattr(demo, "train_jax", lambda *given: demo.Run((3.0,), 9e-6))
    monkeypatch.setattr(demo, "compare_both", lambda plans: False)
    assert demo.main() == 1


def test_a_program_that_fails_is_reported(demo: ModuleType, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint('{\"step\": 0}', flush=True)\nsys.exit('out of luck')\n")
    lines = demo.lines_of([str(program)], tmp_path / "log")
    assert next(lines) == {"step": 0}
    with pytest.raises(SystemExit, match="out of luck"):
        next(lines)


def test_a_program_that_hangs_is_ended_with_what_it_started(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "TIME_LIMIT_S", 2)
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print('{\"child\": %d}' % child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    lines = demo.lines_of([str(program)], tmp_path / "log")
    child = next(lines)["child"]
    with pytest.raises(SystemExit):
        next(lines)
    deadline = time.monotonic() + 10  # it was sent its signal; how soon the system takes it away is not ours
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be reaped."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_twins_read_the_same_text_as_bytes(demo: ModuleType) -> None:
    twins = demo.twins
    batches = twins.batches(2)
    assert batches.shape == (2, twins.BATCH, twins.LENGTH)
    text = bytes(batches[0, 0].astype("uint8").tolist()).decode()
    assert text.isascii()
    assert " " in text
    assert (batches == twins.batches(2)).all()
    assert [len(piece) for piece in twins.microbatches(batches[0])] == [twins.MICROBATCH] * 8


def plan_from_the_shell(model: str, output: Path) -> sw.Plan:
    ran = python(
        "-c", "from shardwright.cli import main; main()", "plan", f"examples/cli_models.py:{model}",
        "--cluster", "h100", "--nodes", 64, "--devices-per-node", 8, "--batch", 512, "-o", output, timeout_s=200,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return sw.Plan.load(output)


@pytest.mark.parametrize("model", [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gpt2_xl")])
def test_twins_are_planned_alike_from_the_shell(tmp_path: Path, model: str) -> None:
    for name in (model, f"{model}_flax"):
        plan_from_the_shell(name, tmp_path / f"{name}.json")
    ran = python(
        "-c", "from shardwright.cli import main; main()", "compare", tmp_path / f"{model}.json",
        tmp_path / f"{model}_flax.json", "--exit-code", timeout_s=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_the_planning_guides_commands_that_measure(tmp_path: Path) -> None:
    """As they stand in it, on one rank."""
    guide = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    (profiled,) = re.findall(r"shardwright profile machine\.toml --model (\S+)", guide)
    (planned,) = re.findall(r"shardwright plan (\S+) --cluster machine\.toml", guide)
    machine, run = tmp_path / "machine.toml", ("-m", "shardwright")
    for command in (
        (*run, "profile", machine, "--budget", 1, "--model", profiled),
        (*run, "plan", planned, "--cluster", machine, "--devices-per-node", 1, "--batch", 8),
    ):
        ran = python(*command, timeout_s=200)
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parameters"),
    [("gpt2", 124e6), ("gpt2_flax", 124e6), ("llama_70b", 69e9), ("bert", 110e6), ("t5", 60e6)],
)
def test_the_models_for_the_command_line(tmp_path: Path, model: str, parameters: float) -> None:
    plan = plan_from_the_shell(model, tmp_path / "plan.json")
    assert plan.model.parameter_count == pytest.approx(parameters, rel=0.02)
