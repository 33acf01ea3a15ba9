"""Communication hooks in the place of the sums over replicas: torch's own beside DDP, and hooks that are refused."""

import re
from pathlib import Path

import pytest

from tests.torch.launch import WORKERS, Outcome, torchrun

CHECKS = re.search(r"CHECKS.*?= \((.*?)\n\)", Path(WORKERS / "comm_hooks.py").read_text(), re.DOTALL)
NAMES = re.findall(r"(\w+),", CHECKS[1]) if CHECKS else []


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return torchrun("comm_hooks.py", 2, timeout_s=200)


@pytest.mark.parametrize("check", NAMES)
def test_on_two_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]
