"""The memory of ranks whose sequences go through the pipeline in slices, followed from action to action.

A slice keeps what its own tokens need. Attention makes the keys and values of all tokens so far anew for each slice,
and hands them on; their gradients come back from the slice behind and wait for its own backward. What runs once behind
the last slice finds what all slices made for it, and hands the gradients of all back at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.saved_activations import WITH_DROPOUT
from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import Unit
from shardwright.core.model.graph import Graph
from shardwright.core.plan.decision import Decision
from shardwright.core.schedule.actions import Action, B, F, W
from shardwright.core.schedule.messages_by_action import messages_by_action
from shardwright.core.slices.sequence_ops import SequenceOps
from shardwright.core.tables.memory import MemoryUse, live_microbatches
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_tables import UNCOUNTED_BYTES, RankTables
from shardwright.core.tables.stage_memory import backward_passes, sharing_before
from shardwright.core.tables.stage_working import working_of
from shardwright.core.tables.unit_table import UnitTable
from shardwright.core.values.recompute_modes import Mode

SETTLED = 3
"""The microbatches for each pipeline rank behind which a schedule's memory is as in the rest of it."""


@dataclass(frozen=True, slots=True)
class SliceWork:
    """What was counted of one slice: the graph of its tokens (`graph_of_slice`), their share of the sequence, and the
    cost of every unit, the last one without what runs behind all slices."""

    graph: Graph
    share: float
    units: tuple[UnitCost, ...]


@dataclass(frozen=True, slots=True)
class Behind:
    """What runs once behind the last slice, in bytes of one microbatch."""

    kept: int = 0
    forward: int = 0
    """What its forward holds beside what it keeps."""
    backward: int = 0
    """The same of its backward."""
    read: int = 0
    """What it reads of what slices make, and so what its gradients take."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """One slice of a stage, in bytes of one microbatch."""

    kept: int
    """Saved for its backward."""
    handed_on: int
    """Keys and values for the next slice, until the backward of that, beside what this one keeps of them."""
    waiting: int
    """What waits until the last slice's is there too, and is put together with it for the ops behind all."""
    joined: int
    """What is put together, from the last slice's forward to its backward."""
    gradients: int
    """Gradients of what it was handed, from its backward on to that of the slice before it."""
    forward: int
    """Held by its forward beside activations."""
    backward: int
    """The same of its backward, beside the gradients that it is handed too."""
    first_backward: int
    """The same with the gradients of parameters that it makes, where it is the stage's first backward."""
    made: int
    """The gradients of parameters that the first backward makes."""


def followed(decision: Decision) -> Decision:
    """The decision with as few microbatches as show its memory: some rounds of the pipeline where activations settle,
    all of them where they grow with every one, as under schedules that run all forwards first."""
    few = SETTLED * decision.pp
    if decision.microbatches <= few:
        return decision
    if decision.pp > 1:
        asked = decision.schedule, decision.pp
        live = [live_microbatches(*asked, m, decision.virtual_stages) for m in (few, decision.microbatches)]
        if live[0] != live[1]:
            return decision
    return replace(decision, batch=few * decision.dp * decision.microbatch)


class SlicedMemory:
    """The memory of one choice in slices, from the tables of whole sequences and what was counted of each slice."""

    def __init__(
        self,
        decision: Decision,
        ranked: RankTables,
        request: MemoryRequest,
        whole: Graph,
        ops: SequenceOps,
        slices: Sequence[SliceWork],
        behind: Behind,
        *,
        fuses_dropout: bool,
    ) -> None:
        self.decision, self.ranked, self.request = decision, ranked, request
        self.whole, self.ops, self.slices, self.behind = whole, ops, slices, behind
        self.fuses_dropout, self.ends = fuses_dropout, ranked.ends(decision.stage_starts)
        self._counters = [WorkCounter(of.graph) for of in slices]

    def memory(self, before: Sequence[MemoryUse], units: Sequence[Unit]) -> tuple[MemoryUse, ...]:
        """The memory of every rank, which for whole sequences is as ``before``."""
        decision = self.decision
        schedule = followed(decision).compute_schedule(None)
        counts = messages_by_action(schedule) if decision.pp > 1 else ()
        buckets = self.ranked.buckets(decision.stage_starts, decision.stage_ranks, self.request)
        longest = max(of.share for of in self.slices)
        found = []
        for rank, use in enumerate(before):
            order, table = schedule.table[rank], self.ranked.tables[rank]
            tables = [self._table(table, number, units) for number in range(len(self.slices))]
            first = list(dict.fromkeys(p.stage for action in order for p in action.flat if p.kind in (B, W)))
            held = {stage: self.ends[stage] for stage in first}
            of = {stage: self._slices(table, tables, held, first, stage, units) for stage in held}
            crossing = [0, *(int(table.boundary_bytes[start] * longest) for start, _ in self.ends[1:])]
            nothing = [0] * len(order)
            sent = counts[rank].sizes(crossing) if counts else nothing
            beginning = counts[rank].beginning_sizes(crossing) if counts else nothing
            constant = (
                [*table.constant_bytes, 0] if decision.pp > 1 and table.constant_bytes else [0] * (len(units) + 1)
            )
            staying = UNCOUNTED_BYTES + max(constant[a] * (a > 0) + constant[b] for a, b in held.values())
            live, beside, peak, full = _walked(order, of, sent, beginning)
            # A bucket is there from the first gradient on, and never beside all of them.
            most = min(full, peak + buckets[rank]) + staying
            buffers = beside + staying + buckets[rank]
            apart = use.gradients_bytes + live + buffers - most
            found.append(
                replace(
                    use,
                    activations_bytes=live,
                    buffers_bytes=buffers + max(0, -apart),
                    apart_bytes=max(0, apart),
                )
            )
        return tuple(found)

    def _table(self, whole: UnitTable, number: int, units: Sequence[Unit]) -> UnitTable:
        """The table of one slice. Keys and values of earlier slices are no part of what recomputed units are given:
        they are counted as handed on."""
        of = self.slices[number]
        handed = [self._handed(number, unit) for unit in units]
        costs = tuple(
            replace(
                cost,
                entering_bytes=max(0, cost.entering_bytes - size),
                by_op=replace(cost.by_op, beside_bytes=max(0, cost.by_op.beside_bytes - size)),
            )
            for cost, size in zip(of.units, handed, strict=True)
        )

        def resized(tensor: int, size: int) -> int:
            batch = self.decision.microbatch
            return size * of.graph.tensors[tensor].elements(batch) // max(1, self.whole.tensors[tensor].elements(batch))

        values = [value for value, _ in whole.shared]
        return replace(
            whole,
            units=costs,
            boundary_bytes=tuple(int(size * of.share) for size in whole.boundary_bytes),
            shared=tuple((value, resized(value.tensor, size)) for value, size in whole.shared),
            arrivals=tuple(resized(v.tensor, size) for v, size in zip(values, whole.arrivals, strict=False)),
            waiting_bytes=tuple(int(size * of.share) for size in whole.waiting_bytes),
            unlinked=None,
        )

    def _handed(self, number: int, unit: Unit) -> int:
        """The bytes of the keys and values up to a slice's end that a unit reads, where there are slices before it."""
        return sum(self._size(number, tensor) for tensor in self._joined(number, unit)) if number else 0

    def _joined(self, number: int, unit: Unit) -> list[int]:
        """The keys and values that the attentions of a unit read in a slice."""
        graph = self.slices[number].graph
        inside = [op for op in range(unit.first_op, unit.end_op) if op in self.ops.carried]
        return list(dict.fromkeys(tensor for op in inside for tensor in graph.ops[op].inputs[1:3]))

    def _size(self, number: int, tensor: int) -> int:
        """The bytes of a tensor of a slice on one rank."""
        whole = self._counters[number].size_bytes(tensor, self.decision.microbatch, self.request.precision)
        return whole // self.decision.tp

    def _left_for_the_next(self, number: int, unit: Unit, mode: Mode) -> int:
        """The bytes that a unit hands on in a slice and that its own attentions do not keep."""
        if number == len(self.slices) - 1 or mode == "offload":
            return 0
        graph, counter = self.slices[number].graph, self._counters[number]
        roots = counter.kept.roots
        given = dict.fromkeys(roots.get(tensor, tensor) for tensor in self._joined(number, unit))
        kept: set[int] = set()
        for op in range(unit.first_op, unit.end_op) if mode == "none" else ():
            if op not in self.ops.carried:
                kept.update(counter.kept.by(graph.ops[op]))
            elif graph.ops[op].name.endswith(WITH_DROPOUT) and not self.fuses_dropout:
                kept.add(roots.get(graph.ops[op].inputs[2], graph.ops[op].inputs[2]))
            else:
                kept.update(counter.kept.by(graph.ops[op]))
        return sum(self._size(number, root) for root in given if root not in kept)

    def _slices(
        self,
        whole: UnitTable,
        tables: Sequence[UnitTable],
        held: Mapping[int, tuple[int, int]],
        first: Sequence[int],
        stage: int,
        units: Sequence[Unit],
    ) -> list[_Slice]:
        """The slices of one stage."""
        (a, b), last = held[stage], len(self.slices) - 1
        read, behind = (self.behind.read, self.behind) if b == len(units) else (0, Behind())
        others = sharing_before(whole, held, first, stage)
        made = whole.trained_from(a, b, others) * self.request.gradient_width
        gradients = np.array([[self._handed(n, unit) for unit in units[a:b]] for n in range(last + 1)])
        found = []
        for number, table in enumerate(tables):
            own, share = working_of(table), self.slices[number].share
            coming = gradients[number + 1] if number < last else np.zeros(b - a)
            # Gradients of what is read behind lie in one memory; a slice that is reached has a copy of its part. What a
            # backward is given stays to its end. The part of the slice is among what its last unit holds.
            rest: NDArray[np.float64] = np.full(b - a, read * (1.0 if number == last else 1 + share))
            rest[-1] -= read * share
            kept = int(table.range_kept[a, b])
            passes = backward_passes(table, (a, b)) + coming.sum() + _after(gradients[number]) + rest
            moments = list(zip(passes, made, strict=True))
            forward = own.forward_bytes(a, b)
            forward = int(own.range_working[a, b]) if forward is None else forward
            if number == last:
                moments.append((kept + behind.kept + behind.backward + coming.sum(), 0.0))
                forward = max(forward - behind.kept, behind.forward - read)
                kept += behind.kept
            given = int(coming.sum()) + (read if number < last else 0)
            found.append(
                _Slice(
                    kept=kept,
                    handed_on=sum(
                        self._left_for_the_next(number, unit, mode)
                        for unit, mode in zip(units[a:b], table.modes[a:b], strict=True)
                    ),
                    waiting=int(read * share),
                    joined=read if number == last else 0,
                    gradients=int(gradients[number].sum()) + (read if number else 0),
                    forward=max(0, forward),
                    backward=max(0, int(max(size for size, _ in moments)) - kept - given),
                    first_backward=max(0, int(max(size + more for size, more in moments)) - kept - given),
                    made=int(made[0]),
                )
            )
        return found


def _after(sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each unit the sum of the sizes of the units behind it."""
    found: NDArray[np.float64] = sizes.sum() - np.cumsum(sizes).astype(np.float64)
    return found


def _walked(
    order: Sequence[Action],
    of: Mapping[int, Sequence[_Slice]],
    messages: Sequence[int],
    beginning: Sequence[int],
) -> tuple[int, int, int, int]:
    """Of one rank the most activations, the most beside activations and gradients of parameters, the most of all at
    once, and that if all gradients were there from the start."""
    live = given = gradients = most_live = most_beside = most = most_early = 0
    every = sum(slices[0].made for slices in of.values())
    began: set[int] = set()
    for action, sent, there in zip(order, messages, beginning, strict=True):
        most = max(most, live + given + gradients + there)
        most_early = max(most_early, live + given + every + there)
        for part in action.flat:
            if part.stage not in of:
                continue
            number, slices = part.slice or 0, of[part.stage]
            one = slices[number]
            beside = early = one.backward
            if part.kind is F:
                live += one.kept + one.handed_on + one.waiting
                beside = early = one.forward
            elif part.kind is not W:
                live -= one.joined
            if part.kind in (B, W) and part.stage not in began:
                beside = one.first_backward
            most_live = max(most_live, live)
            most_beside = max(most_beside, given + early + sent)
            most = max(most, live + given + gradients + beside + sent)
            most_early = max(most_early, live + given + every + early + sent)
            if part.kind is F:
                if number == len(slices) - 1:
                    live += one.joined - sum(each.waiting for each in slices)
                continue
            if part.kind in (B, W):
                live -= one.kept + (slices[number - 1].handed_on if number else 0)
                gradients += one.made if part.stage not in began else 0
                began.add(part.stage)
            if part.kind is not W:
                given += one.gradients - (slices[number + 1].gradients if number + 1 < len(slices) else 0)
    return most_live, most_beside, most, most_early
