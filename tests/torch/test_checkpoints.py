"""Checkpoints of PyTorch runs: any plan to any plan, with the optimizer, to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.comparison import Comparison
from tests.torch.launch import Outcome, checks_in, on_ranks

OF_RANKS = {1: ("one",), 2: ("pp2",), 4: ("tp2-dp2-s3",)}
SLOW_OF_RANKS = {
    1: ("one",),
    2: ("pp2", "dp2", "dp2-s1", "dp2-s3", "tp2", "pp2-v2"),
    4: ("pp2-dp2-s2", "tp2-dp2-s3", "pp2-tp2", "dp4-s3-groups", "pp4"),
    8: ("pp2-tp2-dp2-s1",),
}


def run(folder: Path, of_ranks: dict[int, tuple[str, ...]]) -> dict[str, Any]:
    """Every plan saves, and every plan goes on from the checkpoint of each."""
    every = [plan for plans in of_ranks.values() for plan in plans]
    out, results = folder / "out.json", dict[str, Any]()
    for ranks, plans in of_ranks.items():
        outcome = on_ranks("checkpoints.py", ranks, str(folder), str(out), "save", *plans, timeout_s=120 * len(plans))
        assert outcome.code == 0, outcome.text[-4000:]
    for ranks, plans in of_ranks.items():
        asked = (str(folder), str(out), "load", *plans, "--", *every)
        outcome = on_ranks("checkpoints.py", ranks, *asked, timeout_s=60 * len(plans) * len(every))
        assert outcome.code == 0, outcome.text[-4000:]
        results |= json.loads(out.read_text())
    assert len(results) == len(every) ** 2
    return results


def require_same(results: dict[str, Any]) -> None:
    for name, found in results.items():
        assert found["weights"], name
        assert found["state"] == [], f"{name}: differ after the load"
        assert found["more"] == [], name
        assert found["user"], name
        Comparison.of_ranks([found["compared"]]).require("losses")
        saved, _, plan = name.partition(" to ")
        if saved == plan:
            assert found["last"] == [], f"{name}: not the undisturbed run's weights"


@pytest.mark.timeout(900)
def test_any_plan_goes_on_from_any_plan(tmp_path: Path) -> None:
    require_same(run(tmp_path, OF_RANKS))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_plan_goes_on_from_every_plan(tmp_path: Path) -> None:
    require_same(run(tmp_path, SLOW_OF_RANKS))


@pytest.fixture(scope="module")
def misuse(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return on_ranks("checkpoint_misuse.py", 2, str(tmp_path_factory.mktemp("misuse")), timeout_s=120)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", checks_in("checkpoint_misuse.py"))
def test_what_is_wrong_is_said_on_every_rank(misuse: Outcome, check: str) -> None:
    assert f"ok {check}" in misuse.text, misuse.text[-4000:]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return on_ranks("checkpoint_forms.py", 2, str(tmp_path_factory.mktemp("forms")), timeout_s=180)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", checks_in("checkpoint_forms.py"))
def test_runs_of_many_forms_go_on_to_the_same_bits(forms: Outcome, check: str) -> None:
    assert f"ok {check}" in forms.text, forms.text[-4000:]


@pytest.fixture(scope="module")
def partial_files() -> Outcome:
    return on_ranks("partial_files.py", 2, timeout_s=120)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", checks_in("partial_files.py"))
def test_objects_in_files_load_under_the_partition_that_they_can(partial_files: Outcome, check: str) -> None:
    assert f"ok {check}" in partial_files.text, partial_files.text[-4000:]


KILLS = ("1:fsync:3", "0:fsync:5", "0:replace:4", "1:step:2", "1:replace:1", "0:fsync:8")
"""One after the other: files of tensors, records, the index and the marker are written when a rank is gone."""


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    out, steps = tmp_path / "out.json", 8

    def launch(folder: str, *kill: str) -> Outcome:
        asked = (str(tmp_path / folder), str(out), str(steps), json.dumps({"pipeline_parallel_degree": 2}), *kill)
        return on_ranks("checkpoint_kills.py", 2, *asked, timeout_s=60)

    outcome = launch("undisturbed")
    assert outcome.code == 0, outcome.text[-4000:]
    expected = json.loads(out.read_text())
    out.unlink()
    for kill in KILLS:
        outcome = launch("killed", kill)
        assert outcome.code != 0, f"{kill}: it was not killed: {outcome.text[-2000:]}"
        assert "CheckpointError" not in outcome.text, outcome.text[-4000:]
    outcome = launch("killed")
    assert outcome.code == 0, outcome.text[-4000:]
    found = json.loads(out.read_text())
    assert 0 < found["first"] < steps, "it went on from a checkpoint"
    assert found["digest"] == expected["digest"]
    assert found["kept"] == expected["kept"] == [f"step_{steps - 1}", f"step_{steps}"]
