"""Starts worker scripts under torchrun, and ends them all when they take too long."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parents[2]
PATIENCE = 3.0
"""By how much longer than on a quiet machine a launch may take: two cores are often shared with other work."""
DYING = re.compile(r"dying at ([\d.]+)")


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
    """For the processes: one thread each, and no CUDA device, of which NCCL takes one for every rank."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    paths = [str(ROOT), kept.get("PYTHONPATH", "")]
    alike = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return kept | alike | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def run(command: list[str], timeout_s: float, extra: dict[str, str] | None = None) -> Outcome:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=environment() | (extra or {}),
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=PATIENCE * timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        raise AssertionError(
            f"{' '.join(command)} did not end within {PATIENCE * timeout_s:g} s:\n{text[-4000:]}"
        ) from None
    return Outcome(process.returncode, text)


def torchrun(script: str, processes: int, *args: str, timeout_s: float = 120.0) -> Outcome:
    """Run a worker script; the caller checks the outcome. ``timeout_s`` is that of a quiet machine."""
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


@dataclass(frozen=True)
class Survivors:
    """The first two of three ranks, after the third was gone."""

    texts: list[str]
    codes: list[int]
    seconds: float
    """From the death of the third to the end of both."""


def without_an_agent(script: str, how: str) -> Survivors:
    """Run a worker script on three ranks that nobody watches, as under mpirun or Slurm; the third prints `dying at` and
    is gone (`exit`: its connections close) or answers no more (`stuck`)."""
    port = str(free_port())
    processes = []
    for rank in range(3):
        given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3"}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(WORKERS / script), how, "2"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment() | given,
            )
        )  # fmt: skip
    try:
        texts = [process.communicate(timeout=PATIENCE * 100)[0] for process in processes[:2]]
        ended = time.time()
        processes[2].kill()
        last = processes[2].communicate(timeout=20)[0]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    dying = DYING.search(last)
    assert dying is not None, last[-3000:]
    return Survivors(texts, [process.returncode for process in processes[:2]], ended - float(dying[1]))
