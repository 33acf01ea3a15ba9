"""`show`, `compare`, `simulate` and `explain` on plan files, good and bad."""

import json
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.backends.capabilities import JAX, JAX_MEMORY, TORCH, TORCH_MEMORY
from shardwright.core.layout.placements import Layout, Replicate
from shardwright.core.plan.schema import VERSION
from shardwright.core.schedule.files import from_csv
from shardwright.core.values.amounts import bytes_text, count_text, seconds_text
from tests.cli.conftest import run
from tests.core.toy import decoder

ROOT = Path(__file__).parents[2]


def test_show(plans: dict[str, Path]) -> None:
    ran = run("show", plans["pipeline"])
    assert ran.code == 0
    plan = sw.Plan.load(plans["pipeline"])
    for said in ("pp 2 × dp 2 × tp 1", "… head", "Memory per rank", bytes_text(max(plan.predicted.peak_memory_bytes))):
        assert said in ran.out
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["0", "0"] in [row[:2] for row in rows]
    assert ["1", "1"] in [row[:2] for row in rows]


def test_show_names_layouts_once_for_repeated_blocks(plans: dict[str, Path]) -> None:
    shown = run("show", plans["tensor"]).out
    line = next(line for line in shown.splitlines() if "h.*.fc " in line)
    assert line.split()[1:] == ["4", "32", "×", "128", "tp:", "S1", "(out)"]


def test_show_names_the_unit_whose_layout_differs(tmp_path: Path) -> None:
    pins = [(r"h\.2\.fc", Layout.of(tp=Replicate()))]
    plan = sw.plan(decoder(layers=4), sw.Cluster("cpu", devices_per_node=2), batch=16, microbatch=2, layouts=pins,
                   pp=1, dp=1, tp=2, shard=0)  # fmt: skip
    slots = [slot for slot, _ in plan.decision.layouts if slot.startswith("@")]
    plan.save(tmp_path / "plan.json")
    ran = run("show", tmp_path / "plan.json")
    assert ran.code == 0
    assert slots
    for slot in slots:
        unit, role = slot[1:].split("/", 1)
        (name,) = [name for own, name, _ in plan.bindings[0][1].units[int(unit)].parameters if own == role]
        assert any(line.split()[:2] == [name, "1"] for line in ran.out.splitlines()), (name, ran.out)


def test_show_json_is_the_plan_file(plans: dict[str, Path]) -> None:
    assert run("show", plans["tensor"], "--json").document == json.loads(plans["tensor"].read_text())


def test_compare(plans: dict[str, Path]) -> None:
    differing = run("compare", plans["pipeline"], plans["tensor"])
    assert differing.code == 0
    assert "The decisions differ." in differing.out
    same = run("compare", plans["pipeline"], plans["pipeline"])
    assert "The plans are equal." in same.out
    assert run("compare", plans["pipeline"], plans["tensor"], "--exit-code").code == 1
    assert run("compare", plans["pipeline"], plans["pipeline"], "--exit-code").code == 0


def test_compare_json(plans: dict[str, Path]) -> None:
    found = run("compare", plans["pipeline"], plans["deeper"], "--json").document
    assert found["same_decision"] is False
    by_field = {(d["part"], d["field"]): (d["first"], d["second"]) for d in found["differences"]}
    assert by_field["decision", "pp"] == ("2", "4")
    assert by_field["decision", "dp"] == ("2", "1")
    assert not any(d["expected_between_frameworks"] for d in found["differences"] if d["part"] == "decision")


def test_simulate(plans: dict[str, Path], tmp_path: Path) -> None:
    svg, trace = tmp_path / "timeline.svg", tmp_path / "trace.json"
    found = run("simulate", plans["deeper"], "--svg", svg, "--trace", trace, "--json").document
    timeline = sw.simulate(sw.Plan.load(plans["deeper"]))
    assert found["makespan_s"] == timeline.makespan_s
    assert [rank["peak_live_activations"] for rank in found["ranks"]] == [4, 3, 2, 1]
    assert xml.etree.ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert json.loads(trace.read_text())["traceEvents"]
    shown = run("simulate", plans["deeper"])
    assert shown.code == 0
    assert f"{timeline.bubble_fraction[0]:.1%}" in shown.out


def test_simulate_shows_memory_over_the_step(plans: dict[str, Path]) -> None:
    predicted = sw.Plan.load(plans["deeper"]).predicted
    found = run("simulate", plans["deeper"], "--memory", "--json").document
    for rank, most in zip(found["ranks"], predicted.memory_by_stage_rank, strict=True):
        assert max(moment["total_bytes"] for moment in rank["memory"]) == most.total_bytes
        assert rank["memory"][-1]["end_s"] == pytest.approx(predicted.step_time_s)
    shown = run("simulate", plans["deeper"], "--memory")
    assert "Memory over the step" in shown.out
    assert "memory" not in run("simulate", plans["deeper"], "--json").document["ranks"][0]


def test_memory_is_drawn_as_the_runtime_that_was_planned_for_holds_it(tmp_path: Path) -> None:
    """Names in the other framework, which stand first, change nothing."""
    graph = replace(decoder(layers=4), capabilities=TORCH, memory_traits=TORCH_MEMORY)
    pair = sw.Cluster("a100-80gb", devices_per_node=2)
    plan = sw.plan(graph, pair, batch=2, microbatch=1, pp=2, dp=1, tp=1, schedule="1f1b")
    both = plan.rebind(replace(graph, capabilities=JAX, memory_traits=JAX_MEMORY))
    assert both.bindings[0][0] == "jax"
    ranks = []
    for name, each in (("alone", plan), ("both", both)):
        each.save(tmp_path / name)
        ranks.append(run("simulate", tmp_path / name, "--memory", "--json").document["ranks"])
    assert ranks[0] == ranks[1]
    assert ranks[0][0]["memory"][0]["gradients_bytes"] == 0, "PyTorch makes gradients in every step anew"


def test_explain(plans: dict[str, Path]) -> None:
    assert "traffic over the data axis" in run("explain", plans["tensor"]).out
    lines = run("explain", plans["tensor"], "h.0.fc", "--json").document["lines"]
    assert any("layout tp: S1" in line for line in lines)
    unknown = run("explain", plans["tensor"], "h.0.fcc")
    assert unknown.code == 2
    assert "did you mean 'h.0.fc'?" in unknown.flat_err


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        document = json.loads(text)
        change(document)
        return json.dumps(document)

    return apply


BAD_FILES = {
    "cut short": (lambda text: text[: len(text) // 2], "not JSON at line"),
    "another JSON file": (lambda text: "[1, 2]", "not a plan file"),
    "newer": (edited(lambda d: d.update(version=99)), "version 99 is newer than this Shardwright reads"),
    "older": (
        edited(lambda d: d.update(version=6)),
        f"version 6 is older than this Shardwright reads ({VERSION}): plan again",
    ),
    "a class of memory taken out": (
        edited(lambda d: d["predicted"]["memory_by_stage_rank"][0].pop("batch_bytes")),
        "predicted.memory_by_stage_rank.0.batch_bytes: ",
    ),
    "version is text": (edited(lambda d: d.update(version="1")), "version is '1'"),
    "a degree of text": (edited(lambda d: d["decision"].update(pp="2")), "decision.pp: "),
    "a degree of nought": (edited(lambda d: d["decision"].update(tp=0)), "decision.tp: "),
    "an unknown schedule": (edited(lambda d: d["decision"].update(schedule="1f1bb")), "decision: schedule="),
    "an unknown field": (edited(lambda d: d["decision"].update(ppp=2)), "decision.ppp: "),
    "a missing section": (edited(lambda d: d.pop("predicted")), "predicted: "),
    "a batch that does not divide": (edited(lambda d: d["decision"].update(batch=15)), "batch=15 is not a multiple"),
    "another cut": (edited(lambda d: d["decision"].update(stage_starts=[0, 99])), "stage_starts"),
    "another shape": (
        edited(lambda d: d["model"]["classes"][1].update(w0=[7, 7])),
        "model.digest",
    ),
    "no names of any framework": (edited(lambda d: d["bindings"].clear()), "bindings: "),
    "a parameter taken out": (
        edited(lambda d: d["bindings"]["toy"]["units"][1]["parameters"].pop("w0")),
        "bindings.toy.units.1.parameters",
    ),
}


@pytest.mark.parametrize("command", ["show", "simulate", "explain", "compare"])
@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_plan_file_is_named_with_the_path_inside(
    plans: dict[str, Path], tmp_path: Path, command: str, fault: str
) -> None:
    spoil, said = BAD_FILES[fault]
    path = tmp_path / "bad.json"
    path.write_text(spoil(plans["pipeline"].read_text()))
    files = [plans["pipeline"], path] if command == "compare" else [path]
    ran = run(command, *files)
    assert ran.code == 2
    assert ran.out == ""
    assert said in ran.flat_err
    assert "bad.json" in ran.flat_err
    assert "Traceback" not in ran.err
    as_json = run(command, *files, "--json")
    assert as_json.code == 2
    assert as_json.document["error"]["kind"] == "PlanFileError"
    assert said in as_json.document["error"]["message"]


@pytest.mark.parametrize("command", ["show", "simulate", "explain"])
def test_a_plan_file_that_is_not_there(tmp_path: Path, command: str) -> None:
    ran = run(command, tmp_path / "none.json")
    assert ran.code == 2
    assert "cannot read the plan file" in ran.flat_err


def test_a_picture_that_cannot_be_written(plans: dict[str, Path], tmp_path: Path) -> None:
    ran = run("simulate", plans["pipeline"], "--svg", tmp_path / "no" / "folder.svg")
    assert ran.code == 2
    assert "there is no folder" in ran.flat_err


def test_version() -> None:
    ran = run("--version")
    assert ran.code == 0
    assert ran.out.startswith("shardwright")


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["show", "PLAN"], ["simulate", "PLAN"]])
def test_no_framework_is_imported_without_need(plans: dict[str, Path], arguments: list[str]) -> None:
    arguments = [str(plans["tensor"]) if each == "PLAN" else each for each in arguments]
    code = (
        "import sys\n"
        f"sys.argv = ['shardwright', *{arguments!r}]\n"
        "from shardwright.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "loaded = {'torch', 'jax', 'flax', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def test_amounts_are_readable() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 5 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "5 GiB"]
    assert [seconds_text(s) for s in (0.0, 3e-9, 0.0123, 2.5, 3661.0)] == ["0", "3 ns", "12.3 ms", "2.5 s", "3661 s"]
    assert [count_text(n) for n in (999, 124_439_808, 1_560_000_000)] == ["999", "124 M", "1.56 B"]


def test_a_plans_own_schedule_is_written_as_torchs_runtime_reads_it(plans: dict[str, Path], tmp_path: Path) -> None:
    csv = tmp_path / "schedule.csv"
    ran = run("simulate", plans["pipeline"], "--csv", csv)
    assert ran.code == 0, ran.err
    wanted = sw.Plan.load(plans["pipeline"]).build_schedule()
    assert from_csv(csv.read_text(), "1f1b").table == wanted.table
