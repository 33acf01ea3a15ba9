"""Modules that are placed on ranks by hand, and SageMaker's weight of memory."""

import pytest

from tests.torch.launch import Outcome, checks_in, on_ranks


@pytest.fixture(scope="module")
def run() -> Outcome:
    return on_ranks("placed_by_hand.py", 2, timeout_s=150)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("check", checks_in("placed_by_hand.py"))
def test_modules_are_where_they_are_placed(run: Outcome, check: str) -> None:
    assert f"ok {check}" in run.text, run.text[-5000:]
