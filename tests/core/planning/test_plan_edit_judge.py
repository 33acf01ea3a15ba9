"""What judges random edits of plans (`benchmarks/edited_plans.py`) can fail: it finds each way to be wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.core.errors import PlanError
from shardwright.core.plan.plan import Plan
from tests.core.toy import decoder
from tests.plan_edit_judge import Edit, Original, judge, judge_commands

RESCORE = sw.rescore


@pytest.fixture(scope="module")
def original() -> Original:
    pins: dict[str, Any] = {"pp": 2, "dp": 2, "tp": 2, "microbatch": 2, "schedule": "1f1b", "virtual_stages": 1}
    return Original.of(decoder(layers=4), sw.Cluster("a100-80gb", devices_per_node=8), 32, **pins)


def by_name(original: Original, **changes: Any) -> Edit:
    return Edit(str(changes), tuple(changes), original.document, changes)


def in_file(original: Original, section: str, **values: Any) -> Edit:
    document = original.document | {section: original.document[section] | values}
    return Edit(str(values), tuple(values), document, {})


def refuse(plan: Plan, **changes: Any) -> Plan:
    raise PlanError(f"{changes}: no")


def crash(plan: Plan, **changes: Any) -> Plan:
    raise KeyError("microbatch")


SPOILT: dict[str, tuple[Callable[..., Plan], str]] = {
    "the edit is dropped": (lambda plan, **changes: plan, "microbatch was edited to 4 and is 2"),
    "figures are those of before": (
        lambda plan, **changes: replace(
            RESCORE(plan, **changes), costs=replace(plan.costs, idle_lent=0.5), counted_for=""
        ),
        "plan() differs in costs",
    ),
    "something else is changed too": (
        lambda plan, **changes: RESCORE(plan, **changes, recompute="full"),
        "recompute was none, was not edited, and is full",
    ),
    "figures are old": (lambda plan, **changes: replace(RESCORE(plan, **changes), counted_for="x"), "it is stale"),
    "it is refused for nothing": (refuse, "and yet plan() makes"),
    "it crashes": (crash, "KeyError"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_wrong_result_is_found(original: Original, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = by_name(original, microbatch=4)
    assert judge(original, edit).kind == "rescored"
    spoilt, said = SPOILT[how]
    monkeypatch.setattr(sw, "rescore", spoilt)
    outcome = judge(original, edit)
    assert (outcome.kind, said in outcome.said) == ("wrong", True), outcome


def test_a_refusal_that_names_nothing_is_wrong(original: Original, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = by_name(original, microbatch=3)
    assert judge(original, edit).kind == "refused"
    monkeypatch.setattr(sw, "rescore", lambda plan, **changes: refuse(plan))
    assert judge(original, edit).said.startswith("not named")


@pytest.mark.parametrize("section", ["decision", "provenance"])
def test_a_file_that_passes_for_one_that_was_not_edited_is_found(
    original: Original, section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"decision": {"microbatch": 4}, "provenance": {"headroom": 0.5}}[section]
    edit = in_file(original, section, **values)
    assert judge(original, edit).kind == "rescored"
    assert judge_commands(original, edit, tmp_path) == ""
    monkeypatch.setattr("shardwright.report.tables.stale_note", lambda plan: None)
    monkeypatch.setattr("shardwright.report.tables.Plan.is_stale", False)
    assert "the file loads as one that was not edited" in judge(original, edit).said


def test_a_command_that_does_not_say_that_figures_are_old_is_found(
    original: Original, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit = in_file(original, "decision", microbatch=4)
    monkeypatch.setattr("shardwright.core.plan.explain.stale_note", lambda plan: None)
    monkeypatch.setattr("shardwright.core.plan.explain.BEFORE", "")
    assert judge_commands(original, edit, tmp_path).startswith("explain: does not say")


def test_a_command_that_crashes_is_found(original: Original, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.commands.simulate.break_down", crash)
    assert judge_commands(original, in_file(original, "run"), tmp_path).startswith("simulate: KeyError")
