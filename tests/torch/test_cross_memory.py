"""Sums and gathers between ranks of one host that read each other's memory."""

import os

import pytest
import torch

from shardwright.backends.torch.machine.cross_memory import read_memory
from tests.torch.launch import Outcome, checks_in, torchrun


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return torchrun("cross_memory.py", 3, timeout_s=100)


@pytest.mark.parametrize("check", checks_in("cross_memory.py"))
def test_on_three_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]


def test_a_process_reads_its_own_memory_and_nothing_that_is_not_there() -> None:
    source, target = torch.arange(100_000.0), torch.zeros(100_000)
    read_memory(os.getpid(), source.data_ptr(), target.data_ptr(), source.nbytes)
    assert torch.equal(source, target)
    with pytest.raises(RuntimeError, match="could not be read: Bad address"):
        read_memory(os.getpid(), 8, target.data_ptr(), 64)
    with pytest.raises(RuntimeError, match="could not be read: No such process"):
        read_memory(2**22 - 1, source.data_ptr(), target.data_ptr(), 64)
