"""A rank that dies ends the others, and each says what it waited for."""

import os
import re
import subprocess
import sys
import time

import pytest

from tests.torch.launch import DYING, environment, torchrun, without_an_agent

WAITED = re.compile(
    r"\[shardwright\] rank (\d) \(pp \d\): stage (\d), action (\S+), microbatch \d: waited [\d.]+ s for .* rank (\d)"
)


def waits(text: str) -> dict[int, tuple[str, str, str]]:
    """For each rank: the stage, the action and the peer that it waited for."""
    return {int(m[1]): (m[2], m[3], m[4]) for m in WAITED.finditer(text)}


def test_under_torchrun_the_survivors_say_what_they_waited_for() -> None:
    """torchrun sends SIGTERM as soon as one process is gone, and ranks sit in C++ then."""
    outcome = torchrun("dying.py", 3, "exit", "1", timeout_s=100)
    ended = time.time()
    assert outcome.code != 0
    dying = DYING.search(outcome.text)
    assert dying is not None, outcome.text[-3000:]
    assert ended - float(dying[1]) < 60
    found = waits(outcome.text)
    assert set(found) == {0, 2}, outcome.text[-3000:]
    assert found[0][0] == "0"
    assert found[0][2] == "1"
    assert found[2][0] == "2"
    assert found[2][2] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "stuck"])
def test_without_an_agent_the_failure_travels_from_rank_to_rank(how: str) -> None:
    """As under mpirun or Slurm with nobody to kill the others: a dead rank closes its connections, a stuck one is
    caught by the timeout of waits. `test_faults` has it of forks."""
    survivors = without_an_agent("dying.py", how)
    assert survivors.seconds < 60
    assert all(survivors.codes)
    found = waits("".join(survivors.texts))
    assert set(found) == {0, 1}, "".join(survivors.texts)[-3000:]
    assert all("PeerError" in text for text in survivors.texts)


def test_the_report_is_printed_while_the_main_thread_is_blocked() -> None:
    """SIGTERM while the main thread sits in C++ for good: the report comes, and the process ends."""
    code = (
        "import ctypes, os, sys\n"
        "from shardwright.backends.torch.machine.watchdog import Watchdog, watch_for_stop\n"
        "watchdog = Watchdog('rank 5', 60.0); watchdog.doing('stage 1, action 1F3')\n"
        "watch_for_stop(watchdog)\n"
        "with watchdog.waiting('activations from rank 4'):\n"
        "    print('blocked', flush=True)\n"
        "    read, _ = os.pipe()\n"
        "    libc = ctypes.CDLL(None)\n"
        "    while True:\n"
        "        libc.usleep(100_000_000)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "blocked\n"
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert "rank 5: stage 1, action 1F3: waited" in errors
    assert "activations from rank 4 when it was told to stop" in errors
    assert process.returncode != 0
