"""A sample of the fuzzer's cases, always the same ones; all of them: `python benchmarks/fuzz.py`."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fuzz_cases
import fuzz_training
from fuzz_oracle import expected_gradients, gradients, schedule_fault

from shardwright.core.schedule import Schedule, schedule_names

CASES = 40
LEAST = {"plan files": 1, "plan text": 1, "cluster and hardware files": 1, "schedule files": 1, "schedules": 1,
         "JAX arguments": 1}  # fmt: skip
"""Of the sample so many are accepted at least: a fuzzer of which everything is refused shows nothing."""


@pytest.mark.parametrize("kind", [kind for kind in fuzz_cases.KINDS if kind != "settings"])  # which load torch
def test_spoilt_input_is_refused_or_legal(kind: str) -> None:
    outcomes = []
    fuzz_training.prepare(kind)
    for number in range(CASES):
        begun = time.process_time()
        outcome, said = fuzz_cases.run(kind, 1, number)
        assert outcome in ("refused", "accepted"), f"{kind} {number}: {said}"
        assert time.process_time() - begun < 10, f"{kind} {number}"
        assert outcome != "refused" or said, f"{kind} {number}: refused without a word"
        outcomes.append(outcome)
    assert outcomes.count("accepted") >= LEAST.get(kind, 0)
    if kind != "commands":  # whose refusals are exit codes
        assert outcomes.count("refused") > 10


@pytest.mark.parametrize("name", schedule_names())
def test_the_oracle_accepts_what_is_legal(name: str) -> None:
    virtual = next(v for v in (1, 2) if _admits(name, v))
    schedule = Schedule.build(name, ranks=3, microbatches=6, virtual_stages=virtual)
    assert schedule_fault(schedule) == ""
    assert schedule_fault(schedule, must_train=True) == ("no backward" if name == "forward-only" else "")


def _admits(name: str, virtual: int) -> bool:
    try:
        Schedule.build(name, ranks=3, microbatches=6, virtual_stages=virtual)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["0F0 0B0", "1F0"], "stops at"),
        (["0F0 0B0 0F1", "1F0 1B0 1F1"], "gradients"),
        (["0F0 0B0 0B0", "1F0 1B0"], "a second time"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], "stops at"),
        (["0F0 0W0 0I0", "1F0 1B0"], "stops at"),
        (["(0F0;0B0)", "1F0 1B0"], "stops at"),
    ],
)
def test_the_oracle_sees_what_is_not(rows: list[str], said: str) -> None:
    microbatches = 2 if "0F1" in rows[0] else 1
    found, why = gradients([row.split() for row in rows], [0, 1], microbatches)
    if found is not None:
        why = f"gradients {found}" if found != expected_gradients(2, microbatches) else ""
    assert said in why
