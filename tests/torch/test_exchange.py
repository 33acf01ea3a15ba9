"""The sums over replicas: communication hooks in their place, and steps that put them off."""

import pytest

from tests.torch.launch import Outcome, checks_in, on_ranks


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return on_ranks("exchange.py", 2, timeout_s=200)


@pytest.mark.parametrize("check", checks_in("exchange.py"))
def test_on_two_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]
