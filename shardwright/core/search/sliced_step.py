"""The step of a plan whose sequences go through the pipeline in slices: what slices cost, and which are best.

A slice's seconds and bytes are those of its ops on its own tokens, behind those before it (`SliceCounts`), as a share
of what the same count says of whole sequences; what was measured of whole ones holds so for slices too. What needs all
tokens runs with the last slice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.errors import PlanError
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.prediction_error import LEAD
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.peak_memory import bytes_of, peak_below_sum_of_slices, peak_live
from shardwright.core.search.answer import place_of
from shardwright.core.search.predict import Pipeline, simulated_pipeline
from shardwright.core.search.scoring import Scored, Scorer
from shardwright.core.search.slice_counts import Behind, Slice, SliceCounts, SliceWork
from shardwright.core.search.sliced_memory import SlicedMemory, followed
from shardwright.core.search.sliced_stages import SlicedStages
from shardwright.core.slices.fitted_cost import FittedCost
from shardwright.core.slices.lengths import best_lengths
from shardwright.core.tables.memory import MemoryUse, kept_bytes, recomputed_s

POINTS = 5
"""The lengths, and the contexts, at which the seconds of slices are counted; between them they are interpolated."""
CONTEXTS = 9
"""The contexts at which slices of one length are counted for the costs of a plan; between them they are interpolated:
attention grows evenly with them, and nothing else changes."""
LEAST = 16
"""The shortest slice whose seconds are counted, in tokens, of sequences that are not shorter themselves."""
PLACES = 128
"""The places where a sequence may be cut, at most."""
MOST_UNEQUAL = 8
"""The number of slices up to which so many of unequal lengths are looked for; more are nearly equal, or as many as the
rule takes when it may choose."""


@dataclass(frozen=True, slots=True)
class _Passes:
    """Seconds and kept bytes of one stage."""

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    kept_bytes: float = 0

    def __add__(self, other: "_Passes") -> "_Passes":
        return self.combined(other, 1.0, 1.0)

    def combined(self, other: "_Passes", own: float, others: float) -> "_Passes":
        """So many times these, and so many times the others, each at least 0."""
        return _Passes(
            max(0.0, self.forward_s * own + other.forward_s * others),
            max(0.0, self.input_grad_s * own + other.input_grad_s * others),
            max(0.0, self.weight_grad_s * own + other.weight_grad_s * others),
            max(0, self.kept_bytes * own + other.kept_bytes * others),
        )


class SlicedStep:
    """The slices of one choice, which was scored for whole sequences."""

    def __init__(self, counts: SliceCounts, scorer: Scorer, scored: Scored) -> None:
        self.counts, self.scorer, self.scored = counts, scorer, scored
        self.decision, self.tables = scored.decision, scorer.tables
        self.tokens = counts.tokens
        self._places = [place_of(scorer, scored, pp) for pp in range(self.decision.pp)]
        self._by_slice: dict[tuple[Slice | None, bool], tuple[_Passes, ...]] = {}

    # -- what slices cost -----------------------------------------------------------------------------------------

    def costs(self, lengths: Sequence[int]) -> tuple[StageCosts, ...]:
        """The costs of each slice on the stages of the choice."""
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        contexts: dict[int, list[int]] = {}
        for length, start in zip(lengths, starts, strict=True):
            contexts.setdefault(length, []).append(start)
        last = len(lengths) - 1
        return tuple(
            self._costs(length, self._between(length, start, contexts[length]), is_last=number == last)
            for number, (length, start) in enumerate(zip(lengths, starts, strict=True))
        )

    def _costs(self, length: int, own: Sequence[_Passes], *, is_last: bool) -> StageCosts:
        whole, counted, own = self.whole, self._stages(None, with_tail=True), list(own)
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
    def _behind(self) -> _Passes:
        """The count of what runs behind the last slice."""
        every, until = (self._stages(None, with_tail=with_tail)[-1] for with_tail in (True, False))
        return every.combined(until, 1.0, -1.0)

    def _between(self, length: int, context: int, contexts: Sequence[int]) -> tuple[_Passes, ...]:
        """The count of a slice, between those behind two others of some contexts, in order, where these are many."""
        if len(contexts) <= CONTEXTS:
            return self._stages((length, context), with_tail=False)
        counted = [contexts[place * (len(contexts) - 1) // (CONTEXTS - 1)] for place in range(CONTEXTS)]
        ahead = max(each for each in counted if each <= context)
        if ahead == context:
            return self._stages((length, context), with_tail=False)
        behind = min(each for each in counted if each > context)
        part = (context - ahead) / (behind - ahead)
        pairs = zip(*(self._stages((length, each), with_tail=False) for each in (ahead, behind)), strict=True)
        return tuple(one.combined(other, 1 - part, part) for one, other in pairs)

    def _stages(self, of: Slice | None, *, with_tail: bool) -> tuple[_Passes, ...]:
        """The count of every stage, of a slice or of whole sequences; ``with_tail`` as in `SliceCounts.unit`."""
        if (of, with_tail) not in self._by_slice:
            decision, modes = self.decision, self.scored.tables.tables[0].modes
            found, asked = [], (decision.tp, decision.microbatch)
            ends = [*decision.stage_starts[1:], self.scored.tables.units]
            for rank, first, end in zip(decision.stage_ranks, decision.stage_starts, ends, strict=True):
                place, total = self._places[rank], _Passes()
                for number in range(first, end):
                    total += _passes(self.counts.unit(number, of, *asked, place, with_tail=with_tail), modes[number])
                found.append(total)
            self._by_slice[of, with_tail] = tuple(found)
        return self._by_slice[of, with_tail]

    # -- the step -------------------------------------------------------------------------------------------------

    def scored_in(self, lengths: Sequence[int]) -> tuple[Scored, tuple[StageCosts, ...]]:
        """The choice with its sequences in these slices, and the costs of each."""
        costs, tables = self.costs(lengths), self.scored.tables
        decision = replace(self.decision, slice_lengths=tuple(lengths))
        one = sum(sum(c.forward_s) + sum(c.backward_s) for c in costs)
        if decision.pp == 1:
            pipeline = Pipeline(one * decision.microbatches, (0.0,))
        else:
            pipeline = simulated_pipeline(decision, costs)
        memory = self._memory(decision, costs)
        predicted = self.scorer.step.predicted(decision, tables, memory, decision.stage_ranks, pipeline)
        busy, all_s = one * decision.microbatches, decision.pp * pipeline.makespan_s
        predicted = replace(predicted, bubble_fraction=max(0.0, 1 - busy / all_s) if all_s else 0.0)
        return Scored(decision, tables, predicted, tables.over_bytes(memory)), costs

    def _memory(self, decision: Decision, costs: Sequence[StageCosts]) -> tuple[MemoryUse, ...]:
        """The memory of every rank, followed from action to action where that is known of the runtime; else activations
        of the slices under way beside what is held of whole sequences, and the gradients of keys and values, which add
        up until the backward of the first slice."""
        if self.tables.graph.memory_traits.gathers_units:
            return self._followed(decision)
        schedule = followed(decision).compute_schedule(None)
        carried = self.counts.carried_bytes(decision.microbatch)
        held = [0] * decision.pp
        ends = [*decision.stage_starts[1:], len(carried)]
        for rank, first, end in zip(decision.stage_ranks, decision.stage_starts, ends, strict=True):
            held[rank] += sum(carried[first:end]) // decision.tp
        slices = tuple(map(bytes_of, costs))
        appear = self.tables.graph.memory_traits.gradients_when_made and decision.shard < 2
        found = []
        for rank, use in enumerate(self.scored.predicted.memory_by_stage_rank):
            order = schedule.table[rank]
            peak = peak_live(order, slices=slices)
            apart = min(use.apart_bytes, peak)
            if appear:
                apart = min(apart, peak_below_sum_of_slices(order, slices, use.gradients_bytes))
            buffers = use.buffers_bytes + held[rank]
            found.append(replace(use, activations_bytes=peak, buffers_bytes=buffers, apart_bytes=apart))
        return tuple(found)

    def _followed(self, decision: Decision) -> tuple[MemoryUse, ...]:
        """The memory of every rank by `SlicedMemory`."""
        counts, asked, start, slices = self.counts, (decision.tp, decision.microbatch), 0, []
        ranks = self._rank_of_units
        for length in decision.slice_lengths:
            of = length, start
            units = tuple(
                counts.unit(number, of, *asked, self._places[rank], with_tail=False, alone=True)
                for number, rank in enumerate(ranks)
            )
            slices.append(SliceWork(counts.counter(of, alone=True), length / self.tokens, units))
            start += length
        cost = counts.behind(*asked, self._places[-1])
        behind = Behind()
        if cost is not None:
            behind = Behind(cost.saved_bytes, cost.forward_beside_bytes, cost.passing_bytes, cost.entering_bytes)
        request = self.scorer.request_of(self.decision)
        stages = SlicedStages(
            counts.counter(None), counts.ops, slices, decision.slice_lengths, behind, self.tables.folded.units,
            counts.ways(decision.tp), decision.microbatch, request, fuses_dropout=self.tables.device.fuses_dropout,
        )  # fmt: skip
        found = SlicedMemory(decision, self.scored.tables, request, stages)
        return found.memory(self.scored.predicted.memory_by_stage_rank)

    @property
    def _rank_of_units(self) -> list[int]:
        """The pipeline rank of every unit."""
        starts, found = self.decision.stage_starts, list[int]()
        for rank, first, end in zip(
            self.decision.stage_ranks, starts, [*starts[1:], self.scored.tables.units], strict=True
        ):
            found += [rank] * (end - first)
        return found

    # -- which slices ---------------------------------------------------------------------------------------------

    def least_pipeline_s(self, numbers: Sequence[int], share_of_bubble: float) -> float:
        """About the least seconds of the pipeline in so many equal slices: Σt of the slowest stage, and of the longest
        slice a share of what it takes on all other stages, messages not counted."""
        fitted, whole = self.fitted, self.whole
        stages = [f + i + w for f, i, w in zip(whole.forward_s, whole.input_grad_s, whole.weight_grad_s, strict=True)]
        others = sum(stages) / max(stages) - 1 if max(stages) else 0.0
        found = []
        for number in numbers:
            lengths = equal_lengths(self.tokens, number)
            starts = [sum(lengths[:n]) for n in range(number)]
            taken = [fitted(length, start) for length, start in zip(lengths, starts, strict=True)]
            found.append(sum(taken) * self.decision.microbatches + share_of_bubble * others * max(taken))
        return min(found)

    def lengths(self, slices: int | None, *, is_simple: bool, below_s: float) -> list[tuple[int, ...]]:
        """The lengths of so many slices, or of any number, whose pipeline takes less than ``below_s``, the fastest
        first: among those by TeraPipe's rule, for which stages are equal and messages take no time, and equal ones, by
        a simulation of stages and messages. ``is_simple``: of those that predictions do not tell from the fastest, that
        of the fewest slices comes first."""
        step = max(1, -(-self.tokens // PLACES))
        if slices and slices > -(-self.tokens // step):
            step = max(1, self.tokens // slices)
        tried: dict[tuple[int, ...], float] = {}
        for count in [slices] if slices else [None, *numbers_of_slices(self.tokens)]:
            ways = []
            if slices or count is None or count <= MOST_UNEQUAL:
                asked = self.tokens, self.decision.stages, count, step
                ways.append(best_lengths(self.fitted, *asked, microbatches=self.decision.microbatches).lengths)
            for lengths in (*ways, equal_lengths(self.tokens, count or len(ways[0]))):
                if lengths not in tried and (len(lengths) > 1 or count == 1):
                    tried[lengths] = self._about_s(lengths)
        found = sorted(tried, key=lambda lengths: (tried[lengths], len(lengths)))
        found = [lengths for lengths in found if tried[lengths] < below_s]
        if is_simple and found:
            limit = tried[found[0]] * (1 + LEAD / 2)
            near = [lengths for lengths in found if tried[lengths] <= limit]
            first = min(near, key=lambda lengths: (len(lengths), max(lengths) - min(lengths), tried[lengths]))
            found = [first, *(lengths for lengths in found if lengths != first)]
        return found

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
            return sum(sum(c.forward_s) + sum(c.backward_s) for c in costs) * decision.microbatches
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
        costs = self._costs(length, self._stages((length, context), with_tail=False), is_last=False)
        return max(f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True))


def numbers_of_slices(tokens: int) -> list[int]:
    """The numbers of slices that are tried: powers of two, of slices that are not too short."""
    return [1 << power for power in range(1, 8) if tokens >> power >= LEAST]


def equal_lengths(tokens: int, number: int) -> tuple[int, ...]:
    """So many slices of equal lengths, but for a token."""
    return tuple(int(length) for length in np.diff(np.arange(number + 1) * tokens // number))


def _passes(cost: UnitCost, mode: str) -> _Passes:
    return _Passes(
        cost.forward_s, cost.input_grad_s + recomputed_s(cost, mode), cost.weight_grad_s, kept_bytes(cost, mode)
    )


def require_lengths(lengths: Sequence[int], tokens: int) -> None:
    """Raise PlanError for slices that do not add up to a sequence."""
    if sum(lengths) != tokens:
        more = f"{tokens - sum(lengths)} more" if sum(lengths) < tokens else f"{sum(lengths) - tokens} fewer"
        raise PlanError(
            f"slice_lengths={list(lengths)} add up to {sum(lengths)} tokens, and the captured sequence has {tokens}: "
            f"give {more}, or slices={len(lengths)} for lengths that the planner chooses"
        )
