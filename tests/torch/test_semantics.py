"""What a split run promises beyond equality: randomness, weights, state dicts, the meta device, wrong inputs."""

from pathlib import Path

import pytest

from tests.torch.launch import Outcome, on_ranks, single

CHECKS = (
    "dropout_does_not_depend_on_the_split",
    "a_weighted_mean_over_unequal_microbatches",
    "gradients_are_clipped_by_the_norm_of_the_whole_model",
    "gradients_add_up_over_steps",
    "evaluation_and_changing_shapes",
    "a_state_dict_goes_around",
    "from_the_meta_device",
    "from_an_init_function",
    "a_backend_compiles_a_plan",
    "wrong_inputs",
    "data_is_shared_out",
)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("semantics")
    before = single("reference.py", str(folder))
    assert before.code == 0, before.text[-4000:]
    return folder


@pytest.fixture(scope="module")
def outcome(references: Path) -> Outcome:
    return on_ranks("semantics.py", 2, str(references), timeout_s=150)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]


@pytest.mark.slow
def test_dropout_of_other_models_does_not_depend_on_the_split(references: Path) -> None:
    outcome = on_ranks("semantics.py", 2, str(references), "--all", CHECKS[0], timeout_s=150)
    assert outcome.code == 0, outcome.text[-4000:]


def test_the_launch_ends_well(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.text[-4000:]
