"""How steps run: batches of every size, measured timelines, and what is beside them in `workers/engine.py`."""

import re
from pathlib import Path

import pytest

from tests.torch.launch import WORKERS, Outcome, torchrun

CHECKS = re.search(r"CHECKS.*?= \((.*?)\n\)", Path(WORKERS / "engine.py").read_text(), re.DOTALL)
NAMES = re.findall(r"(\w+),", CHECKS[1]) if CHECKS else []


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return torchrun("engine.py", 2, timeout_s=300)


@pytest.mark.parametrize("check", NAMES)
def test_on_two_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]


def test_the_launch_ends_well(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.text[-4000:]
