"""Bounds of cuts, each finer than the one before: what no step gets below whose stages are known.

Most cuts are slower than the answer by what policies share, which is found once: what their passes take in any order,
then in the order of their schedule. What each rank sends is counted for those that are left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from shardwright.core.plan.decision import Decision, placement_of
from shardwright.core.schedule import AUTO
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.search.bounds import FEW_MICROBATCHES, SAFE, Bounds
from shardwright.core.search.predict import LONGEST_SIMULATED, Pipeline, least_makespan_s
from shardwright.core.search.space import Pipelining, Policy, Shape, splits_backward
from shardwright.core.search.unit_labels import kept_units
from shardwright.core.tables.memory import live_microbatches
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_tables import RankTables

REMEMBERED_PIPELINES = 512
"""The number of simulated pipelines that are remembered: policies that wait alike share one."""


class Counted(IntEnum):
    """What the bound of a cut counts: each is finer than the one before, and takes longer to find."""

    PIPELINE = 0
    """What no order of its passes gets below, which policies share, and what traffic adds to any cut of the degrees."""
    RANKS = 1
    """Also what each of its ranks sends."""
    SCHEDULE = 2
    """Its passes in the order of the schedule, but the traffic of any cut."""
    ROOM = 3
    """These with what each rank sends, and no more kept units than memory has room for."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Stages, and the policies that may have room for them; their memory is counted when their time matters."""

    shape: Shape
    pipelining: Pipelining
    policies: tuple[Policy, ...]
    starts: tuple[int, ...]
    bound_s: float
    """Seconds below which none of the policies gets: whichever units it keeps, or no more than memory has room for."""
    counted: Counted = Counted.PIPELINE
    """What the bound counts."""


class CutBounds:
    """The bounds of one search's cuts, with what they share."""

    def __init__(self, bounds: Bounds, request_of: Callable[[Decision], MemoryRequest]) -> None:
        """``request_of``: what a decision asks of memory."""
        self.bounds, self.step, self.request = bounds, bounds.step, bounds.request
        self._request_of = request_of
        self._pipelines: dict[object, Pipeline] = {}
        self._least_pipelines: dict[object, float | None] = {}
        self._undelayed: dict[object, float] = {}

    def first(self, cut: Cut) -> Cut:
        """A cut with its first bound. Those that may be cut anew are looked at by what they are known not to get below,
        so that as much as it takes is counted of them at once."""
        shape, ranked = cut.shape, self._least_ranked(cut)
        pipeline = self._known_pipeline_s(cut, ranked)
        if pipeline is None or shape.microbatches <= FEW_MICROBATCHES:
            return self.finer(cut)
        return replace(cut, bound_s=self.bounds.least_step_s(shape, cut.policies, pipeline))

    def _least_ranked(self, cut: Cut) -> RankTables:
        """The unit costs of a cut, whichever units its policies keep."""
        recompute = cut.policies[0].recompute
        some_may_be_kept = self.request.recomputes_what_memory_asks_for(recompute)
        return self.bounds.ranked(cut.shape, "none" if some_may_be_kept else recompute)

    def _known_pipeline_s(self, cut: Cut, ranked: RankTables) -> float | None:
        """`least_pipeline_s` of a cut, found once for all policies; ``ranked`` is one of those of the bounds."""
        key = id(ranked), cut.starts, cut.pipelining, cut.shape.microbatches
        if key not in self._least_pipelines:
            self._least_pipelines[key] = least_pipeline_s(cut.shape, cut.pipelining, cut.starts, ranked)
        return self._least_pipelines[key]

    def finer(self, cut: Cut) -> Cut:
        """The cut with the next finer bound."""
        is_few = cut.shape.microbatches <= FEW_MICROBATCHES
        match cut.counted:
            case Counted.PIPELINE:
                ranked = self._least_ranked(cut)
                known = self._known_pipeline_s(cut, ranked)
                least = self.least_s(cut.shape, cut.policies, cut.pipelining, cut.starts, ranked, known)
                return replace(cut, bound_s=max(cut.bound_s, least), counted=Counted.RANKS)
            case Counted.RANKS if not is_few and (simulated := self._undelayed_s(cut)):
                least = self.bounds.least_step_s(cut.shape, cut.policies, simulated)
                return replace(cut, bound_s=max(cut.bound_s, least), counted=Counted.SCHEDULE)
            case _:
                return self.with_room(cut)

    def least_s(
        self,
        shape: Shape,
        policies: Sequence[Policy],
        pipelining: Pipelining,
        starts: tuple[int, ...],
        ranked: RankTables,
        pipeline_s: float | None = None,
    ) -> float:
        """Seconds below which no step of a cut gets under the best of some policies. ``pipeline_s``: seconds below
        which its pipeline does not get, where that is known."""
        placement = placement_of(pipelining.schedule, ranked.ranks, pipelining.virtual_stages)
        pipeline = pipeline_s or least_pipeline_s(shape, pipelining, starts, ranked)
        decisions = [self.bounds.sharing(shape, policy, pipelining) for policy in policies]
        return min(self.step.least_steps_s(decisions, ranked, starts, placement, pipeline)) * SAFE

    def with_room(self, cut: Cut) -> Cut:
        """The cut, with the bound of keeping no more units than its memory has room for. A draft keeps these or fewer,
        and takes many times as long to count."""
        (policy, *others), shape, pipelining, starts = cut.policies, cut.shape, cut.pipelining, cut.starts
        if not self.request.recomputes_what_memory_asks_for(policy.recompute):
            simulated, ranked = self._undelayed_s(cut), self._least_ranked(cut)
            least = self.least_s(shape, cut.policies, pipelining, starts, ranked, simulated) if simulated else 0.0
            return replace(cut, bound_s=max(cut.bound_s, least), counted=Counted.ROOM)
        if others or self.request.offload:
            return replace(cut, counted=Counted.ROOM)
        ranked = self.bounds.ranked(shape, policy.recompute)
        decision = self.bounds.decision(shape, policy, pipelining, starts)
        live = live_microbatches(pipelining.schedule, ranked.ranks, shape.microbatches, pipelining.virtual_stages)
        kept = kept_units(ranked, starts, decision.stage_ranks, live, self._request_of(decision))
        least = self.least_s(shape, [policy], pipelining, starts, ranked.keeping(kept) if kept else ranked)
        return replace(cut, bound_s=max(cut.bound_s, least), counted=Counted.ROOM)

    def _undelayed_s(self, cut: Cut) -> float | None:
        """Seconds of a cut's pipeline whose passes wait for no traffic over the data axis, which policies share. None
        where waiting might shorten it: where idle time is lent, where orders follow from times, and where what long
        schedules take is extrapolated."""
        shape, pipelining = cut.shape, cut.pipelining
        if self.request.recomputes_what_memory_asks_for(cut.policies[0].recompute):
            return None
        ranked = self.bounds.ranked(shape, cut.policies[0].recompute)
        if ranked.ranks == 1 or ranked.idle_lent:
            return None
        if pipelining.schedule == AUTO or FAMILIES[pipelining.schedule].follows_costs:
            return None
        if shape.microbatches > LONGEST_SIMULATED * ranked.ranks:
            return None
        key = id(ranked), cut.starts, pipelining, shape.microbatches
        if key not in self._undelayed:
            decision = self.bounds.decision(shape, cut.policies[0], pipelining, cut.starts)
            costs = self.step.plain_costs(ranked, cut.starts, decision.stage_ranks)
            self._undelayed[key] = self.pipeline(decision, costs).makespan_s
        return self._undelayed[key]

    def pipeline(self, decision: Decision, costs: StageCosts) -> Pipeline:
        """The simulated pipeline of a decision, remembered."""
        key = costs, decision.schedule, decision.virtual_stages, decision.microbatches
        if key not in self._pipelines:
            if len(self._pipelines) >= REMEMBERED_PIPELINES:
                self._pipelines.clear()
            self._pipelines[key] = self.step.pipeline(decision, costs)
        return self._pipelines[key]


def least_pipeline_s(shape: Shape, pipelining: Pipelining, starts: Sequence[int], ranked: RankTables) -> float | None:
    """Seconds below which no pipeline of these stages gets; None where there is one rank, which has no pipeline."""
    if ranked.ranks == 1:
        return None
    placement = placement_of(pipelining.schedule, ranked.ranks, pipelining.virtual_stages)
    split = splits_backward(pipelining.schedule, pipelining.virtual_stages)
    costs = ranked.stage_seconds(tuple(starts), tuple(placement))
    return least_makespan_s(costs, placement, shape.microbatches, splits_backward=split)
