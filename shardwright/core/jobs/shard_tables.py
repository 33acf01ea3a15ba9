"""The bytes and seconds of every shard that a model may be cut into, counted as plans count those of stages.

A shard of units a … b-1 is loaded by itself. Its forward keeps nothing but what it hands on; its backward computes the
forward again from what entered, or takes activations that the forward left on the host (or on the device, where there
is but one). The last shard's backward follows its forward at once. The microbatches of a step pass a shard one after
the other while it is there, so that gradients are added up before it leaves, and copies are made once a step.

A parameter that several shards use is loaded with each. Its gradients are summed from the last of them to the first,
on their way over the host, and the first one updates it: then all its uses are done.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

import numpy as np

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.jobs.crossing import Crossing, crossing_of, sums_of_rectangles, where_used
from shardwright.core.jobs.job import Job
from shardwright.core.jobs.shard_pass import PassKind, ShardPass
from shardwright.core.out_of_core.blocks import Label
from shardwright.core.partition.exact import Matrix, range_sums
from shardwright.core.schedule.actions import Action, B, F
from shardwright.core.schedule.peak_memory import walk_memory
from shardwright.core.tables.cost_tables import CostTables, Place
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_tables import UNCOUNTED_BYTES
from shardwright.core.tables.stage_memory import stage_memories
from shardwright.core.tables.stage_working import working_of
from shardwright.core.tables.update_seconds import touched_bytes, update_rate
from shardwright.core.values.found_once import found_once

Updates = Literal["at once", "when all are there"]
"""When a shard's parameters are updated: at the end of its backward, or when the gradients of all shards are there."""


class ShardTables:
    """The shards of one job's model on one kind of device."""

    def __init__(self, job: Job, cluster: Cluster, nesting: int = 0) -> None:
        device, self.nesting = cluster.device(0), nesting
        self.tables = CostTables(
            job.model, cluster, job.precision, job.optimizer, job.gradient_precision, nesting=nesting
        )
        self.microbatch, self.microbatches = job.microbatch or job.batch, job.microbatches
        self.optimizer, self.precision = job.optimizer, self.tables.precision
        self.waits_because = _waits_because(job.clip_norm, self.precision)
        self.updates: Updates = "when all are there" if self.waits_because else "at once"
        place = Place(device, cluster.group(range(1)), None, in_stages=True)
        self.table = self.tables.table(1, self.microbatch, "none", place)
        self.units = len(self.table.units)
        self.copy_bytes_per_s = device.host_link_bandwidth_bytes_per_s
        self.copies_beside = self.table.swaps_beside
        traits = job.model.memory_traits
        gradients = job.gradient_precision or ("fp32" if traits.gradients_in_fp32 else None)
        self.request = MemoryRequest(
            0, self.precision, job.optimizer, 0, 1, gradients, microbatches=self.microbatches,
            gradients_when_made=traits.gradients_when_made, gathers_units=traits.gathers_units,
            stages_are_programs=traits.stages_are_programs, on_cpus=device.kind == "cpu",
            frozen_in_fp32=self.tables.has_frozen_in_fp32,
        )  # fmt: skip
        self.width, self.gradient_width = PRECISION_BYTES[self.precision], self.request.gradient_width
        self.state_width = self.request.state_bytes(1, 1, 1)[2]
        self._update_s = touched_bytes(job.optimizer, self.precision, job.gradient_precision) / update_rate(device)
        self.slots = min(self.microbatches, 2) if self.copies_beside else 1
        """The microbatches whose inputs and results are on the device at once: the next ones come meanwhile, where
        copies run beside passes."""

    # What is counted for all shards ----------------------------------------------------------------------------------

    @cached_property
    def crossing(self) -> Crossing:
        """The values that cross between units."""
        return crossing_of(self.tables, self.microbatch)

    def _used(self, rows: Iterable[tuple[tuple[int, ...], int]]) -> Matrix:
        """The bytes, or entries, of what a shard's units use: each once."""
        rows = list(rows)
        return sums_of_rectangles(
            (each for users, size in rows for each in where_used(users, size, self.units)), self.units
        )

    @cached_property
    def borrowed(self) -> Matrix:
        """The trained entries that a shard uses and an earlier one updates."""
        ties = [tie for tie in self.table.ties if tie.is_trained]
        return sums_of_rectangles(
            (each for t in ties for each in where_used(t.users[1:], t.elements, self.units, behind=t.users[0])),
            self.units,
        )

    @cached_property
    def summed(self) -> Matrix:
        """The trained entries that a shard uses and a later one too: the sum of their gradients comes in."""
        ties = [tie for tie in self.table.ties if tie.is_trained]
        return sums_of_rectangles(
            (each for t in ties for each in where_used(t.users, t.elements, self.units, up_to=t.users[-1])), self.units
        )

    @cached_property
    def batch_once(self) -> Matrix:
        """Bytes of the batch that all microbatches share, as a shard reads them."""
        return self._used((by, size) for size, has_batch, by in self.table.batch if not has_batch)

    @cached_property
    def batch_each(self) -> Matrix:
        """Bytes of the batch that every microbatch has its own part of, as a shard reads them."""
        return self._used((by, size) for size, has_batch, by in self.table.batch if has_batch)

    @cached_property
    def buffers(self) -> Matrix:
        """Bytes of the model's buffers that a shard uses."""
        return self._used((by, size) for size, by in self.table.model_buffers)

    @cached_property
    def _forward_s(self) -> Matrix:
        return range_sums([unit.forward_s for unit in self.table.units])

    @cached_property
    def _backward_s(self) -> Matrix:
        units = self.table.units
        return range_sums([unit.input_grad_s + unit.weight_grad_s for unit in units]) + range_sums(self.table.again_s)

    @cached_property
    def _once_s(self) -> Matrix:
        return range_sums([unit.step_s for unit in self.table.units])

    @cached_property
    def _updated_share(self) -> Matrix:
        """The measured share of the counted time of an optimizer's step; 1 where nothing was measured."""
        trained = range_sums([unit.trained_elements for unit in self.table.units])
        measured = range_sums([unit.trained_elements * unit.update_share for unit in self.table.units])
        inside = np.isfinite(trained) & (trained > 0)
        return np.where(inside, np.divide(measured, trained, where=inside, out=np.ones_like(trained)), 1.0)

    @cached_property
    def _held_by_forward(self) -> list[int]:
        """The most bytes that the forward of each unit holds beside parameters where nothing is kept for a backward:
        what it would keep, what its passes make, and values on their way past it."""
        table = self.table
        constants = table.constant_bytes or (0,) * self.units
        rows = zip(table.units, table.boundary_bytes, constants, strict=True)
        return [unit.saved_bytes + unit.passing_bytes + flowing + constant for unit, flowing, constant in rows]

    # What is counted for one -----------------------------------------------------------------------------------------

    def parameters_bytes(self, a: int, b: int) -> int:
        """Bytes of the parameters that a shard uses, in the precision that it computes in."""
        return int(self.table.range_elements[a, b]) * self.width

    def trained(self, a: int, b: int) -> int:
        """The trained entries that a shard uses."""
        return int(self.table.range_trained[a, b])

    def updated(self, a: int, b: int) -> int:
        """The entries that a shard updates."""
        return self.trained(a, b) - int(self.borrowed[a, b])

    def optimizer_bytes(self, a: int, b: int) -> int:
        """Bytes of the optimizer's states of a shard, with the parameters in fp32 where it computes in 16 bits."""
        return self.updated(a, b) * self.state_width

    def activations_bytes(self, a: int, b: int) -> int:
        """Bytes that a forward of one microbatch keeps for its backward."""
        return int(self.table.range_kept[a, b])

    @found_once
    def passes_bytes(self, a: int, b: int) -> int:
        """The most bytes of activations, gradients and temporary values in the forwards and backwards of a step."""
        order = [Action(0, kind, microbatch) for microbatch in range(min(self.microbatches, 2)) for kind in (F, B)]
        gradients = self.trained(a, b) * self.gradient_width
        if not self.request.gradients_when_made:
            working = working_of(self.table).stage_working(a, b, again=self.microbatches > 1)
            return gradients + self.activations_bytes(a, b) + working
        at_once = self.precision == "fp32"
        stages = stage_memories(self.table, {0: (a, b)}, (0,), self.gradient_width, adds_at_once=at_once)
        return max(memory.peak for memory in walk_memory(order, stages))

    def update_bytes(self, a: int, b: int) -> int:
        """Bytes that the optimizer makes for a while as it updates a shard."""
        made = self.table.updated.made_bytes(((a, b),), 1, self.optimizer, together=not self.request.on_cpus)
        return made + UNCOUNTED_BYTES

    def update_s(self, a: int, b: int) -> float:
        """Seconds of the optimizer's step on a shard."""
        return self.updated(a, b) * float(self._updated_share[a, b]) * self._update_s

    # Passes ----------------------------------------------------------------------------------------------------------

    def passes(
        self, a: int, b: int, label: Label, shard: int = 0, updates: Updates | None = None
    ) -> tuple[ShardPass, ...]:
        """The passes of a shard in a step: its forward and its backward, or both as one of the last shard; and its
        update, where that waits. ``updates``: other than the job asks for."""
        updates = updates or self.updates
        found = [self._backward(a, b, label, shard, updates)]
        if b < self.units:
            found.insert(0, self._forward(a, b, label, shard))
        if updates == "when all are there" and self.updated(a, b):
            found.append(self._update(a, b, shard))
        return tuple(found)

    def _pass(
        self,
        kind: PassKind,
        shard: int,
        run_s: float,
        once: tuple[float, float],
        each: tuple[float, float],
        held: float,
    ) -> ShardPass:
        """A pass with its copies in and out: ``once`` a step, and for ``each`` microbatch."""
        into, out = (int(whole + self.microbatches * own) for whole, own in zip(once, each, strict=True))
        waiting = max(int(whole + own) for whole, own in zip(once, each, strict=True))
        rate = self.copy_bytes_per_s
        return ShardPass(kind, shard, run_s, into / rate, out / rate, into, out, waiting, int(held))

    def _forward(self, a: int, b: int, label: Label, shard: int) -> ShardPass:
        crossing, kept = self.crossing, self.activations_bytes(a, b)
        staying = self.parameters_bytes(a, b) + self.buffers[a, b] + self.batch_once[a, b]
        entering, leaving = self.batch_each[a, b] + crossing.entering[a, b], crossing.leaving[a, b]
        held = staying + self.slots * (entering + leaving) + UNCOUNTED_BYTES
        if label == "recompute" or (label == "offload" and not self.copies_beside):
            held += max(self._held_by_forward[a:b])  # copies that nothing runs beside are made as values come
        else:
            held += kept * (self.slots if label == "offload" else self.microbatches) + self._working(a, b)
        sent = leaving + (kept if label == "offload" else 0)
        run_s = self.microbatches * float(self._forward_s[a, b])
        return self._pass("forward", shard, run_s, (staying, self.buffers[a, b]), (entering, sent), held)

    def _working(self, a: int, b: int) -> int:
        return working_of(self.table).stage_working(a, b, again=self.microbatches > 1)

    def _backward(self, a: int, b: int, label: Label, shard: int, updates: Updates) -> ShardPass:
        crossing, is_last, at_once = self.crossing, b == self.units, updates == "at once"
        parameters, gradients = self.parameters_bytes(a, b), self.trained(a, b) * self.gradient_width
        states = self.optimizer_bytes(a, b) if at_once else 0
        sums = int(self.summed[a, b]) * self.gradient_width
        staying = parameters + self.buffers[a, b] + self.batch_once[a, b]
        inputs: float = 0
        if is_last or label == "recompute":
            inputs = crossing.entering[a, b]
        elif label == "offload":
            inputs = self.activations_bytes(a, b)
        entering = self.batch_each[a, b] + inputs + crossing.leaving_flowing[a, b] + crossing.partial_sums[a, b]
        lent = int(self.borrowed[a, b]) * self.gradient_width
        changed = self.updated(a, b) * self.width + states + lent if at_once else gradients
        # As of a stage between two others: values and gradients at either end, on their way or not used yet; where
        # copies run beside nothing, none of the next microbatch are on their way.
        flowing = crossing.entering_flowing[a, b] + crossing.leaving_flowing[a, b]
        constant = crossing.entering[a, b] + crossing.leaving[a, b] - flowing
        sent = (2 if self.copies_beside else 1) * flowing + constant + self.slots * crossing.partial_sums[a, b]
        passing = self.passes_bytes(a, b) + sent + sums + UNCOUNTED_BYTES
        held = staying + self.slots * self.batch_each[a, b]
        # States come with the shard where copies run beside other passes, else when the optimizer needs them.
        held += max(passing + states * self.copies_beside, gradients + states + self.update_bytes(a, b) * at_once)
        run_s = self.microbatches * float(self._backward_s[a, b]) + float(self._once_s[a, b])
        if is_last or label == "recompute":
            run_s += self.microbatches * float(self._forward_s[a, b])
        if at_once:
            run_s += self.update_s(a, b)
        out = changed + (self.buffers[a, b] if is_last else 0)
        kind: PassKind = "fused" if is_last else "backward"
        return self._pass(
            kind, shard, run_s, (staying + states + sums, out), (entering, crossing.entering_flowing[a, b]), held
        )

    def _update(self, a: int, b: int, shard: int) -> ShardPass:
        entries, states = self.updated(a, b), self.optimizer_bytes(a, b)
        gradients, parameters = entries * self.gradient_width, entries * self.width
        read = parameters if self.width == PRECISION_BYTES["fp32"] else 0  # else those in fp32 are among the states
        held = parameters + states + gradients + self.update_bytes(a, b)
        copies = read + states + gradients, parameters + states
        return self._pass("update", shard, self.update_s(a, b), copies, (0, 0), held)

    # The host --------------------------------------------------------------------------------------------------------

    def state_host_bytes(self, starts: Sequence[int]) -> tuple[int, int, int]:
        """Bytes on the host under a cut: the whole model's parameters and buffers, gradients that wait there, and the
        optimizer's states."""
        entries, trained = (int(of[0, self.units]) for of in (self.table.range_elements, self.table.range_trained))
        unused = max(0, self.tables.graph.parameter_count() - entries)
        parameters, gradients, states = self.request.state_bytes(entries + unused, trained, trained)
        parameters += sum(size for size, _ in self.table.model_buffers)
        if self.updates == "at once":
            ends = [(tie.users[0], tie.users[-1], tie.elements) for tie in self.table.ties if tie.is_trained]
            apart = sum(size for first, last, size in ends if any(first < start <= last for start in starts))
            gradients = apart * self.gradient_width
        return parameters, gradients, states


def _waits_because(clip_norm: float | None, precision: str) -> str:
    """Why updates wait until the gradients of all shards are there; "" where they do not."""
    reasons = []
    if clip_norm is not None:
        reasons.append(f"gradients are clipped to a norm of {clip_norm:g} over all of them")
    if precision == "fp16":
        reasons.append("a step in fp16 is left out where any gradient has overflowed")
    return ", and ".join(reasons)
