"""CPU ranks of a benchmark: how they are started, and what anonymous memory one of them holds."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self


class AnonymousMemory:
    """A context that reads the anonymous memory of this process all along (``RssAnon``): mapped files are not in it."""

    def __enter__(self) -> Self:
        self.before = self.most = self.now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()
        self.most = max(self.most, self.now())

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.most = max(self.most, self.now())

    @staticmethod
    def now() -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


def launch(script: str, ranks: int, *arguments: str) -> None:
    """Run a script on so many ranks, each a process of one thread. Exits where it fails."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script,
        "--rank-of", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, check=False)
    if done.returncode:
        raise SystemExit(f"the run of {arguments[0]} failed")
