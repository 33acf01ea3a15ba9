"""Jobs over several processes of one host, one for each device.

The processes share, in files that have no name once all have them open: for each job its tensors and a journal of them,
and the journal of the run, in which each writes what it takes and what has ended while it holds the lock. From that
journal all of them decide alike.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.backends.torch.compat import Store
from shardwright.backends.torch.jobs.journal import Journal
from shardwright.backends.torch.jobs.shared_tensors import SharedTensors
from shardwright.backends.torch.machine.handshake import shake_hands
from shardwright.backends.torch.machine.heartbeat import Pulse
from shardwright.backends.torch.machine.host_processes import host_name
from shardwright.backends.torch.machine.process import start, this_launch
from shardwright.backends.torch.machine.watchdog import Fault, Watchdog, watch_for_stop
from shardwright.core.errors import ClusterError
from shardwright.core.jobs.jobs_plan import JobsPlan
from shardwright.core.jobs.pass_order import PassOrder

SHARED_MEMORY = Path("/dev/shm")
"""A directory whose files are in memory alone, where there is one."""
LOOK_S = 1e-4, 2e-3
"""The shortest and the longest time in seconds between two looks for news."""


def ranks_of_launch() -> int:
    """The number of processes that were started together."""
    return dist.get_world_size() if dist.is_initialized() else this_launch().world_size


class SharedRun:
    """One process's part of a run over several.

    Args:
        plan: the plan of the jobs, the same in all processes.
        seed: the same in all processes.
        failure: why this process cannot begin; the others are told, and do not begin either.

    Raises:
        ClusterError: the processes are on several hosts, or did not come.
        DisagreementError: they were given different plans or seeds, or another one cannot begin.
    """

    def __init__(
        self, plan: JobsPlan, device: torch.device, seed: int, timeout_s: float, failure: Exception | None
    ) -> None:
        self.plan, self._owns_group = plan, not dist.is_initialized()
        said = {
            "the plan of the jobs": f"{plan.counted_digest} of {', '.join(job.name for job in plan.jobs)} by "
            f"{plan.policy}, {[job.steps for job in plan.jobs]} steps",
            "the seed": str(seed),
            "the host, whose memory is shared": host_name(),
        }

        def handshake(store: Store, rank: int, size: int) -> None:
            shake_hands(store, rank, size, said, failure, timeout_s)

        joined = start(this_launch(), device, timeout_s, None, handshake)
        if joined is None:
            raise ClusterError("the process group that exists has a store of one process: let run_jobs make the group")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = joined.store
        self.watchdog = Watchdog(f"rank {self.rank}", timeout_s, device.type == "cuda")
        self.watchdog.pulse = self._pulse = Pulse(
            joined.store, self.rank, self.size, self.watchdog, joined.host, joined.host_rank,
            [group for group in (dist.group.WORLD,) if group is not None],
        )  # fmt: skip
        self._pulse.start()
        watch_for_stop(self.watchdog)
        self._files: list[int] = []
        try:
            self._open(len(plan.jobs))
        except BaseException as error:
            self.leave(error)
            raise
        self.order = PassOrder(plan, seed)

    def _open(self, jobs: int) -> None:
        """Open the files of the run, which the first rank makes, and which have no name from then on."""
        made = ""
        if self.rank == 0:
            made = tempfile.mkdtemp(prefix="shardwright-jobs-", dir=_roomy(self.plan.host_bytes))
        try:
            if made:
                for name in self._names(jobs):
                    os.close(os.open(Path(made, name), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
                self._store.set("jobs/directory", made)
            self.meet("made")
            self.where = self._store.get("jobs/directory").decode()
            self._files = [os.open(Path(self.where, name), os.O_RDWR) for name in self._names(jobs)]
            self.meet("opened")
        finally:
            if made:
                shutil.rmtree(made, ignore_errors=True)
        self._journal = Journal(self._files[0])
        self.hosts = [
            SharedTensors(file, Journal(told), self.where)
            for file, told in zip(self._files[1::2], self._files[2::2], strict=True)
        ]

    @staticmethod
    def _names(jobs: int) -> list[str]:
        return ["run", *(f"{kind}-{job}" for job in range(jobs) for kind in ("tensors", "journal"))]

    def meet(self, what: str) -> None:
        """Wait until all ranks are here."""
        self._store.add(f"jobs/{what}", 1)
        self._wait_until(lambda: self._store.add(f"jobs/{what}", 0) >= self.size, f"the others ({what})")

    def _wait_until(self, there: Callable[[], bool], what: str) -> None:
        pause_s = LOOK_S[0]
        with self.watchdog.waiting(what):
            while not there():
                self.watchdog.require_peers()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LOOK_S[1])

    # Who runs what ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _holding(self) -> Iterator[list[list[object]]]:
        """A context that one process at a time is in, and which has read what the others decided. What is put into the
        list is told to them."""

        def is_free() -> bool:
            try:
                fcntl.lockf(self._files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            return True

        if not is_free():
            self._wait_until(is_free, "the lock of the run")
        try:
            for kind, *entry in self._journal.read():
                if kind == "take":
                    taken = self.order.take(entry[0])
                    assert taken == entry[1], "the processes have decided differently"
                else:
                    self.order.end(*entry)
            told: list[list[object]] = []
            yield told
            if told:
                self._journal.append(*told)
        finally:
            fcntl.lockf(self._files[0], fcntl.LOCK_UN)

    def passes(self, run: Callable[[int, int, int], str]) -> None:
        """Take passes and run them until every job has ended. ``run`` is given a job, a step and the number of a pass
        in it, and returns why the job ends there, or ""."""
        ended: tuple[int, float, float, str] | None = None
        while True:
            with self._holding() as told:
                if ended is not None:
                    self.order.end(*ended)
                    told.append(["end", *ended])
                taken = self.order.take(self.rank)
                if taken is not None:
                    told.append(["take", self.rank, taken])
            ended = None
            if taken is not None:
                self.watchdog.doing(f"job {self.plan.jobs[taken].name}")
                begin_s = time.perf_counter()
                failure = run(taken, *self.order.jobs[taken].place)
                ended = taken, begin_s, time.perf_counter(), failure
            elif self.order.is_over:
                self.watchdog.doing("between steps")
                return
            else:
                self._wait_until(lambda: self._journal.has_news, "a job that another rank runs")

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the others, and close the files: what is mapped of them stays until nothing uses it."""
        left = Fault(self.rank, "left", f"rank {self.rank} left") if error is None else self.watchdog.fault_of(error)
        self._pulse.stop(left)
        for file in self._files:
            os.close(file)
        self._files = []
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


def _roomy(needed_bytes: int) -> str:
    """The directory for files of a run: in memory where there is room for them and half as much again."""
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        free = os.statvfs(SHARED_MEMORY)
        if free.f_bavail * free.f_frsize > 1.5 * needed_bytes:
            return str(SHARED_MEMORY)
    return tempfile.gettempdir()
