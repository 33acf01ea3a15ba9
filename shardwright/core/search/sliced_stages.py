"""The memory of every slice of a stage, from the tables of whole sequences and what was counted of each slice.

A slice keeps what its own tokens need, its part of the keys and values of the sequence, and what was made before all
slices and is read by it. What runs once behind the last slice finds what all slices made for it, and hands the
gradients of all back at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import Unit
from shardwright.core.search.shared_keys import SharedKeys
from shardwright.core.search.slice_counts import Behind, SliceWork, Ways
from shardwright.core.search.sliced_walk import SliceMemory
from shardwright.core.search.values_before import HeldBefore, ValuesBefore
from shardwright.core.slices.sequence_ops import SequenceOps
from shardwright.core.tables.backward_halves import halves_of
from shardwright.core.tables.gathered_units import stage_passes
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.stage_memory import backward_passes, sharing_before
from shardwright.core.tables.stage_working import working_of
from shardwright.core.tables.unit_table import UnitTable

Ends = tuple[int, int]
"""The (first unit, end) of a stage."""


class SlicedStages:
    """The stages of one choice in slices, of one microbatch.

    Args:
        counter: of whole sequences.
        slices: of the sequence, in order, and ``lengths`` in tokens.
        behind: what runs behind the last slice.
        units: of the model.
        ways: the number of shards of an operand.
        batch: samples of a microbatch.
    """

    def __init__(
        self,
        counter: WorkCounter,
        ops: SequenceOps,
        slices: Sequence[SliceWork],
        lengths: Sequence[int],
        behind: Behind,
        units: Sequence[Unit],
        ways: Ways,
        batch: int,
        request: MemoryRequest,
        *,
        fuses_dropout: bool,
    ) -> None:
        self.whole, self.ops, self.slices, self.behind, self.units = counter.graph, ops, slices, behind, units
        self.batch, self.request = batch, request
        asked = ways, batch, request.precision
        self.keys = SharedKeys(self.whole, ops, slices, lengths, *asked, fuses_dropout=fuses_dropout)
        self.before = ValuesBefore(counter, ops, slices, *asked)

    @property
    def longest_share(self) -> float:
        """The share of a sequence's tokens that its longest slice has."""
        return max(of.share for of in self.slices)

    def of_rank(
        self, whole: UnitTable, held: Mapping[int, Ends], first: Sequence[int]
    ) -> dict[int, tuple[SliceMemory, ...]]:
        """The slices of the stages of a rank, whose units have this table for whole sequences. ``first``: the stages in
        the order of their first backward."""
        tables = [self._table(whole, number) for number in range(len(self.slices))]
        return {stage: tuple(self._slices(whole, tables, held, first, stage)) for stage in held}

    def kept_before(self, whole: UnitTable, ends: Ends) -> int:
        """The bytes of what is made before all slices and stays on a stage to a backward."""
        units = self.units[ends[0] : ends[1]]
        found = self.before.held(units, whole.modes[ends[0] : ends[1]])
        return found.kept + found.handed_on

    # -- the units of a slice -------------------------------------------------------------------------------------

    def _table(self, whole: UnitTable, number: int) -> UnitTable:
        """The table of one slice, without what is counted of slices together."""
        of = self.slices[number]

        def resized(tensor: int, size: int) -> int:
            entries = of.graph.tensors[tensor].elements(self.batch)
            return size * entries // max(1, self.whole.tensors[tensor].elements(self.batch))

        arrivals = whole.arrivals or (0,) * len(whole.shared)
        shared = [
            (value, size, arrival)
            for (value, size), arrival in zip(whole.shared, arrivals, strict=True)
            if value.tensor not in self.before.memories
        ]
        return replace(
            whole,
            units=tuple(self._own(number, unit, cost) for unit, cost in zip(self.units, of.units, strict=True)),
            boundary_bytes=tuple(int(size * of.share) for size in whole.boundary_bytes),
            shared=tuple((value, resized(value.tensor, size)) for value, size, _ in shared),
            arrivals=tuple(resized(value.tensor, size) for value, _, size in shared) if whole.arrivals else (),
            waiting_bytes=tuple(int(size * of.share) for size in whole.waiting_bytes),
            unlinked=None,
        )

    def _own(self, number: int, unit: Unit, cost: UnitCost) -> UnitCost:
        """The cost of a unit with what belongs to the slice alone. Keys and values of earlier slices are no part of
        what recomputed units are given: they are counted as handed on. Neither is what was made before all slices."""
        handed, more = self.keys.handed(number, unit), self.keys.kept_more(number, unit)
        entering = self.before.entering(number, unit)
        return replace(
            cost,
            saved_bytes=max(0, cost.saved_bytes + more),
            saved_selective_bytes=max(0, cost.saved_selective_bytes + more),
            entering_bytes=max(0, cost.entering_bytes - handed - entering),
            by_op=replace(cost.by_op, beside_bytes=max(0, cost.by_op.beside_bytes - handed - entering)),
        )

    @cached_property
    def _is_kept_by_slices(self) -> bool:
        """Whether what the ops behind read is as large as what slices keep to their own backward: a log-softmax of one
        call with a loss is counted behind, and runs with each slice."""
        ops, made = self.whole.ops, {t for op in self.whole.ops for t in op.outputs}
        behind = [op for op, need in zip(ops, self.ops.needs, strict=True) if need == "all"]
        made.difference_update(t for op in behind for t in op.outputs)
        return any(op.kind == "softmax" and made.intersection(op.inputs) for op in behind)

    # -- the slices of a stage ------------------------------------------------------------------------------------

    def _slices(
        self,
        whole: UnitTable,
        tables: Sequence[UnitTable],
        held: Mapping[int, Ends],
        first: Sequence[int],
        stage: int,
    ) -> list[SliceMemory]:
        (a, b), last = held[stage], len(self.slices) - 1
        units = self.units[a:b]
        read, behind = (self.behind.read, self.behind) if b == len(self.units) else (0, Behind())
        others = sharing_before(whole, held, first, stage)
        made = whole.trained_from(a, b, others) * self.request.gradient_width
        ends = np.cumsum([of.share for of in self.slices])
        begins = np.array([0.0, *ends[:-1]]) / ends  # of the keys up to a slice's end, those before it
        gradients = begins[:, None] * np.array([[self.keys.handed(n, unit) for unit in units] for n in range(last + 1)])
        before = self.before.held(units, whole.modes[a:b]) if last else HeldBefore()
        found = []
        for number, table in enumerate(tables):
            own, share, halves = working_of(table), self.slices[number].share, halves_of(table)
            coming = gradients[number + 1] if number < last else np.zeros(b - a)
            # Gradients of what is read behind lie in one memory; of several samples a slice that is reached has a copy
            # of its part. What a backward is given stays to its end. The part of the slice is among what its last unit
            # holds.
            copied = share if number < last and self.batch > 1 else 0.0
            rest: NDArray[np.float64] = np.full(b - a, read * (1 + copied))
            rest[-1] -= read * share
            kept, mask = int(table.range_kept[a, b]), self.keys.mask_bytes(number)
            masked = {mode for unit, mode in zip(units, table.modes[a:b], strict=True) if self.keys.has_mask(unit)}
            passing = mask if masked == {"full"} else 0
            plain = backward_passes(table, (a, b))
            passes = plain + coming.sum() + _made_behind(gradients[number]) + rest
            forward = own.forward_bytes(a, b)
            forward = int(own.range_working[a, b]) if forward is None else forward
            staying = int(read * share) if read and table.modes[b - 1] == "none" and self._is_kept_by_slices else 0
            live, at_behind = kept, 0.0
            if number == last:
                kept_behind = max(0, behind.kept - (read if staying else 0))
                live, at_behind = kept + kept_behind, kept + kept_behind + behind.backward + coming.sum()
                forward = max(forward - behind.kept, behind.forward - read)
            given = int(coming.sum()) + (read if number < last else 0)
            split, left = passes + halves.left_behind(a, b), int(halves.weight_grad_passes(a, b)[-1])
            handed_on = sum(
                self.keys.left_for_the_next(number, unit, mode)
                for unit, mode in zip(units, table.modes[a:b], strict=True)
            )
            one = SliceMemory(
                kept=live + staying + (0 if number else before.kept),
                handed_on=handed_on + (0 if number else before.handed_on),
                waiting=int(read * share) - staying + (0 if number else before.waiting),
                joined=read if number == last else 0,
                gradients=int(gradients[number].sum())
                + ((read + (last - number + 1) * before.gradients) if number else 0),
                forward=max(0, forward) + passing,
                backward=max(0, int(max(passes.max(), at_behind)) - live - given) + passing,
                first_backward=max(0, int(max((passes + made).max(), at_behind)) - live - given) + passing,
                made=int(made[0]),
                mask=mask if masked - {"full"} else 0,
                left=left,
                input_grad=max(0, int(max(split.max(), at_behind)) - live - given) + passing,
                weight_grad=halves.weight_grad_working(a, b),
                first_weight_grad=max(0, int((halves.weight_grad_passes(a, b) + made).max()) - left),
            )
            if self.request.shares_sums or self.request.divides_gradients:
                waiting = np.zeros(len(self.units))
                waiting[a:b] = passes - plain
                one = self._shared_out(one, table, (a, b), waiting, live + given - passing)
            found.append(one)
        return found

    def _shared_out(
        self, one: SliceMemory, table: UnitTable, ends: Ends, waiting: NDArray[np.float64], held: int
    ) -> SliceMemory:
        """A slice whose sums of gradients, and perhaps gradients and parameters, replicas divide among themselves.

        Args:
            waiting: what the backward of each unit holds beside that of a whole sequence.
            held: what its backward finds, which counts by itself.
        """
        request, forward = self.request, stage_passes(table, ends, self.request).forward
        own = table.waiting_bytes or (0,) * len(self.units)
        with_these = tuple(size + int(more) for size, more in zip(own, waiting, strict=True))
        passes = stage_passes(replace(table, waiting_bytes=with_these), ends, request)
        backward, tail = max(one.backward, passes.backward - held), max(0, passes.tail - held)
        one = replace(one, forward=max(one.forward, forward - int(table.range_kept[ends])))
        if not request.divides_gradients:
            return replace(one, leaving=max(backward, tail))
        halves = passes.by_unit + halves_of(table).left_behind(*ends)
        return replace(
            one,
            backward=backward,
            first_backward=max(one.backward, passes.first - held),
            made=0 if request.on_host else -(-one.made // request.ways),
            input_grad=max(one.input_grad, int(halves.max()) - held),
            weight_grad=max(one.weight_grad, passes.weighing),
            first_weight_grad=max(one.weight_grad, passes.weighing),
            tail=tail,
            under_way=passes.under_way,
        )


def _made_behind(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each unit the sum of the sizes of the units behind it, whose backward comes first. Its own is among what its
    backward holds."""
    return np.cumsum(sizes[::-1])[::-1] - sizes
