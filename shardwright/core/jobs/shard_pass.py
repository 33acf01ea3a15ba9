"""The passes of a job's shards: what runs on a device at once, with the copies before and after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.core.values.fields import Amount, Seconds

PassKind = Literal["forward", "fused", "backward", "update"]
"""The kinds of passes. ``fused`` is the last shard's forward, with loss and backward; ``update`` is the optimizer's
step on a shard, where that waits for the gradients of all."""


@dataclass(frozen=True, slots=True)
class ShardPass:
    """One pass over all microbatches of a step. ``in``: what is copied from the host before it, ``out``: what is copied
    there after it."""

    kind: PassKind
    shard: Amount
    run_s: Seconds
    in_s: Seconds
    out_s: Seconds
    in_bytes: Amount
    out_bytes: Amount
    buffer_bytes: Amount
    """The most that waits for the pass on the device, or is left there behind it: inputs of further microbatches come
    while it runs."""
    device_bytes: Amount
    """The most that the device holds while the pass runs, without the buffer for the next one."""

    def seconds(self, *, beside: bool) -> float:
        """Seconds that the pass takes a device; ``beside``: whether copies run while other passes compute."""
        if beside:
            return max(self.run_s, self.in_s, self.out_s)
        return self.run_s + self.in_s + self.out_s

    @property
    def copied_s(self) -> float:
        """Seconds of its copies."""
        return self.in_s + self.out_s


def kept_within(kind: PassKind, activations_bytes: int, microbatches: int) -> int:
    """Bytes of activations which stay on the device that a pass of their own shard counts among its own: a forward
    those of all microbatches, which it makes, a backward those of the microbatch that it is at."""
    return {"forward": microbatches, "backward": 1}.get(kind, 0) * activations_bytes


@dataclass(frozen=True, slots=True)
class AloneRun:
    """Passes of one job, run one after another on one device with double buffering."""

    makespan_s: float
    running_s: float
    copied_s: float

    @property
    def hidden_share(self) -> float:
        """The share of the copies' time in which the device computes; 1 where there are none."""
        exposed_s = max(0.0, self.makespan_s - self.running_s)
        return 1.0 - min(1.0, exposed_s / self.copied_s) if self.copied_s else 1.0


def alone(passes: Sequence[ShardPass], times: int = 1) -> AloneRun:
    """The passes of a step, run so many times on one device that has no other job.

    There are two buffers: while a pass runs from one, the copies behind the pass before empty the other, and then what
    the next pass needs comes into it. Copies in one direction follow each other. What a pass hands to the next one is
    there already, and counts as if it came from the host: it is small beside the shard.
    """
    computed = left_by = arrived = left = begun = 0.0
    before_left = 0.0
    running = copied = 0.0
    for own in [each for _ in range(times) for each in passes]:
        # The buffer is free when the pass before the last one has left it, and is filled while the last one runs.
        arrived = max(arrived, before_left, begun) + own.in_s
        begun = max(computed, arrived)
        computed = begun + own.run_s
        left = max(left_by, computed) + own.out_s
        before_left, left_by = left_by, left
        running, copied = running + own.run_s, copied + own.copied_s
    return AloneRun(left_by, running, copied)
