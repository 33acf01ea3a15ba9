"""The search for the best plan whose sequences go through the pipeline in slices, and whether that pays.

Degrees, microbatch, memory policy, schedule and lengths of slices are searched together: many slices want other ones
than whole sequences do, such as more stages, smaller microbatches, or no recompute where 1F1B over slices holds less.
A queue holds choices in the order of the seconds that they cannot get below (`Bounds.sliced_bound_s`): degrees, then a
policy, then a schedule, whose pipeline in equal slices is estimated from below; what then comes first is simulated in
its best slices. The search ends when nothing is left that could be faster than the best, or when it has simulated as
much as it may.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from shardwright.core.errors import PlanError
from shardwright.core.plan.decision import Decision, require_slices
from shardwright.core.plan.prediction_error import LEAD
from shardwright.core.plan.record import SliceCosts
from shardwright.core.schedule import AUTO
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.schedule import MOST_CELLS
from shardwright.core.search.best_first import Search
from shardwright.core.search.scoring import Scored
from shardwright.core.search.slice_counts import SliceCounts
from shardwright.core.search.sliced_step import SlicedStep, numbers_of_slices, require_lengths
from shardwright.core.search.space import Pipelining, Policy, Shape, splits_backward
from shardwright.core.search.unit_labels import kept_but_one
from shardwright.core.values.amounts import bytes_text

MOST_PASSES = 1_500_000
"""The passes of slices that one search simulates at most, in a few millionths of a second each: then the best so far is
the answer."""
MOST_COUNTED = 16
"""The tensor degrees and microbatches for which slices are counted at most, in tenths of a second each."""
MOST_LENGTHS = 6
"""The ways to cut sequences of one choice that are tried for some that fit."""
COMPARED = 3
"""The ways that fit whose slices are counted each, as estimates do not tell them apart."""
BUBBLE_LEFT = 0.3
"""The share of a pipeline's bubble that split backwards leave at least: ZB-H1's (arXiv 2401.10241, section 2.1)."""
NEAR = 0.97
"""The factor by which the estimate of a pipeline in slices is lowered, so that no better choice is passed over: the
slices that are simulated may be of unequal lengths."""


@dataclass(frozen=True, slots=True)
class Sliced:
    """The answer: the best choice and the next ones, the costs of its slices (none where sequences are whole), and the
    reason, where it was searched."""

    best: Scored
    others: list[Scored]
    costs: tuple[StageCosts, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class _Made:
    """A choice in slices that fits, with their costs, and the same with whole sequences."""

    scored: Scored
    costs: tuple[StageCosts, ...]
    whole: Scored


class SlicedSearch:
    """One search over the choices of a search for whole sequences.

    Raises PlanError for a model without a sequence, CaptureError for one that cannot run in slices.
    """

    def __init__(self, search: Search, within_s: float = float("inf")) -> None:
        """``within_s``: seconds that a step takes at most."""
        self.within_s = within_s
        self.search, self.scorer, self.space, self.request = search, search.scorer, search.space, search.request
        self.counts = SliceCounts(self.scorer.tables)
        if self.request.slice_lengths:
            require_lengths(self.request.slice_lengths, self.counts.tokens)
        self.is_free = self.request.slices == "auto" and not self.request.slice_lengths
        self.is_simple = self.request.answer == "simplest"
        self._numbers = itertools.count()
        self._counted: set[tuple[int, int]] = set()
        self._passes = 0
        self._tried: set[Decision] = set()
        self._refused: PlanError | None = None
        self._least_over: tuple[int, Scored] | None = None
        self._nearest: _Made | None = None
        """The fastest that was found, whether or not it is fast enough."""

    def run(self, best: Scored | None, others: Sequence[Scored], fastest: Scored | None = None) -> Sliced | None:
        """The best choice in slices, or in whole sequences where slices were left to choose and do not pay; ``best``,
        ``others`` and the ``fastest``, which need not be the simplest, are of whole sequences. None where nothing fits.

        Raises PlanError, or CaptureError, where schedules run no slices.
        """
        leads = fastest is not None and best is not None and fastest.decision != best.decision
        whole = [] if best is None else [best, *([fastest] if fastest is not None and leads else []), *others]
        if self.request.slice_lengths and len(self.request.slice_lengths) == 1:
            return None if best is None else Sliced(best, list(others), (), "")
        if self.request.schedule == AUTO:
            reason = "schedules that are generated run microbatches whole"
            return None if best is None else Sliced(best, list(others), (), reason)
        below_s = self.within_s
        if best is not None and self.is_free:
            below_s = best.predicted.step_time_s * ((1 - LEAD) if self.is_simple else 1.0)
            if fastest is not None:  # slices that are slower than a plan without them do not pay
                below_s = min(below_s, fastest.predicted.step_time_s)
        found = self._fastest(whole, below_s)
        if found is not None:
            reason = _why_sliced(found, best) if self.is_free else ""
            return Sliced(found.scored, whole, found.costs, reason)
        if self.is_free and best is not None:
            near = [] if self._nearest is None else [self._nearest.scored]
            reason = _why_whole(best, self._nearest, self.counts.least_share)
            if self._nearest is None and self._least_over is not None:
                lacks = bytes_text(self._least_over[0])
                reason = f"slices have no room: those that may be faster lack {lacks} on the fullest rank, at least"
            elif self._nearest is None and self._refused is not None:
                reason = str(self._refused)
            return Sliced(best, [*near, *others], (), reason)
        if not self.is_free and self._least_over is None and (self._refused or best is not None):
            raise self._refused or PlanError("no schedule of the best plans runs slices: pin schedule='1f1b'")
        return None

    def lacking(self) -> str | None:
        """What the slices lack that came nearest to the memory, in words; None where none was tried."""
        if self._least_over is None:
            return None
        over, scored = self._least_over
        return (
            f"{len(scored.decision.slice_lengths)} slices lack {over} bytes on the fullest rank: pin recompute='full', "
            f"a smaller microbatch or more stages"
        )

    # -- the queue ------------------------------------------------------------------------------------------------

    def _fastest(self, whole: Sequence[Scored], below_s: float) -> _Made | None:
        """The fastest choice that takes less than ``below_s``; ``whole``: choices that are tried first."""
        best: _Made | None = None
        share = self.counts.least_share
        for number, scored in enumerate(whole):
            if number and scored.predicted.step_time_s * share >= below_s:
                continue
            made = self._in_slices(scored, float("inf") if number == 0 else below_s)
            if made is not None and made.scored.predicted.step_time_s < below_s:
                best, below_s = made, made.scored.predicted.step_time_s
        queue: list[tuple[float, int, tuple[Any, ...]]] = []

        def push(bound_s: float, *choice: Any) -> None:
            if bound_s < below_s:
                heapq.heappush(queue, (bound_s, next(self._numbers), choice))

        for shape in self.search.unlike(self.space.shapes()):
            if shape.mesh.axis_size("pp") > 1 or not self.is_free:
                push(self.scorer.bounds.sliced_bound_s(shape, None, share), shape)
        while queue:
            bound_s, _, choice = heapq.heappop(queue)
            if bound_s >= below_s or self._passes > MOST_PASSES:
                break
            if len(choice) == 1:
                for policy in self.space.policies(choice[0].mesh.axis_size("dp")):
                    if policy.gathered_stages is None and policy.reduce_after is None:
                        push(max(bound_s, self.scorer.bounds.sliced_bound_s(*choice, policy, share)), *choice, policy)
            elif len(choice) == 2:
                for pipelining in self._pipelinings(*choice):
                    push(bound_s, *choice, pipelining)
            elif len(choice) == 3:
                step = self._step(*choice)
                if step is not None:
                    push(max(bound_s, self._estimate_s(step)), *choice, step)
            else:
                made = self._best_slices(choice[3], below_s)
                if made is not None and made.scored.predicted.step_time_s < below_s:
                    best, below_s = made, made.scored.predicted.step_time_s
        return best

    def _pipelinings(self, shape: Shape, policy: Policy) -> list[Pipelining]:
        """The schedules that run slices. Notes why others do not, where they were asked for."""
        pp = shape.mesh.axis_size("pp")
        found = []
        for pipelining in self.space.pipelinings(pp, shape.microbatches):
            if not self.space.go_together(policy.recompute, pipelining):
                continue
            try:
                require_slices((0, 0), pipelining.schedule, policy.gathered_stages, policy.reduce_after)
            except PlanError as error:
                self._refused = self._refused or error
                continue
            found.append(pipelining)
        return found

    def _step(self, shape: Shape, policy: Policy, pipelining: Pipelining) -> SlicedStep | None:
        """A choice with the cut that memory does not bind; None where slices of too many kinds were counted."""
        kind = shape.degrees[2], shape.microbatch
        if kind not in self._counted and len(self._counted) >= MOST_COUNTED:
            return None
        scored = self.scorer.without_limit(shape, policy, pipelining)
        if scored is None:
            return None
        self._counted.add(kind)
        return SlicedStep(self.counts, self.scorer, scored)

    def _estimate_s(self, step: SlicedStep) -> float:
        """About the seconds that a choice does not get below."""
        decision, before = step.decision, step.scored.predicted
        share = 1.0 / decision.virtual_stages
        if splits_backward(decision.schedule, decision.virtual_stages):
            share *= BUBBLE_LEFT
        asked = self._asked
        numbers = [asked] if asked else numbers_of_slices(self.counts.tokens) or [1]
        rest = before.step_time_s - before.pipeline_s
        return NEAR * step.least_pipeline_s(numbers, share) + rest

    @property
    def _asked(self) -> int | None:
        """The number of slices, where it is pinned."""
        if self.request.slice_lengths:
            return len(self.request.slice_lengths)
        return None if self.is_free else int(self.request.slices or 1)

    # -- one choice -----------------------------------------------------------------------------------------------

    def _in_slices(self, scored: Scored, below_s: float) -> _Made | None:
        """A choice of whole sequences in the best slices."""
        decision = scored.decision
        try:
            require_slices((0, 0), decision.schedule, decision.gathered_stages, decision.reduce_after)
        except PlanError as error:
            self._refused = self._refused or error
            return None
        if self.is_free and decision.pp == 1:
            return None
        return self._best_slices(SlicedStep(self.counts, self.scorer, scored), below_s, is_final=True)

    def _best_slices(self, step: SlicedStep, below_s: float, *, is_final: bool = False) -> _Made | None:
        """A choice in the best slices that fit, of those whose step may take less than ``below_s``. ``is_final``:
        whether its units are kept and computed again as they are; else as few are as memory asks for."""
        decision, before = step.decision, step.scored.predicted
        if decision.tp > 1 and decision.sequence_parallel:
            said = "sequences are divided over the tensor axis: pin sequence_parallel=False"
            self._refused = self._refused or PlanError(said)
            return None
        if decision in self._tried:
            return None
        self._tried.add(decision)
        rest = before.optimizer_s
        if self.request.slice_lengths:
            ways = [tuple(self.request.slice_lengths)]
        else:
            ways = step.lengths(self._asked, is_simple=self.is_simple, below_s=below_s - rest)
            self._passes += 4 * decision.stages * min(decision.microbatches, 5 * decision.pp) * len(ways)
        keeps = not is_final and self.request.recomputes_what_memory_asks_for(decision.recompute)
        found: list[_Made] = []
        for lengths in ways[:MOST_LENGTHS]:
            if not self._admits(decision, len(lengths)):
                continue
            self._passes += 2 * decision.stages * min(decision.microbatches, 5 * decision.pp) * len(lengths)
            scored, costs = step.scored_in(lengths)
            if scored.over_bytes:
                if self._least_over is None or scored.over_bytes < self._least_over[0]:
                    self._least_over = scored.over_bytes, scored
                continue
            found.append(_Made(scored, costs, step.scored))
            if len(found) == COMPARED:
                break
        if not found:
            return None
        made = min(found, key=_seconds)
        if self.is_simple:
            limit = _seconds(made) * (1 + LEAD / 2)
            made = next(one for one in found if _seconds(one) <= limit)
        if keeps:
            made = self._keeping(step, made)
        if self._nearest is None or _seconds(made) < _seconds(self._nearest):
            self._nearest = made
        return made

    def _keeping(self, step: SlicedStep, all_again: _Made) -> _Made:
        """A choice that fits with all units computed again, with as many kept as memory has room for: on every rank the
        last ones of its stages, whose backward comes first."""
        decision, tables = step.decision, step.scored.tables
        lengths = all_again.scored.decision.slice_lengths
        kept = self._with_room(step, all_again)
        best = all_again
        while kept:
            whole = self.scorer.keeping(step.scored, kept)
            scored, costs = SlicedStep(self.counts, self.scorer, whole).scored_in(lengths)
            memory = scored.predicted.memory_by_stage_rank
            if not scored.over_bytes:
                made = _Made(scored, costs, whole)
                best = min(best, made, key=_seconds)
                break
            left = kept_but_one(tables, kept, decision.stage_starts, decision.stage_ranks, memory)
            kept = () if left == kept else left
        return best

    @staticmethod
    def _with_room(step: SlicedStep, made: _Made) -> tuple[int, ...]:
        """The units that memory may have room to keep, where a rank holds so many times what its stages keep of one
        microbatch."""
        decision, tables = step.decision, step.scored.tables
        found: list[int] = []
        kept_of = step.whole.activation_bytes
        for rank, use in enumerate(made.scored.predicted.memory_by_stage_rank):
            own = [stage for stage, on in enumerate(decision.stage_ranks) if on == rank]
            of_one = sum(kept_of[stage] for stage in own)
            times = use.activations_bytes / of_one if of_one else 1.0
            room, table = float(tables.limits_bytes[rank] - use.total_bytes), tables.tables[rank]
            ends = tables.ends(decision.stage_starts)
            for unit in (u for stage in own for u in reversed(range(*ends[stage])) if table.modes[u] == "full"):
                room -= max(0, table.units[unit].saved_bytes - table.units[unit].entering_bytes) * times
                if room < 0:
                    break
                found.append(unit)
        return tuple(sorted(found))

    @staticmethod
    def _admits(decision: Decision, slices: int) -> bool:
        return decision.stages * decision.microbatches * slices <= MOST_CELLS


def _seconds(made: _Made) -> float:
    return made.scored.predicted.step_time_s


# -- the reason ---------------------------------------------------------------------------------------------------


def _why_sliced(made: _Made, best: Scored | None) -> str:
    """The reason why sequences run in slices: memory, where whole ones have no room; else the time."""
    count, over = len(made.scored.decision.slice_lengths), made.whole.over_bytes
    if best is None:
        return f"memory: no plan of whole sequences fits; this one, whole, lacks {bytes_text(over)} on the fullest rank"
    ratio = best.predicted.step_time_s / _seconds(made)
    if over:
        return (
            f"memory: whole, this plan lacks {bytes_text(over)} on the fullest rank, and the best plan of whole "
            f"sequences that fits takes {ratio:.2f} times as long"
        )
    idle, before = (s.predicted.bubble_fraction for s in (made.scored, best))
    return (
        f"time: the pipeline idles {idle:.0%} of its time in {count} slices, and {before:.0%} with whole sequences, "
        f"which take {ratio:.2f} times as long"
    )


def _why_whole(best: Scored, near: _Made | None, least_share: float) -> str:
    """The reason why sequences stay whole."""
    predicted = best.predicted
    if near is None:
        if best.decision.pp == 1:
            return "slices do not pay: no pipeline is as fast as one stage, which has no idle time to fill"
        return (
            f"slices do not pay: the pipeline idles {predicted.bubble_fraction:.1%} of its time with whole sequences, "
            f"and passes of slices together take {least_share:.0%} of theirs at least"
        )
    ours = near.scored.predicted
    idle = ours.pipeline_s * ours.bubble_fraction - predicted.pipeline_s * predicted.bubble_fraction
    busy = ours.pipeline_s - predicted.pipeline_s - idle
    ratio = ours.step_time_s / predicted.step_time_s
    said = f"{ratio - 1:.1%} slower" if ratio >= 1 else f"only {1 - ratio:.1%} faster, which predictions do not tell"
    count = len(near.scored.decision.slice_lengths)
    return (
        f"slices do not pay: in {count} slices a step is {said}: a rank idles {abs(idle) * 1e3:.3g} ms "
        f"{'less' if idle < 0 else 'more'}, and computes {abs(busy) * 1e3:.3g} ms "
        f"{'less' if busy < 0 else 'more, as products are short and launches many'}"
    )


def as_recorded(costs: StageCosts) -> SliceCosts:
    """The costs of a slice as a plan holds them."""
    return SliceCosts(**{field.name: getattr(costs, field.name) for field in fields(SliceCosts)})
