"""The step of a plan whose sequences go through the pipeline in slices: what slices cost, and which are best.

A slice's seconds and bytes are those of its ops on its own tokens, behind those before it (`graph_of_slice`), as a
share of what the same count says of whole sequences; what was measured of whole ones holds so for slices too. What
needs all tokens runs with the last slice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.cost.unit_work import PRECISION_BYTES
from shardwright.core.errors import PlanError
from shardwright.core.model.graph import Graph
from shardwright.core.plan.decision import Decision, require_slices
from shardwright.core.plan.prediction_error import LEAD
from shardwright.core.plan.record import SliceCosts
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.peak_memory import peak_live
from shardwright.core.schedule.simulate import bytes_of
from shardwright.core.search.answer import place_of
from shardwright.core.search.predict import simulated_pipeline
from shardwright.core.search.request import Request
from shardwright.core.search.scoring import Scored, Scorer
from shardwright.core.slices.fitted_cost import FittedCost
from shardwright.core.slices.graph_of_slice import carried_bytes, graph_of_slice
from shardwright.core.slices.lengths import best_lengths
from shardwright.core.slices.sequence_ops import SequenceOps, sequence_inputs, sequence_ops
from shardwright.core.slices.unit_parts import require_sliceable
from shardwright.core.tables.cost_tables import CostTables
from shardwright.core.tables.memory import MemoryUse, kept_bytes, recomputed_s

POINTS = 5
"""The lengths, and the contexts, at which the seconds of slices are counted; between them they are interpolated."""
LEAST = 16
"""The shortest slice whose seconds are counted, in tokens, of sequences that are not shorter themselves."""
PLACES = 256
"""The places where a sequence may be cut, at most."""


@dataclass(frozen=True, slots=True)
class _Passes:
    """Seconds and kept bytes of one stage."""

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    kept_bytes: int = 0

    def __add__(self, other: "_Passes") -> "_Passes":
        return _Passes(
            self.forward_s + other.forward_s, self.input_grad_s + other.input_grad_s,
            self.weight_grad_s + other.weight_grad_s, self.kept_bytes + other.kept_bytes,
        )  # fmt: skip


class SlicedStep:
    """The slices of one choice, which was scored for whole sequences.

    Raises PlanError for a model without a sequence, CaptureError for one that cannot run in slices.
    """

    def __init__(self, scorer: Scorer, scored: Scored) -> None:
        self.scorer, self.scored = scorer, scored
        self.decision, self.tables = scored.decision, scorer.tables
        graph = self.tables.graph
        dims = sequence_inputs(graph)
        self.ops: SequenceOps = sequence_ops(graph, dims)
        require_sliceable(graph, self.ops)
        tensor, dim = next(iter(dims.items()))
        self.tokens = graph.tensors[tensor].fixed[dim]
        self._places = [place_of(scorer, scored, pp) for pp in range(self.decision.pp)]
        self._by_slice: dict[tuple[int, int], tuple[_Passes, ...]] = {}
        units = self.tables.folded.units
        behind = [op for op, need in enumerate(self.ops.needs) if need == "all"]
        self._tail = min((op for op in behind if op >= units[-1].first_op), default=units[-1].end_op)
        """The first op of the last unit that runs behind the last slice."""

    # -- what slices cost -----------------------------------------------------------------------------------------

    def costs(self, lengths: Sequence[int]) -> tuple[StageCosts, ...]:
        """The costs of each slice on the stages of the choice."""
        found, start = [], 0
        for number, length in enumerate(lengths):
            found.append(self._costs(length, start, is_last=number == len(lengths) - 1))
            start += length
        return tuple(found)

    def _costs(self, length: int, context: int, *, is_last: bool) -> StageCosts:
        whole, counted, own = self.whole, self._counted_whole, list(self._counted(length, context))
        if is_last:
            own[-1] = own[-1] + self._behind
        waits = self.scorer.step.waits(self.decision, self.scored.tables, self.decision.stage_ranks)
        waits = waits or ((0.0, 0.0),) * self.decision.stages
        share = length / self.tokens

        def scaled(of: Callable[[_Passes], float], measured: Sequence[float]) -> tuple[float, ...]:
            rows = zip(measured, own, counted, strict=True)
            return tuple(m * of(a) / of(b) if of(b) else m * share for m, a, b in rows)

        forward = scaled(lambda p: p.forward_s, whole.forward_s)
        inputs = scaled(lambda p: p.input_grad_s, whole.input_grad_s)
        return StageCosts(
            tuple(f + ahead for f, (ahead, _) in zip(forward, waits, strict=True)),
            tuple(b + behind for b, (_, behind) in zip(inputs, waits, strict=True)),
            scaled(lambda p: p.weight_grad_s, whole.weight_grad_s),
            self._transfers(share),
            tuple(map(int, scaled(lambda p: p.kept_bytes, whole.activation_bytes))),
            idle_lent=whole.idle_lent,
            sender_waits=whole.sender_waits,
        )

    @cached_property
    def whole(self) -> StageCosts:
        """The costs of whole sequences, without what passes wait for over the data axis."""
        return self.scorer.step.plain_costs(self.scored.tables, self.decision.stage_starts, self.decision.stage_ranks)

    def _transfers(self, share: float) -> tuple[float, ...]:
        """The seconds to send a share of what crosses each boundary of stages."""
        decision, found, boundaries = self.decision, [], self.tables.boundaries()
        for stage in range(1, decision.stages):
            place = self._places[decision.stage_ranks[stage]]
            fixed, per_sample = boundaries[decision.stage_starts[stage]]
            sent = fixed + per_sample * decision.microbatch
            whole_s = self.tables.message_s(sent, decision.tp, place)
            part_s = self.tables.message_s(int(sent * share), decision.tp, place)
            found.append(self.whole.transfer_s[stage - 1] * (part_s / whole_s if whole_s else share))
        return tuple(found)

    @cached_property
    def _counted_whole(self) -> tuple[_Passes, ...]:
        """The count of whole sequences, by kinds of op as that of slices is."""
        return self._stages(self._plain, until=None)

    @cached_property
    def _plain(self) -> CostTables:
        """The tables of whole sequences without the footprints of units, which slices have not."""
        return self._laid_out(replace(self.tables.graph, unit_memory=None, in_16_bits=None))

    def _laid_out(self, graph: Graph) -> CostTables:
        """The tables of a graph of the same ops, with the choice's layouts on the tensor axis."""
        found = self.tables.of_graph(graph)
        found.lay_out_as(self.tables, self.decision.tp)
        return found

    @cached_property
    def _behind(self) -> _Passes:
        """The count of what runs behind the last slice."""
        until = self._stages(self._plain, until=self._tail)[-1]
        every = self._counted_whole[-1]
        return _Passes(
            max(0.0, every.forward_s - until.forward_s), max(0.0, every.input_grad_s - until.input_grad_s),
            max(0.0, every.weight_grad_s - until.weight_grad_s), max(0, every.kept_bytes - until.kept_bytes),
        )  # fmt: skip

    def _counted(self, length: int, context: int) -> tuple[_Passes, ...]:
        """The count of a slice, without what runs behind the last one."""
        key = (length, context)
        if key not in self._by_slice:
            graph = graph_of_slice(self.tables.graph, self.ops, length, context)
            self._by_slice[key] = self._stages(self._laid_out(graph), until=self._tail)
        return self._by_slice[key]

    def _stages(self, tables: CostTables, *, until: int | None) -> tuple[_Passes, ...]:
        """The count of every stage, with the last unit's ops ``until`` one."""
        decision, known, found = self.decision, dict[tuple[object, ...], UnitCost](), []
        modes, units = self.scored.tables.tables[0].modes, tables.folded.units
        variants = tables.variants(decision.tp)
        ends = [*decision.stage_starts[1:], len(units)]
        for rank, first, end in zip(decision.stage_ranks, decision.stage_starts, ends, strict=True):
            total, place = _Passes(), self._places[rank]
            for number in range(first, end):
                unit, is_cut = units[number], number == len(units) - 1 and until is not None
                if is_cut:
                    unit = replace(unit, end_op=max(unit.first_op, until or 0))
                key = (variants[number], is_cut, place)
                if key not in known:
                    known[key] = tables.counted(unit, decision.tp, decision.microbatch, place)
                total = total + _passes(known[key], modes[number])
            found.append(total)
        return tuple(found)

    # -- the step -------------------------------------------------------------------------------------------------

    def scored_in(self, lengths: Sequence[int]) -> tuple[Scored, tuple[StageCosts, ...]]:
        """The choice with its sequences in these slices, and the costs of each."""
        costs = self.costs(lengths)
        decision = replace(self.decision, slice_lengths=tuple(lengths))
        if decision.pp == 1:
            one = sum(sum(c.forward_s) + sum(c.backward_s) for c in costs)
            makespan = one * decision.microbatches
        else:
            makespan = simulated_pipeline(decision, costs).makespan_s
        before = self.scored.predicted
        busy = sum(sum(c.forward_s) + sum(c.backward_s) for c in costs) * decision.microbatches
        predicted = replace(
            before,
            pipeline_s=makespan,
            step_time_s=makespan + before.data_parallel_s + before.optimizer_s,
            bubble_fraction=max(0.0, 1 - busy / (decision.pp * makespan)) if makespan else 0.0,
            memory_by_stage_rank=self._memory(decision, costs),
        )
        over = self.scored.tables.over_bytes(predicted.memory_by_stage_rank)
        return Scored(decision, self.scored.tables, predicted, over), costs

    def _memory(self, decision: Decision, costs: Sequence[StageCosts]) -> tuple[MemoryUse, ...]:
        """The memory of every rank: activations of the slices under way, and the gradients of keys and values, which
        add up until the backward of the first slice."""
        microbatches = min(decision.microbatches, 3 * decision.pp)
        batch = microbatches * decision.dp * decision.microbatch
        schedule = replace(decision, batch=batch).compute_schedule(None)
        graph, width = self.tables.graph, PRECISION_BYTES[self.tables.precision]
        inside = {unit.index: range(unit.first_op, unit.end_op) for unit in self.tables.folded.units}
        carried = carried_bytes(graph, self.ops, inside, decision.microbatch, width)
        held = [0] * decision.pp
        ends = [*decision.stage_starts[1:], len(inside)]
        for rank, first, end in zip(decision.stage_ranks, decision.stage_starts, ends, strict=True):
            held[rank] += sum(carried[unit] for unit in range(first, end)) // decision.tp
        slices = tuple(map(bytes_of, costs))
        found = []
        for rank, use in enumerate(self.scored.predicted.memory_by_stage_rank):
            peak = peak_live(schedule.table[rank], slices=slices)
            buffers = use.buffers_bytes + held[rank]
            found.append(
                replace(use, activations_bytes=peak, buffers_bytes=buffers, apart_bytes=min(use.apart_bytes, peak))
            )
        return tuple(found)

    # -- which slices ---------------------------------------------------------------------------------------------

    def best_lengths(self, slices: int | None) -> tuple[int, ...]:
        """The lengths whose step is the shortest, of so many slices or of any number: among those by TeraPipe's rule,
        for which stages are equal and messages take no time, and equal ones, by a simulation of stages and messages."""
        counts = [slices] if slices else [None, *(1 << power for power in range(1, 8) if self.tokens >> power >= LEAST)]
        step = max(1, -(-self.tokens // PLACES))
        found: dict[tuple[int, ...], float] = {}
        for count in counts:
            made = best_lengths(
                self.fitted, self.tokens, self.decision.stages, count, step, microbatches=self.decision.microbatches
            )
            number = len(made.lengths)
            equal = tuple(self.tokens * (n + 1) // number - self.tokens * n // number for n in range(number))
            for lengths in (made.lengths, equal):
                found[lengths] = found[lengths] if lengths in found else self._about_s(lengths)
        return min(found, key=lambda lengths: (found[lengths], len(lengths)))

    def _about_s(self, lengths: Sequence[int]) -> float:
        """The seconds of the pipeline in these slices, where all stages' seconds grow as the slowest one's."""
        whole, all_s, start, costs = self.whole, self.fitted(self.tokens, 0), 0, []
        for length in lengths:
            share = self.fitted(length, start) / all_s if all_s else length / self.tokens
            passes = (whole.forward_s, whole.input_grad_s, whole.weight_grad_s)
            times = [tuple(seconds * share for seconds in of_stages) for of_stages in passes]
            costs.append(
                replace(
                    whole, forward_s=times[0], input_grad_s=times[1], weight_grad_s=times[2],
                    transfer_s=self._transfers(length / self.tokens),
                )
            )  # fmt: skip
            start += length
        decision = replace(self.decision, slice_lengths=tuple(lengths))
        if decision.pp == 1:
            return sum(sum(c.forward_s) + sum(c.backward_s) for c in costs)
        return simulated_pipeline(decision, costs).makespan_s

    @cached_property
    def fitted(self) -> FittedCost:
        """The seconds of a slice on the slowest stage, by its length and the tokens before it."""
        tokens = self.tokens
        least = max(1, min(LEAST, tokens // 4))
        lengths = sorted({max(least, tokens >> power) for power in range(POINTS)} | {least})
        measured = {(length, 0): self._slowest_s(length, 0) for length in lengths}
        for length in lengths[:-1]:
            for context in sorted({max(1, (tokens - length) // 2), tokens - length}):
                measured[length, context] = self._slowest_s(length, context)
        return FittedCost.of(measured)

    def _slowest_s(self, length: int, context: int) -> float:
        costs = self._costs(length, context, is_last=False)
        return max(f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True))


def _passes(cost: UnitCost, mode: str) -> _Passes:
    return _Passes(
        cost.forward_s, cost.input_grad_s + recomputed_s(cost, mode), cost.weight_grad_s, kept_bytes(cost, mode)
    )


def in_slices(
    scorer: Scorer, best: Scored, others: list[Scored], request: Request
) -> tuple[Scored, list[Scored], tuple[StageCosts, ...]]:
    """The best of some choices with their sequences in slices as asked, the next choices, and the costs of the slices;
    no costs, and the best as it is, where slices were left to choose and do not pay.

    Raises PlanError, or CaptureError, where the model or the schedules run no slices, or memory has no room.
    """
    made: list[tuple[Scored, tuple[StageCosts, ...]]] = []
    refused: PlanError | None = None
    for choice in (best, *others):
        try:
            require_slices(
                (0, 0), choice.decision.schedule, choice.decision.gathered_stages, choice.decision.reduce_after
            )
            if choice.decision.tp > 1 and choice.decision.sequence_parallel:
                raise PlanError("sequences are divided over the tensor axis: pin sequence_parallel=False")
            made.append(_in_slices(SlicedStep(scorer, choice), request))
        except PlanError as error:
            refused = refused or error
    whole = [best, *others]
    if request.slices == "auto":
        pays = [one for one in made if one[0].decision.slice_count > 1 and one[0].over_bytes == 0]
        first = min(pays, key=lambda one: one[0].predicted.step_time_s, default=None)
        if first is None or first[0].predicted.step_time_s > best.predicted.step_time_s * (1 - LEAD):
            rest = [] if first is None else [first[0]]
            return best, [*rest, *others], ()
        return first[0], whole, first[1]
    if not made:
        raise refused or PlanError("no schedule of the best plans runs slices: pin schedule='1f1b'")
    fits = [one for one in made if one[0].over_bytes == 0]
    if not fits:
        least = min(made, key=lambda one: one[0].over_bytes)[0]
        raise PlanError(
            f"{len(least.decision.slice_lengths)} slices lack {least.over_bytes} bytes on the fullest rank: pin "
            f"recompute='full', a smaller microbatch or more stages"
        )
    first = min(fits, key=lambda one: one[0].predicted.step_time_s)
    return first[0], whole, first[1]


def _in_slices(step: SlicedStep, request: Request) -> tuple[Scored, tuple[StageCosts, ...]]:
    """A choice in the slices that are asked for, or in the best ones."""
    if request.slice_lengths:
        require_lengths(request.slice_lengths, step.tokens)
        if len(request.slice_lengths) == 1:
            return step.scored, ()
        return step.scored_in(request.slice_lengths)
    return step.scored_in(step.best_lengths(None if request.slices == "auto" else int(request.slices or 1)))


def as_recorded(costs: StageCosts) -> SliceCosts:
    """The costs of a slice as a plan holds them."""
    return SliceCosts(**{field.name: getattr(costs, field.name) for field in fields(SliceCosts)})


def require_lengths(lengths: Sequence[int], tokens: int) -> None:
    """Raise PlanError for slices that do not add up to a sequence."""
    if sum(lengths) != tokens:
        more = f"{tokens - sum(lengths)} more" if sum(lengths) < tokens else f"{sum(lengths) - tokens} fewer"
        raise PlanError(
            f"slice_lengths={list(lengths)} add up to {sum(lengths)} tokens, and the captured sequence has {tokens}: "
            f"give {more}, or slices={len(lengths)} for lengths that the planner chooses"
        )
