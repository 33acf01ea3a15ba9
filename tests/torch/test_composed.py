"""Recompute, offload, divided gradients, stages, replicas and a tensor axis in one run, dropout on: losses, gradients
and weights are those of the unsplit run that keeps everything."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.comparison import Comparison
from tests.torch.launch import on_ranks, single

CASES = ("zb-h1:1:mixed:2",)
SLOW = (
    "1f1b:1:mixed:2",
    "zbv:2:mixed:2",
    "zb-h1:1:full:3",
    "zb-h1:1:offloaded:2",
    "zb-h1:1:elementwise:2",
    "zb-h1:1:two:2",
    "interleaved-1f1b:2:full:1",
    "dualpipev:2:mixed:1",
)


def results_of(cases: tuple[str, ...], folder: Path, timeout_s: float) -> dict[str, Any]:
    outcome = single("composed.py", "reference", str(folder))
    assert outcome.code == 0, outcome.text[-4000:]
    outcome = on_ranks("composed.py", 8, str(folder), str(folder / "out.json"), *cases, timeout_s=timeout_s)
    assert outcome.code == 0, outcome.text[-4000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(CASES, tmp_path_factory.mktemp("composed"), 280)


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(SLOW, tmp_path_factory.mktemp("composed"), 900)


def require_same(result: dict[str, Any], case: str) -> None:
    schedule, virtual, policy, shard = case.split(":")
    Comparison.of_ranks(result["same"]).require("losses", "gradients", "weights")
    assert ("W" in result["kinds"]) == (schedule in ("zb-h1", "zbv", "dualpipev"))
    assert result["shard"] == int(shard)
    if schedule == "zb-h1":  # the four products of each of two blocks, in columns and in rows
        assert result["put off"] >= 8
    of_policies = {"mixed": {"full", "offload"}, "offloaded": {"offload"}, "two": {"full", "elementwise"}}
    asked = of_policies.get(policy, {policy})
    assert asked <= {mode for modes in result["modes"] for mode in modes}
    if policy in ("mixed", "two") and virtual == "1":
        assert all(asked <= set(modes) for modes in result["modes"]), "each stage has both"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES)
def test_all_at_once_trains_as_the_unsplit_model(results: dict[str, Any], case: str) -> None:
    require_same(results[case], case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", SLOW)
def test_other_schedules_and_policies(slow_results: dict[str, Any], case: str) -> None:
    require_same(slow_results[case], case)
