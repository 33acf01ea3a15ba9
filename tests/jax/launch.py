"""Starts modules in several processes of one JAX run."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 500.0


def on_processes(
    module: str, processes: int, devices: int, before: list[str], after: list[str], threads: int
) -> list[str]:
    """Run ``python -m module BEFORE RANK PROCESSES PORT AFTER`` in every process, and require that all end well.

    devices: of each process. threads: of the pool that JAX makes in each.

    Returns:
        what each said.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": os.environ["XLA_FLAGS"] + f" --xla_force_host_platform_device_count={devices}",
        "NPROC": str(threads),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", module, *before, str(rank), str(processes), str(port), *after],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        said = [worker.communicate(timeout=LIMIT_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, text in zip(workers, said, strict=True):
        assert worker.returncode == 0, text[-4000:]
    return said
