"""Starts worker scripts under torchrun, and ends them all when they take too long."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    code: int
    text: str
    """Standard output and error together."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    paths = [str(ROOT), kept.get("PYTHONPATH", "")]
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def run(command: list[str], timeout_s: float, extra: dict[str, str] | None = None) -> Outcome:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=environment() | (extra or {}),
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        raise AssertionError(f"{' '.join(command)} did not end within {timeout_s} s:\n{text[-4000:]}") from None
    return Outcome(process.returncode, text)


def torchrun(script: str, processes: int, *args: str, timeout_s: float = 120.0) -> Outcome:
    """Run a worker script; the caller checks the outcome."""
    return run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr",
            "127.0.0.1", "--master-port", str(free_port()), str(WORKERS / script), *args,
        ],
        timeout_s,
    )  # fmt: skip


def single(script: str, *args: str, timeout_s: float = 120.0) -> Outcome:
    """Run a worker script as one process, without a launcher."""
    return run([sys.executable, str(WORKERS / script), *args], timeout_s)
