"""The benchmark of GPUs is ready: it refuses where there is none, and its code runs on CPUs."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu

ROOT = Path(__file__).parents[2]


def test_it_says_what_is_missing() -> None:
    asked = Namespace(device="cuda", ranks=None, tiny=False)
    assert "no CUDA device" in str(gpu.refusal(asked, 0))
    assert gpu.refusal(asked, 1) is None
    four = Namespace(device="cuda", ranks=[1, 4], tiny=False)
    assert gpu.refusal(four, 2) == "--ranks 4, and there are 2 CUDA devices"
    assert "--tiny" in str(gpu.refusal(Namespace(device="cpu", ranks=None, tiny=False), 0))
    assert gpu.refusal(Namespace(device="cpu", ranks=None, tiny=True), 0) is None


@pytest.mark.slow
def test_it_runs_on_cpus() -> None:
    """Overhead, compiled units, what is hidden and memory, on one rank and on two."""
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--device", "cpu", "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "| 1 |" in done.stdout
    assert "| 2 |" in done.stdout
