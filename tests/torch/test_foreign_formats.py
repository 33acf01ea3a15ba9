"""Weights and states of optimizers that other programs wrote, under plans of two ranks."""

import pytest

from tests.torch.launch import Outcome, checks_in, on_ranks


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return on_ranks("foreign_formats.py", 2, str(tmp_path_factory.mktemp("foreign")), timeout_s=200)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("check", checks_in("foreign_formats.py"))
def test_on_two_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}" in outcome.text, outcome.text[-4000:]
