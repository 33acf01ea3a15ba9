"""What the command line says of errors, margins and trainings, and how it refuses what cannot be kept."""

from dataclasses import replace
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.core.plan.training_run import TrainingRun
from tests.cli.conftest import run

FOUR = ("--cluster", "a100-80gb", "--devices-per-node", 4, "--batch", 16, "--pp", 1, "--tp", 1)


def test_show_says_the_error_the_margin_and_the_price(plans: dict[str, Path], tmp_path: Path) -> None:
    plan = sw.Plan.load(plans["pipeline"])
    asked = TrainingRun(tokens=1e9, deadline_s=1.0, budget_usd=1e9, usd_per_hour=20.0)
    path = tmp_path / "asked.json"
    replace(plan, run=asked).save(path)
    ran = run("show", path)
    assert ran.code == 0, ran.err
    said = " ".join(ran.out.split())
    error, training = plan.predicted.error, replace(plan, run=asked).training
    assert f"± {error.step_time:.0%} ({error.basis})" in said
    assert f"{plan.provenance.headroom:.1%} of it left free" in said
    assert "margin" in said
    assert "20.00 USD an hour for all devices" in said
    assert f"1e+09 tokens are {training}, ± {error.step_time:.0%}" in said
    assert "NOTE: the deadline is nearer than the prediction's error" in said
    assert "NOTE: the budget" not in said


def test_compare_says_whether_the_error_lets_it_tell(plans: dict[str, Path], tmp_path: Path) -> None:
    plan = sw.Plan.load(plans["pipeline"])
    near = replace(plan, predicted=replace(plan.predicted, step_time_s=plan.predicted.step_time_s * 1.01))
    near.save(tmp_path / "near.json")
    ran = run("compare", plans["pipeline"], tmp_path / "near.json")
    assert "The first is predicted to be 1.0% faster" in " ".join(ran.out.split())
    assert "predictions do not tell which is faster" in " ".join(ran.out.split())
    found = run("compare", plans["pipeline"], plans["deeper"], "--json").document["faster"]
    assert found == sw.compare(plan, sw.Plan.load(plans["deeper"])).faster


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--headroom", 1), "headroom=1 leaves nothing"), (("--headroom", -1), "headroom=-1.0: expected a number"),
        (("--deadline", "3d"), "deadline='3d' of what training"),
        (("--deadline", "soon", "--samples", 5), "deadline='soon': expected days"),
        (("--budget", 5), "budget=5.0 of what training"), (("--tokens", 1e9), "takes no tokens"),
        (("--deadline", "1min", "--samples", 10**12), "the fastest of all takes"),
        (("--answer", "simple"), "did you mean 'simplest'"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(models: Path, given: tuple[object, ...], said: str) -> None:
    ran = run("plan", f"{models}/torch_models.py:with_loss", *FOUR, *given)
    assert ran.code == 2
    assert said in ran.flat_err
