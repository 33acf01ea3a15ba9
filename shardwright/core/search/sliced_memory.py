"""The memory of ranks whose sequences go through the pipeline in slices, followed from action to action.

A slice keeps what its own tokens need. The first takes memory for the keys and values of the whole sequence, in which
those behind it write theirs; it is there until the first slice's backward, or, where that computes them again, until
that of the second. Their gradients come back from the slice behind and wait for its own backward. What runs once behind
the last slice finds what all slices made for it, and hands the gradients of all back at once.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.cost.saved_activations import WITH_DROPOUT
from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import Unit
from shardwright.core.model.graph import Graph
from shardwright.core.plan.decision import Decision
from shardwright.core.schedule.actions import Action, B, F, I, W
from shardwright.core.schedule.messages_by_action import messages_by_action
from shardwright.core.slices.sequence_ops import SequenceOps
from shardwright.core.tables.backward_halves import halves_of
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
    """Memory of keys and values that it took and does not keep itself: until the backward of the next slice."""
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
    mask: int = 0
    """The mask of later keys that its attentions keep, which microbatches share."""
    left: int = 0
    """What the input gradient of a split backward leaves to its weight gradient beside what was kept, as where it has
    computed units again."""
    input_grad: int = 0
    """Held by such an input gradient beside activations."""
    weight_grad: int = 0
    """The same of its weight gradient."""


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
                saved_bytes=max(0, cost.saved_bytes + more),
                saved_selective_bytes=max(0, cost.saved_selective_bytes + more),
                entering_bytes=max(0, cost.entering_bytes - size),
                by_op=replace(cost.by_op, beside_bytes=max(0, cost.by_op.beside_bytes - size)),
            )
            for cost, size, more in zip(
                of.units, handed, (self._kept_more(number, unit) for unit in units), strict=True
            )
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

    def _kept_more(self, number: int, unit: Unit) -> int:
        """The bytes that a slice keeps of a unit's keys and values beside what was counted: the first has memory for
        the whole sequence in the place of its own, and the others nothing that is not there."""
        if len(self.slices) == 1:
            return 0
        kept = self._kept_keys(number, unit)
        counted = sum(self._size(number, root) for root in {root for root, is_theirs in kept.values() if is_theirs})
        if number:
            return -counted
        return sum(self._whole_size(tensor) for tensor in self._whole_keys(unit, kept)) - counted

    def _left_for_the_next(self, number: int, unit: Unit, mode: Mode) -> int:
        """The bytes of the memory for keys and values that the first slice takes and its own attentions do not keep."""
        if number or len(self.slices) == 1:
            return 0
        kept = self._kept_keys(number, unit) if mode == "none" else {}
        every = self._joined(len(self.slices) - 1, unit)
        return sum(map(self._whole_size, every)) - sum(map(self._whole_size, self._whole_keys(unit, kept)))

    def _whole_keys(self, unit: Unit, places: Collection[int]) -> list[int]:
        """Those of the keys and values of the last slice, which are of the whole sequence, that are read at some places
        among all that a unit reads."""
        return [tensor for place, tensor in enumerate(self._joined(len(self.slices) - 1, unit)) if place in places]

    def _whole_size(self, tensor: int) -> int:
        return self._size(len(self.slices) - 1, tensor)

    def _kept_keys(self, number: int, unit: Unit) -> dict[int, tuple[int, bool]]:
        """Of the keys and values that a unit's attentions keep in a slice, by their places among all that it reads:
        what is kept, and whether for nothing else."""
        graph, counter = self.slices[number].graph, self._counters[number]
        roots, theirs, others = counter.kept.roots, set[int](), set[int]()
        for op in range(unit.first_op, unit.end_op):
            if op not in self.ops.carried:
                others.update(counter.kept.by(graph.ops[op]))
                continue
            keys = {roots.get(tensor, tensor) for tensor in graph.ops[op].inputs[1:3]}
            kept = set(counter.kept.by(graph.ops[op]))
            if graph.ops[op].name.endswith(WITH_DROPOUT) and not self.fuses_dropout:
                value = graph.ops[op].inputs[2]
                kept = {roots.get(value, value)}
            theirs.update(keys.intersection(kept))
            first = roots.get(graph.ops[op].inputs[0], graph.ops[op].inputs[0])
            others.update(root for root in kept if root not in keys or root == first)
        found = {}
        for place, tensor in enumerate(self._joined(number, unit)):
            root = roots.get(tensor, tensor)
            if root in theirs:
                found[place] = root, root not in others
        return found

    @cached_property
    def _is_kept_by_slices(self) -> bool:
        """Whether what the ops behind read is as large as what slices keep to their own backward: a log-softmax of one
        call with a loss is counted behind, and runs with each slice."""
        ops, made = self.whole.ops, {t for op in self.whole.ops for t in op.outputs}
        behind = [op for op, need in zip(ops, self.ops.needs, strict=True) if need == "all"]
        made.difference_update(t for op in behind for t in op.outputs)
        return any(op.kind == "softmax" and made.intersection(op.inputs) for op in behind)

    def _has_mask(self, unit: Unit) -> bool:
        """Whether attentions of a unit are given a mask of later keys that the model has not."""
        inside = [op for op in range(unit.first_op, unit.end_op) if op in self.ops.carried and op not in self.ops.masks]
        return any(self.whole.ops[op].kind == "attention" for op in inside)

    def _mask_bytes(self, number: int) -> int:
        """The bytes of that mask in a slice; the first has none, as attention knows it without."""
        if not number:
            return 0
        shares = [of.share for of in self.slices]
        tensor, dim = next(iter(self.ops.dims.items()))
        tokens = self.whole.tensors[tensor].fixed[dim]
        length, end = (round(share * tokens) for share in (shares[number], sum(shares[: number + 1])))
        return length * end * PRECISION_BYTES[self.request.precision]

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
        ends = np.cumsum([of.share for of in self.slices])
        begins = np.array([0.0, *ends[:-1]]) / ends  # of the keys up to a slice's end, those before it
        gradients = begins[:, None] * np.array(
            [[self._handed(n, unit) for unit in units[a:b]] for n in range(last + 1)]
        )
        found = []
        for number, table in enumerate(tables):
            own, share, halves = working_of(table), self.slices[number].share, halves_of(table)
            coming = gradients[number + 1] if number < last else np.zeros(b - a)
            # Gradients of what is read behind lie in one memory; a slice that is reached has a copy of its part. What a
            # backward is given stays to its end. The part of the slice is among what its last unit holds.
            rest: NDArray[np.float64] = np.full(b - a, read * (1.0 if number == last else 1 + share))
            rest[-1] -= read * share
            kept, mask = int(table.range_kept[a, b]), self._mask_bytes(number)
            masked = {mode for unit, mode in zip(units[a:b], table.modes[a:b], strict=True) if self._has_mask(unit)}
            passing = mask if masked == {"full"} else 0
            passes = backward_passes(table, (a, b)) + coming.sum() + _made_by(gradients[number]) + rest
            moments = list(zip(passes, made, strict=True))
            forward = own.forward_bytes(a, b)
            forward = int(own.range_working[a, b]) if forward is None else forward
            staying = int(read * share) if read and table.modes[b - 1] == "none" and self._is_kept_by_slices else 0
            if number == last:
                kept_behind = max(0, behind.kept - (read if staying else 0))
                moments.append((kept + kept_behind + behind.backward + coming.sum(), 0.0))
                forward = max(forward - behind.kept, behind.forward - read)
                kept += kept_behind
            given = int(coming.sum()) + (read if number < last else 0)
            found.append(
                _Slice(
                    kept=kept + staying,
                    handed_on=sum(
                        self._left_for_the_next(number, unit, mode)
                        for unit, mode in zip(units[a:b], table.modes[a:b], strict=True)
                    ),
                    waiting=int(read * share) - staying,
                    joined=read if number == last else 0,
                    gradients=int(gradients[number].sum()) + (read if number else 0),
                    forward=max(0, forward) + passing,
                    backward=max(0, int(max(size for size, _ in moments)) - kept - given) + passing,
                    first_backward=max(0, int(max(size + more for size, more in moments)) - kept - given) + passing,
                    made=int(made[0]),
                    mask=mask if masked - {"full"} else 0,
                    left=max(0, -int(halves.range_freed[a, b] - halves.range_between[a, b])),
                    input_grad=int(halves.range_input_grad_working[a, b]) if halves.is_known else 0,
                    weight_grad=int(halves.weight_grad_working(a, b)) if halves.is_known else 0,
                )
            )
        return found


def _made_by(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each unit the sum of its own size and those of the units behind it, whose backward comes first."""
    return np.cumsum(sizes[::-1])[::-1]


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
    masked: dict[int, int] = {}
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
                live += one.kept + one.handed_on + one.waiting + (0 if masked.get(number) else one.mask)
                masked[number] = masked.get(number, 0) + bool(one.mask)
                beside = early = one.forward
            elif part.kind is not W:
                live -= one.joined
                beside = early = max(one.backward, one.input_grad) if part.kind is I and one.left else one.backward
            elif one.left:
                beside = early = max(one.weight_grad, one.backward - one.left)
            if part.kind in (B, W) and part.stage not in began:
                beside = one.first_backward
                if part.kind is W and one.left:
                    beside = max(one.weight_grad + one.made, beside - one.left)
            most_live = max(most_live, live)
            most_beside = max(most_beside, given + early + sent)
            most = max(most, live + given + gradients + beside + sent)
            most_early = max(most_early, live + given + every + early + sent)
            if part.kind is F:
                if number == len(slices) - 1:
                    live += one.joined - sum(each.waiting for each in slices)
                continue
            live += one.left if part.kind is I else 0
            if part.kind in (B, W):
                live -= one.kept + (slices[number - 1].handed_on if number else 0)
                live -= one.left if part.kind is W else 0
                masked[number] = masked.get(number, 0) - bool(one.mask)
                live -= 0 if masked[number] else one.mask
                gradients += one.made if part.stage not in began else 0
                began.add(part.stage)
            if part.kind is not W:
                given += one.gradients - (slices[number + 1].gradients if number + 1 < len(slices) else 0)
    return most_live, most_beside, most, most_early
