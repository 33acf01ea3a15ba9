"""Jobs on two ranks: every weight, buffer and state as of training alone, and what ends one job or all."""

import pytest

from tests.torch.launch import Outcome, checks_in, on_ranks


@pytest.fixture(scope="module")
def launched() -> Outcome:
    return on_ranks("jobs.py", 2, timeout_s=90)


@pytest.mark.parametrize("check", checks_in("jobs.py"))
def test_jobs_on_two_ranks(launched: Outcome, check: str) -> None:
    assert f"ok {check}" in launched.text, launched.text[-6000:]
