"""Starts worker scripts on several ranks, and ends them all when they take too long."""

import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np

from tests.torch.forked import free_port, live_as_script

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parents[2]
PATIENCE = 3.0
"""By how much longer than on a quiet machine a launch may take: two cores are often shared with other work."""
ENDING_S = 30.0
"""How long ranks are given to end by themselves after another has failed, as under torchrun."""
DYING = re.compile(r"dying at ([\d.]+)")


def checks_in(worker: str) -> list[str]:
    """The names of the checks of a worker that runs all of them in one launch."""
    found = re.search(r"CHECKS.*?= \((.*?)\n\)", (WORKERS / worker).read_text(), re.DOTALL)
    assert found is not None, f"{worker} has no CHECKS"
    return re.findall(r"(\w+),", found[1])


@dataclass(frozen=True)
class Outcome:
    code: int
    text: str
    """Standard output and error together."""


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


def torchrun(
    script: str, processes: int, *args: str, timeout_s: float = 120.0, extra: dict[str, str] | None = None
) -> Outcome:
    """Run a worker script under torchrun, as users do; the caller checks the outcome. ``timeout_s`` is that of a quiet
    machine; ``extra`` is added to the environment."""
    return run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr",
            "127.0.0.1", "--master-port", str(free_port()), str(WORKERS / script), *args,
        ],
        timeout_s,
        extra,
    )  # fmt: skip


def on_ranks(
    script: str, processes: int, *args: str, timeout_s: float = 120.0, nodes: Sequence[int] | None = None
) -> Outcome:
    """As `torchrun`, by forks of one process that has imported the libraries, which costs each rank nothing: as there,
    this process holds the store, and when a rank fails the others are ended. ``nodes``: the node that each rank is told
    to be on, as by agents of torchrun on several hosts."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alike = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    alike |= {"LOCAL_WORLD_SIZE": str(processes), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    given = [{"RANK": str(r), "LOCAL_RANK": str(r)} | alike for r in range(processes)]
    if nodes is not None:
        for rank, node in enumerate(nodes):
            own = {"GROUP_RANK": str(node), "LOCAL_RANK": str(nodes[:rank].count(node))}
            given[rank] |= own | {"LOCAL_WORLD_SIZE": str(nodes.count(node))}
    return _forks(given, script, args, timeout_s)


def single(script: str, *args: str, timeout_s: float = 120.0) -> Outcome:
    """Run a worker script as one process, without a launcher."""
    return _forks([{}], script, args, timeout_s)


_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    ["torch._dynamo", "transformers.modeling_utils", "shardwright.torch", "tests.comparison"]
)


def _forks(given: Sequence[dict[str, str]], script: str, args: Sequence[str], timeout_s: float) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        output.touch()
        run_script = partial(_run_script, str(WORKERS / script), list(args))
        processes = [
            _server.Process(target=_be_rank, args=(run_script, environment() | mine, output)) for mine in given
        ]
        for process in processes:
            process.start()
        begun = time.monotonic()
        try:
            while (code := _code_of(processes)) is None and time.monotonic() < begun + PATIENCE * timeout_s:
                time.sleep(0.02)
        finally:
            _end(processes)
        text = output.read_text(encoding="utf-8", errors="replace")
    said = f"{script} {' '.join(args)} did not end within {PATIENCE * timeout_s:g} s:\n{text[-4000:]}"
    assert code is not None, said
    return Outcome(code, text)


def _code_of(processes: Sequence[ForkServerProcess]) -> int | None:
    """That of the first which failed, or 0 when all have ended; None while they run."""
    codes = [process.exitcode for process in processes]
    return next(filter(None, codes), None if None in codes else 0)


def _end(processes: Sequence[ForkServerProcess]) -> None:
    """Ask those that still run to end, as torchrun does, and soon kill them with what they have started."""
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    until = time.monotonic() + ENDING_S
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _be_rank(main: Callable[[], None], environment: dict[str, str], output: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    np.random.seed()  # from the system, as in a process of its own; Python's own generator does so after a fork
    live_as_script(main, output)


def _run_script(script: str, args: list[str]) -> None:
    sys.argv = [script, *args]
    sys.path[:0] = [str(WORKERS), str(ROOT)]
    runpy.run_path(script, run_name="__main__")


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


def beside_unsplit(folder: Path, cases: Mapping[int, Sequence[str]], timeout_s: float) -> dict[str, Any]:
    """The results of `workers/tp_training.py`, by case, for the cases of each number of ranks."""
    parts = [(*case.split(":"), "")[:5] for held in cases.values() for case in held]
    precisions = [how.partition("-")[0] for *_, how in parts]
    models = sorted(
        {f"{part[0]}.{p}" if p in ("bf16", "fp8") else part[0] for part, p in zip(parts, precisions, strict=True)}
    )
    outcome = single("tp_training.py", "reference", str(folder), *models, timeout_s=timeout_s)
    assert outcome.code == 0, outcome.text[-4000:]
    found: dict[str, Any] = {}
    for processes, held in cases.items():
        out = folder / f"{processes}.json"
        outcome = on_ranks("tp_training.py", processes, str(folder), str(out), *held, timeout_s=timeout_s)
        assert outcome.code == 0, outcome.text[-4000:]
        found |= {result["case"]: result for result in json.loads(out.read_text())}
    return found
