"""Sums and gathers between ranks of one host that read each other's memory."""

import os
from types import SimpleNamespace

import pytest
import torch

from shardwright.backends.torch.machine import process_memory
from tests.torch.launch import Outcome, checks_in, torchrun


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return torchrun("cross_memory.py", 3, timeout_s=100)


@pytest.mark.parametrize("check", checks_in("cross_memory.py"))
def test_on_three_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]


def test_a_process_reads_its_own_memory_and_nothing_that_is_not_there() -> None:
    source, target = torch.arange(100_000.0), torch.zeros(100_000)
    process_memory.read(os.getpid(), source.data_ptr(), target.data_ptr(), source.nbytes)
    assert torch.equal(source, target)
    with pytest.raises(RuntimeError, match="could not be read: Bad address"):
        process_memory.read(os.getpid(), 8, target.data_ptr(), 64)
    with pytest.raises(RuntimeError, match="could not be read: No such process"):
        process_memory.read(2**22 - 1, source.data_ptr(), target.data_ptr(), 64)


def test_whether_siblings_may_read_each_other_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_memory.siblings_can_read()
    monkeypatch.setattr(process_memory, "_READS", "import sys; sys.exit(1)")
    assert not process_memory.siblings_can_read()


def test_the_launcher_is_named_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    named = []
    library = SimpleNamespace(prctl=lambda option, who, *rest: named.append((option, who.value, *rest)))
    monkeypatch.setattr(process_memory.ctypes, "CDLL", lambda name: library)
    process_memory.let_siblings_read()
    assert named == [(0x59616D61, os.getppid(), 0, 0, 0)]
