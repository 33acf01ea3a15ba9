"""The sums over replicas: communication hooks in their place, and steps that put them off."""

import re
from pathlib import Path

import pytest

from tests.torch.launch import WORKERS, Outcome, torchrun

CHECKS = re.search(r"CHECKS.*?= \((.*?)\n\)", Path(WORKERS / "exchange.py").read_text(), re.DOTALL)
NAMES = re.findall(r"(\w+),", CHECKS[1]) if CHECKS else []


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return torchrun("exchange.py", 2, timeout_s=200)


@pytest.mark.parametrize("check", NAMES)
def test_on_two_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]
