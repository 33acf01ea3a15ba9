"""What users get wrong on the tensor axis is named, with the fix; what cannot run on pieces runs whole."""

import json
from pathlib import Path

import pytest

from tests.torch.launch import torchrun


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out: Path = tmp_path_factory.mktemp("misuse") / "said.json"
    outcome = torchrun("tp_misuse.py", 2, str(out), timeout_s=150)
    assert outcome.code == 0, outcome.text[-4000:]
    return json.loads(out.read_text())


def test_a_hook_that_would_be_lost_is_refused(said: dict[str, str]) -> None:
    assert said["hook"].startswith("ShardwrightError: transformer.h.1 has a hook (hooked.<locals>.<lambda>)")
    assert "handle.remove()" in said["hook"]


def test_peers_with_different_batches_are_told_apart(said: dict[str, str]) -> None:
    assert "ranks 0 and 1 are tensor-parallel peers and were given different batches" in said["inputs"]


def test_all_start_from_the_weights_of_the_first(said: dict[str, str]) -> None:
    assert said["seeds"] == ""


def test_a_model_with_gradients_of_its_own_runs_whole_and_right(said: dict[str, str]) -> None:
    assert said["own gradient"] == "Scaled has a gradient of its own (torch.autograd.Function)"


def test_widths_that_do_not_divide_stay_whole_with_the_reason(said: dict[str, str]) -> None:
    assert said["odd widths"].startswith("{} ")
    assert "2 does not divide 7: pad it to 8, or use a degree that divides it" in said["odd widths"]


def test_a_model_changed_after_planning_is_refused(said: dict[str, str]) -> None:
    assert "transformer.drop was replaced by Sequential after the model was wrapped" in said["changed module"]


def test_evaluation_at_another_length_runs_on_the_same_pieces(said: dict[str, str]) -> None:
    assert said["evaluation"] == ""


def test_a_registered_form_takes_the_place_of_its_class(said: dict[str, str]) -> None:
    assert said["registered"] == "InterleavedApart"
    assert "was built before Early was registered: register first" in said["built before"]
