"""Processes that `step_time.py` starts: every profile and every plan alone in processes of its own.

They come from a server that has imported the framework and nothing else done, so that a launch is a fork. PyTorch has a
process of one thread for each rank, Gloo; JAX one process with as many devices, and a thread for each.
"""

import functools
import logging
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")
HERE = Path(__file__).resolve().parent
STAYS = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""Of JAX's processes: freed memory stays with them, else much of a step is page faults, more or fewer from launch to
launch."""
NEEDED = {
    "torch": ["torch.distributed", "shardwright.torch", "step_run", "step_reference", "step_models", "tracked"],
    "jax": ["shardwright.jax", "optax", "step_run", "step_reference", "jax_models", "memory_jax"],
}
"""What the server imports."""
LIMIT_S = 900.0
TRIES = 3


class Failed(Exception):
    """A process failed: what it said."""


class Launcher:
    """Of one framework. ``others``: of the cores, what other work may take while something is measured; ``folder`` is
    for what JAX compiles, as of a plan's launches the first does."""

    def __init__(self, framework: str, others: float, folder: Path) -> None:
        self.framework, self.others, self.folder = framework, others, folder
        paths = (str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", ""))
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        if framework == "jax":
            os.environ |= STAYS  # read when a process starts
        self.server = multiprocessing.get_context("forkserver")
        self.server.set_forkserver_preload(NEEDED[framework])

    def run(self, ranks: int, work: Callable[..., Found], *arguments: Any) -> Found:
        """What ``work(framework, *arguments)`` gives on the first of so many ranks. Run again, at most twice, while
        other work takes more of the cores than it may. Raises Failed."""
        for _ in range(TRIES):
            (busy, stolen), own = cpu_s(), sum(os.times()[:2])
            began = time.perf_counter()
            found, used = self._once(ranks, functools.partial(work, self.framework, *arguments))
            (busy_after, stolen_after), own_after = cpu_s(), sum(os.times()[:2])
            beside = (busy_after - busy) - (own_after - own) - used + (stolen_after - stolen)
            share = beside / (time.perf_counter() - began) / (os.cpu_count() or 1)
            if share <= self.others:
                break
            print(f"<!-- others had {share:.0%} of the cores beside {work.__name__}: measured again -->", flush=True)
        return found

    def _once(self, ranks: int, work: Callable[[], Found]) -> tuple[Found, float]:
        """The result, and the seconds of all cores that the processes took."""
        environments = self._environments(ranks)
        pipes = [self.server.Pipe(duplex=False) for _ in environments]
        running = [
            self.server.Process(target=_enter, args=(theirs, environment, str(self.folder), work))
            for (_, theirs), environment in zip(pipes, environments, strict=True)
        ]
        answers: dict[connection.Connection, tuple[Any, float]] = {}
        until = time.monotonic() + LIMIT_S
        try:
            for each, (_, theirs) in zip(running, pipes, strict=True):
                each.start()
                theirs.close()
            while len(answers) < len(running):
                waiting = [ours for ours, _ in pipes if ours not in answers]
                ready: Any = connection.wait(waiting, until - time.monotonic())
                if not ready:
                    raise Failed(f"nothing after {LIMIT_S:.0f} s")
                for ours in ready:
                    try:
                        said, *answer = ours.recv()
                    except EOFError:
                        raise Failed("a process died") from None
                    if said:
                        raise Failed(said)
                    answers[ours] = tuple(answer)  # type: ignore[assignment]
            for each in running:
                each.join(30)
        finally:
            for each in running:
                each.kill()
        return answers[pipes[0][0]][0], sum(used for _, used in answers.values())

    def _environments(self, ranks: int) -> list[dict[str, str]]:
        if self.framework == "jax":
            return [{"XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}", "NPROC": str(ranks)}]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks),
                  "LOCAL_WORLD_SIZE": str(ranks)}  # fmt: skip
        return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _enter(answer: Any, environment: dict[str, str], folder: str, work: Callable[[], Any]) -> None:
    """Of a new process: answers with (what went wrong, the result, seconds of cores)."""
    os.environ |= environment
    logging.getLogger("shardwright.steps").setLevel(logging.WARNING)  # a line for every few steps
    if "XLA_FLAGS" in environment:
        import jax

        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        found = work()
    except Exception as error:
        traceback.print_exc()
        answer.send((f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", None, 0.0))
    else:
        answer.send(("", found, sum(os.times()[:2])))


def cpu_s() -> tuple[float, float]:
    """Seconds of all cores at work, and of those that the host gave to others, since the machine started."""
    fields = [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _waiting, irq, softirq, steal = fields[:8]
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks_per_s, steal / ticks_per_s
