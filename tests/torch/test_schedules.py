"""Every core schedule gives the gradients of the plain model, on four ranks, and on two in the slow tier."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.schedule import AUTO, schedule_names
from tests.comparison import Comparison
from tests.torch.launch import on_ranks

NAMES = (*schedule_names(), AUTO, "auto, two stages a rank")


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("schedules")
    outcome = on_ranks("schedules.py", request.param, str(folder / "out.json"), timeout_s=300)
    assert outcome.code == 0, outcome.text[-4000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_gives_the_gradients_of_the_plain_model(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert result is not None, "no sizes are admitted"
    kinds = ("losses",) if name == "forward-only" else ("losses", "gradients")
    Comparison.of_ranks(result["same"]).require(*kinds)


def test_split_backwards_are_among_them(results: dict[str, Any]) -> None:
    split = [name for name, result in results.items() if "W" in result["kinds"]]
    assert {"zb-h1", "zb-h2", "zbv", "dualpipev"} <= set(split)
