"""How steps run: batches of every size, measured timelines, and what is beside them in `workers/engine.py`."""

import pytest

from tests.torch.launch import Outcome, checks_in, on_ranks


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return on_ranks("engine.py", 2, timeout_s=300)


@pytest.mark.parametrize("check", checks_in("engine.py"))
def test_on_two_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]


@pytest.fixture(scope="module")
def outcome_of_all() -> Outcome:
    return on_ranks("engine.py", 2, "--all", timeout_s=600)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("check", checks_in("engine.py"))
def test_more_on_two_ranks(outcome_of_all: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome_of_all.text, outcome_of_all.text[-4000:]


def test_the_launch_ends_well(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.text[-4000:]
