"""A step of a job under way: its batch, and on the host what passes leave for others."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwright.backends.jax.jobs.device_memory import Host
from shardwright.backends.jax.jobs.programs import JobPrograms
from shardwright.backends.jax.pipeline.stage_functions import TOTAL, WEIGHT, Key


@dataclass(slots=True, eq=False)
class JobStep:
    """A step under way: its batch, and on the host what passes left for others."""

    programs: JobPrograms
    batch: dict[int, Host]
    """The leaves of the batch by their values in the program, those with a batch dim split into microbatches."""
    other: dict[int, Host]
    """The model's other values as they are now, by their values in the program."""
    values: dict[tuple[int, int], Host] = field(default_factory=dict)
    """The values between shards, by number and microbatch."""
    gradients: dict[tuple[int, int], Host] = field(default_factory=dict)
    """The gradients of those, summed over the shards that use them."""
    before: dict[tuple[int, int], Host] = field(default_factory=dict)
    """What changes with every microbatch, as the forward of a microbatch found it, by value and microbatch."""
    kept: dict[tuple[int, int], dict[Key, Any]] = field(default_factory=dict)
    """What forwards left for backwards, by shard and microbatch: on the host, or on the device."""
    sums: dict[tuple[int, int], Host] = field(default_factory=dict)
    """`TOTAL` and `WEIGHT` of every microbatch."""
    scalars: dict[Key, Host] = field(default_factory=dict)
    """Scalars of several shards, and their parts, for the update."""

    @property
    def microbatches(self) -> range:
        """The numbers of the step's microbatches."""
        return range(self.programs.microbatches.microbatches)

    def losses(self) -> tuple[float, ...]:
        """The losses of the microbatches, once they are there."""
        of, found = self.programs.microbatches, []
        for m in self.microbatches:
            total, counted = self.sums[TOTAL, m], self.sums[WEIGHT, m]
            divisor = counted if of.reduction is None else of.reduction.divisor(of.samples, counted)  # type: ignore[arg-type]
            found.append(float(total) / float(divisor))
        return tuple(found)

    def summed(self, which: int) -> Host:
        """`TOTAL` or `WEIGHT` over all microbatches."""
        found = np.zeros((), np.float32)
        for m in self.microbatches:
            found = found + np.asarray(self.sums[which, m])
        return np.asarray(found)
