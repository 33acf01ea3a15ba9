"""Checkpoints of runs of several processes, read by several and by one, under other plans."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.comparison import Comparison
from tests.jax.launch import on_processes
from tests.jax.process_checkpoints import AFTER, BEFORE, GOES_ON, PLANS, steps, training

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """The folder of checkpoints, and the losses of runs of two processes."""
    folder = tmp_path_factory.mktemp("processes")
    on_processes("tests.jax.process_checkpoints", 2, 2, [], [str(folder)], threads=4)
    losses: dict[str, Any] = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    return folder, losses


@pytest.mark.timeout(900)
def test_processes_go_on_under_any_plan(run: tuple[Path, dict[str, list[float]]]) -> None:
    _, losses = run
    comparison = Comparison("losses after a checkpoint")
    for saved, other in GOES_ON.items():
        for target in (saved, other):
            name = f"{saved} to {target}"
            comparison.losses({name: losses[name]}, {name: losses[saved]}, moving=1e-3)
    comparison.require("losses")
    assert losses["stages to stages"] == losses["stages"], "the same bits under the same plan"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("saved", PLANS)
def test_one_process_goes_on(run: tuple[Path, dict[str, list[float]]], saved: str) -> None:
    folder, losses = run
    train, empty = training("stages", jax.devices()[:4])
    state, content = train.resume_from_checkpoint(folder, empty, saved)
    assert content["epoch"] == 1
    found, _ = steps(train, state, BEFORE, BEFORE + AFTER)
    Comparison(saved).losses(found, losses[saved], moving=1e-3).require("losses")
