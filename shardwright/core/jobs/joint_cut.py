"""One cut for each of a list of jobs, which share devices and the buffer for the next shard on each.

A larger buffer takes the next shard of any job, and leaves less room for the one that runs: sizes are tried, and the
one under which all jobs together take least time is the answer. Where a unit of some model is too large, its blocks are
opened into smaller units, as often as it takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanError
from shardwright.core.jobs.cut import SAME, Choices, Cut, choices_of, refusal
from shardwright.core.jobs.job import Job
from shardwright.core.jobs.shard_tables import ShardTables
from shardwright.core.model.fold import fold
from shardwright.core.values.amounts import bytes_text

BUFFERS = 64
"""The most sizes of the buffer that are tried."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A job with its tables and the shards that fit a device by themselves."""

    job: Job
    tables: ShardTables
    choices: Choices


class JointCut:
    """The cuts of a list of jobs for devices of one budget."""

    def __init__(
        self, jobs: Sequence[Job], cluster: Cluster, budget: int, *, double_buffering: bool, may_offload: bool = True
    ) -> None:
        self.cluster, self.budget, self.double_buffering = cluster, budget, double_buffering
        self.may_offload = may_offload
        self.beside = double_buffering and cluster.device(0).kind != "cpu"
        self._known: dict[object, Counted] = {}
        self.counted = [self._count(job, 0) for job in jobs]

    def found(self) -> tuple[list[Counted], list[Cut]]:
        """The jobs as they are counted, and their cuts. Raises PlanError where there are none: for which job, and
        why."""
        while True:
            sizes = self._sizes()
            able = [[size for size in sizes if own.choices.cut(self.budget, size) is not None] for own in self.counted]
            if common := [size for size in sizes if all(size in those for those in able)]:
                return self.counted, self._best(common)
            hungry = self._hungriest(able)
            finer = self._finer(self.counted[hungry])
            if finer is None:
                raise self._refusal(able, hungry)
            self.counted[hungry] = finer

    def _count(self, job: Job, nesting: int) -> Counted:
        """A job with its tables, which are counted once for jobs that differ in name, length and data alone."""
        numbers = job.batch, job.microbatch, job.precision, job.gradient_precision, job.optimizer, job.clip_norm
        key = id(job.model), numbers, nesting
        if key not in self._known:
            tables = ShardTables(job, self.cluster, nesting)
            self._known[key] = Counted(
                job, tables, choices_of(tables, self.budget, beside=self.beside, may_offload=self.may_offload)
            )
        return replace(self._known[key], job=job)

    def _finer(self, own: Counted) -> Counted | None:
        """The job with its blocks opened once more; None where they cannot be, or that makes no more units: what a
        compiled runtime holds is known for whole blocks alone."""
        nesting, graph = own.tables.nesting + 1, own.job.model
        if graph.unit_memory is not None or len(fold(graph, nesting).units) <= own.tables.units:
            return None
        return self._count(own.job, nesting)

    def _sizes(self) -> list[int | None]:
        """The sizes of the buffer that are tried."""
        if not self.double_buffering:
            return [None]
        every = np.unique(np.concatenate([own.choices.buffer_bytes for own in self.counted]))
        every = every[every < self.budget]
        some = np.linspace(0, len(every) - 1, min(len(every), BUFFERS)).round().astype(int)
        return [int(size) for size in every[some]]

    def _best(self, sizes: Sequence[int | None]) -> list[Cut]:
        """The cuts under the size with which the jobs take least time together, then the fewest shards."""
        best: tuple[float, int, list[Cut]] | None = None
        for size in sizes:
            cuts = [cut for own in self.counted if (cut := own.choices.cut(self.budget, size)) is not None]
            cost_s = sum(cut.cost_s * own.job.steps for cut, own in zip(cuts, self.counted, strict=True))
            shards = sum(len(cut.starts) for cut in cuts)
            if best is None or cost_s < best[0] * (1 - SAME) or (cost_s <= best[0] * (1 + SAME) and shards < best[1]):
                best = cost_s, shards, cuts
        assert best is not None
        return best[2]

    @staticmethod
    def _hungriest(able: Sequence[Sequence[int | None]]) -> int:
        """The job that no size suits, or the one that needs the largest."""
        least = [min((size or 0 for size in sizes), default=float("inf")) for sizes in able]
        return least.index(max(least))

    def _refusal(self, able: Sequence[Sequence[int | None]], hungry: int) -> PlanError:
        own = self.counted[hungry]
        if not able[hungry]:
            return refusal(own.job.name, own.tables, self.budget, double=self.double_buffering)
        most = [max(size or 0 for size in sizes) for sizes in able]
        large, needed = most.index(min(most)), min(size or 0 for size in able[hungry])
        return PlanError(
            f"jobs {own.job.name!r} and {self.counted[large].job.name!r} do not fit {bytes_text(self.budget)} together"
            f": shards of the first need a buffer of {bytes_text(needed)} beside those of the second, which leave "
            f"{bytes_text(min(most))}. Give a larger budget, smaller microbatches, or double_buffering=False"
        )
