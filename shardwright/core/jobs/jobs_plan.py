"""The plan of a list of jobs: the shards of each, what they hold, the policy, and when each job ends."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.jobs.finish import Simulated, simulated
from shardwright.core.jobs.shard_pass import AloneRun, ShardPass, alone, kept_within
from shardwright.core.out_of_core.blocks import Label
from shardwright.core.plan.decision import OptimizerName
from shardwright.core.tables.memory import Precision, SumPrecision
from shardwright.core.values.amounts import bytes_text, seconds_text
from shardwright.core.values.fields import Amount, Count, Rate, Seconds

STEPS_ALONE = 3
"""The steps over which the hidden share of copies is counted: the last ones are as all behind them."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of a job's model: the units ``first_unit`` … ``end_unit`` - 1, and the bytes of its parts."""

    first_unit: Amount
    end_unit: Count
    activations: Label
    """What becomes of its activations between forward and backward: computed again, offloaded to the host, or kept."""
    first_module: str
    last_module: str
    parameters_bytes: Amount
    gradients_bytes: Amount
    optimizer_bytes: Amount
    activations_bytes: Amount
    """Bytes of the activations of one microbatch."""


@dataclass(frozen=True, slots=True)
class HostBytes:
    """What a job has on the host at most."""

    parameters: Amount
    """Bytes of parameters and of the model's buffers."""
    gradients: Amount
    """Bytes of gradients that wait there: for those of other shards, or for the sum over the uses of a parameter."""
    optimizer: Amount
    values: Amount
    """Bytes of the values between shards, and of their gradients, of all microbatches of a step."""
    activations: Amount
    """Bytes of offloaded activations."""

    @property
    def total(self) -> int:
        """The bytes of all of them."""
        return self.parameters + self.gradients + self.optimizer + self.values + self.activations


@dataclass(frozen=True, slots=True)
class Waiting:
    """The price of updates that wait until the gradients of all shards are there."""

    reason: str
    """Why they wait; "" where they do not."""
    host_bytes: Amount
    """Bytes of the gradients that are on the host meanwhile."""
    step_s: Seconds
    """Seconds by which a step is longer."""
    copied_bytes: Amount
    """Bytes that a step copies in addition."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job of a plan."""

    name: str
    model_name: str
    model_digest: str
    parameter_count: Amount
    steps: Count
    batch: Count
    microbatch: Count
    optimizer: OptimizerName
    clip_norm: Rate | None
    precision: Precision
    gradient_precision: SumPrecision | None
    output: str | None
    batches: Amount | None
    """The number of batches in its data, where it is known."""
    nesting: Amount
    """How often blocks of the model are opened into smaller units, because larger ones do not fit."""
    shards: tuple[Shard, ...]
    passes: tuple[ShardPass, ...]
    """The passes of a step, in order."""
    host: HostBytes
    waiting: Waiting

    @property
    def device_bytes(self) -> int:
        """The most bytes that a device holds for the job, without the buffer for the next pass."""
        return max(own.device_bytes for own in self.passes)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the activations that stay on the device while other jobs run: none of the last shard's."""
        microbatches = self.batch // self.microbatch
        return microbatches * sum(s.activations_bytes for s in self.shards[:-1] if s.activations == "keep")

    @property
    def bytes_beside_kept(self) -> int:
        """The most bytes that a device holds for a pass of the job, beside activations that are kept there, the pass's
        own among them, and without the buffer for the next pass."""
        microbatches, last = self.batch // self.microbatch, len(self.shards) - 1
        return max(
            own.device_bytes
            - (
                kept_within(own.kind, self.shards[own.shard].activations_bytes, microbatches)
                if own.shard < last and self.shards[own.shard].activations == "keep"
                else 0
            )
            for own in self.passes
        )

    @property
    def run_s(self) -> float:
        """Seconds that a step computes."""
        return sum(own.run_s for own in self.passes)

    @property
    def copied_bytes(self) -> int:
        """Bytes that a step copies, in both directions."""
        return sum(own.in_bytes + own.out_bytes for own in self.passes)

    def alone(self) -> AloneRun:
        """A step of the job on a device that runs nothing else, with double buffering, in a row of them."""
        fewer, more = alone(self.passes, STEPS_ALONE - 1), alone(self.passes, STEPS_ALONE)
        return AloneRun(
            more.makespan_s - fewer.makespan_s, more.running_s - fewer.running_s, more.copied_s - fewer.copied_s
        )


@dataclass(frozen=True, slots=True)
class PredictedEnds:
    """When the jobs end, by simulation."""

    makespan_s: Seconds
    finish_s: tuple[tuple[str, Seconds], ...]
    """Seconds from the start to the end of each job, by its name."""
    counted_for: str
    """A digest of what these were simulated from, and of the ends themselves."""


@dataclass(frozen=True, slots=True)
class JobsPlan:
    """A plan of jobs on devices that are alike."""

    jobs: tuple[PlannedJob, ...]
    cluster: Cluster
    budget_bytes: Count
    """What the jobs may hold of a device's memory."""
    buffer_bytes: Amount
    """What of it is the buffer for the next pass."""
    host_memory_bytes: Amount | None
    """What the jobs may hold of the host's memory; None: not known, and no limit."""
    policy: str
    double_buffering: bool
    copies_beside: bool
    """Whether copies run while a device computes, as they do not on CPUs."""
    predicted: PredictedEnds
    digest: str
    """A digest of all that is counted from the models. These parts are not for editing."""

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.cluster.world_size

    @property
    def device_bytes(self) -> int:
        """The most bytes that any device holds, with the buffer and the activations that are kept there."""
        kept = sum(job.kept_bytes for job in self.jobs)
        return max(job.bytes_beside_kept for job in self.jobs) + self.buffer_bytes + kept

    @property
    def host_bytes(self) -> int:
        """The most bytes that all jobs have on the host."""
        return sum(job.host.total for job in self.jobs)

    @property
    def counted_digest(self) -> str:
        """The digest of what was counted, as it is now."""
        jobs = [replace(job, name="", steps=1, output=None, batches=None) for job in self.jobs]
        return _digest(jobs, self.cluster.to_document(), self.buffer_bytes, self.double_buffering, self.copies_beside)

    def _digest_of_ends(self, makespan_s: float, finish_s: tuple[tuple[str, float], ...]) -> str:
        """The digest of ends with all that they follow from, as it is now."""
        jobs = [(job.name, job.steps) for job in self.jobs]
        return _digest(jobs, self.counted_digest, self.policy, float(makespan_s), finish_s)

    @property
    def is_stale(self) -> bool:
        """Whether names, steps, the policy or the ends themselves were edited since the ends were simulated."""
        own = self.predicted
        return own.counted_for != self._digest_of_ends(own.makespan_s, own.finish_s)

    def simulated(self) -> "JobsPlan":
        """The plan with its ends simulated anew. Raises PlanError for a policy that is not known."""
        found: Simulated = simulated(
            [(job.passes, job.steps) for job in self.jobs], self.devices, self.policy,
            double_buffering=self.double_buffering, copies_beside=self.copies_beside,
        )  # fmt: skip
        ends = tuple((job.name, end) for job, end in zip(self.jobs, found.finish_s, strict=True))
        counted_for = self._digest_of_ends(found.makespan_s, ends)
        return replace(self, predicted=PredictedEnds(found.makespan_s, ends, counted_for))

    def summary(self) -> str:
        """The plan in a line."""
        shards = sum(len(job.shards) for job in self.jobs)
        ends = "ends not simulated since an edit" if self.is_stale else seconds_text(self.predicted.makespan_s)
        return (
            f"{len(self.jobs)} jobs in {shards} shards on {self.devices} × {self.cluster.device(0).name}, "
            f"{self.policy}: {ends}, {bytes_text(self.device_bytes)} of "
            f"{bytes_text(self.budget_bytes)} on a device, {bytes_text(self.host_bytes)} on the host"
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as a file. Raises PlanFileError when it cannot be written."""
        from shardwright.core.jobs.file import write

        write(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "JobsPlan":
        """The plan in a file. Raises PlanFileError with the path inside the file of the first thing that is wrong."""
        from shardwright.core.jobs.file import read

        return read(path)

    def to_document(self) -> dict[str, Any]:
        """The plan as plain values."""
        from shardwright.core.jobs.file import to_document

        return to_document(self)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
