"""Sums of gradients of a few rows over ranks: `workers/row_gradients.py`, on four."""

import pytest

from tests.torch.launch import Outcome, checks_in, on_ranks


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return on_ranks("row_gradients.py", 4, timeout_s=90)


@pytest.mark.parametrize("check", checks_in("row_gradients.py"))
def test_on_four_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]


def test_the_launch_ends_well(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.text[-4000:]


@pytest.fixture(scope="module")
def training() -> Outcome:
    return on_ranks("row_training.py", 4, timeout_s=120)


@pytest.mark.parametrize("check", checks_in("row_training.py"))
def test_training_on_four_ranks(training: Outcome, check: str) -> None:
    assert f"ok {check}\n" in training.text, training.text[-4000:]
