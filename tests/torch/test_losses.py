"""What the loss of a step is to its batch: told from the program, or asked for; see `workers/losses.py`."""

import pytest

from tests.torch.launch import Outcome, on_ranks

CHECKS = (
    "told_losses_are_those_of_the_whole_batch",
    "a_loss_inside_of_the_model_is_told_too",
    "what_cannot_be_told_is_asked_for",
    "answers_are_taken",
    "terms_with_other_counts_are_given_one_by_one",
    "batch_norm_is_asked_for",
    "the_second_argument_is_grad_tensors",
    "means_are_of_this_replica_or_of_all",
)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return on_ranks("losses.py", 2, timeout_s=280)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]


@pytest.mark.slow
def test_all_losses_are_told_over_stages_too() -> None:
    outcome = on_ranks("losses.py", 2, "--all", CHECKS[0], timeout_s=280)
    assert f"ok {CHECKS[0]}\n" in outcome.text, outcome.text[-4000:]
    assert outcome.code == 0, outcome.text[-4000:]


def test_the_launch_ends_well(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.text[-4000:]
