"""The costs of choices: cuts with a bound of their time, their memory, and simulated pipelines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import ScheduleError
from shardwright.core.partition.partitioners import DEFAULT, cut_units
from shardwright.core.partition.tree import MEMORY_WEIGHT
from shardwright.core.plan.decision import Decision, placement_of
from shardwright.core.plan.record import Predicted
from shardwright.core.schedule import AUTO, Schedule
from shardwright.core.schedule.messages_under_way import UnderWay, messages_under_way, usual_messages_under_way
from shardwright.core.schedule.peak_memory import peak_live
from shardwright.core.search.bounds import SAFE, Bounds
from shardwright.core.search.cut_bounds import Cut, CutBounds, least_pipeline_s
from shardwright.core.search.labelled_units import SAME, labelled
from shardwright.core.search.mixed_modes import as_many_in_another_mode
from shardwright.core.search.partition_input import partition_input
from shardwright.core.search.predict import Pipeline
from shardwright.core.search.rank_peaks import by_stage, less_apart, with_activations
from shardwright.core.search.recomputed_units import as_few_as_memory_asks_for
from shardwright.core.search.request import Request
from shardwright.core.search.space import Pipelining, Policy, Shape, require_starts, splits_backward
from shardwright.core.tables.cost_tables import CostTables
from shardwright.core.tables.memory import STAYING, MemoryUse, live_microbatches
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.values.recompute_modes import Recompute


@dataclass(frozen=True, slots=True)
class Scored:
    """A choice that is cut and whose pipeline is simulated. ``over_bytes`` is what its fullest rank lacks (0 when it
    fits)."""

    decision: Decision
    tables: RankTables
    predicted: Predicted
    over_bytes: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A cut with the policies under which it fits; they share one pipeline."""

    shape: Shape
    pipelining: Pipelining
    starts: tuple[int, ...]
    policies: tuple[tuple[Policy, tuple[MemoryUse, ...]], ...]
    bound_s: float
    tables: RankTables
    kept_units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timed:
    """A draft under one of its policies, whose pipeline is simulated; its memory is as counted for cuts."""

    decision: Decision
    tables: RankTables
    predicted: Predicted


class Scorer:
    """The scorer of choices for one model on one cluster, with what all of them share."""

    def __init__(self, tables: CostTables, cluster: Cluster, request: Request) -> None:
        self.tables, self.cluster, self.request = tables, cluster, request
        self.bounds = Bounds(tables, cluster, request)
        self.links, self.step = self.bounds.links, self.bounds.step
        self._cuts: dict[tuple[object, ...], tuple[int, ...] | None] = {}
        self.cut_bounds = CutBounds(self.bounds, self.request_of)

    def request_of(self, decision: Decision) -> MemoryRequest:
        policy = _policy_of(decision)
        shape = decision.stages, decision.dp, decision.microbatches
        if decision.generated and not self.tables.graph.memory_traits.stages_are_programs:
            under_way = messages_under_way(decision.compute_schedule(None))
        else:
            pipelining = Pipelining(decision.schedule, decision.virtual_stages)
            under_way = self._under_way(pipelining, decision.pp, decision.microbatches)
        sizes = decision.whole_below_bytes, decision.bucket_bytes
        return self.bounds.memory_request(policy, *shape, *sizes, under_way)

    def _under_way(self, pipelining: Pipelining, pp: int, microbatches: int) -> tuple[UnderWay, ...]:
        """The messages of every rank under a schedule; () where stages are programs, of which results are handed on."""
        if pp == 1 or self.tables.graph.memory_traits.stages_are_programs:
            return ()
        return usual_messages_under_way(pipelining.schedule, pp, microbatches, pipelining.virtual_stages)

    def _memory(
        self, decision: Decision, ranked: RankTables, live: Sequence[int], *, until_over: bool = False
    ) -> tuple[MemoryUse, ...]:
        """The memory of the ranks, as counted for cuts, or as counted for plans where that does not settle the fit;
        ``until_over`` as in `less_apart`."""
        request, known = self.request_of(decision), ranked.of_bytes.known_memory
        if decision.generated:
            return self._found_memory(decision, ranked, live, request, until_over=until_over)
        sizes = decision.schedule, decision.virtual_stages, decision.microbatches, decision.stage_starts
        key = sizes, tuple(live), request, until_over
        if key not in known:
            known[key] = self._found_memory(decision, ranked, live, request, until_over=until_over)
        return known[key]

    @staticmethod
    def _found_memory(
        decision: Decision, ranked: RankTables, live: Sequence[int], request: MemoryRequest, *, until_over: bool
    ) -> tuple[MemoryUse, ...]:
        memory = ranked.memory(decision.stage_starts, decision.stage_ranks, live, request)
        # Between the halves of a backward a stage may have more than its forward keeps.
        may_grow = splits_backward(decision.schedule, decision.virtual_stages)
        if not ranked.over_bytes(memory) and not may_grow:
            return memory
        memory = by_stage(decision, ranked, memory, request)
        least = memory
        if request.divides_gradients:
            least = tuple(replace(use, gradients_bytes=0, buffers_bytes=0) for use in memory)
        else:  # at most all gradients are subtracted, and all messages
            sent = ranked.messages(decision.stage_starts, decision.stage_ranks, request)
            least = tuple(
                replace(use, gradients_bytes=0, buffers_bytes=use.buffers_bytes - size)
                for use, size in zip(memory, sent, strict=True)
            )
        # Of halves of backwards more may be apart: an input gradient's temporary values and the most activations.
        if not ranked.over_bytes(memory) or (ranked.over_bytes(least) and not may_grow):
            return memory
        return less_apart(decision, ranked, memory, request, until_over=until_over)

    def least_live(self, pp: int, microbatches: int, pipelinings: Sequence[Pipelining]) -> tuple[int, ...] | None:
        """The least number of live microbatches of one stage on every rank under any of some pipelines, all of as many
        stages; None where units may be offloaded, which is no recomputation."""
        if self._may_offload:
            return None
        every = [live_microbatches(each.schedule, pp, microbatches, each.virtual_stages) for each in pipelinings]
        return tuple(map(min, zip(*every, strict=True)))

    def may_have_room(self, shape: Shape, policy: Policy, pipelining: Pipelining, live: Sequence[int] | None) -> bool:
        """Whether some cut may fit with no more than ``live`` microbatches of one stage on every rank, None: not known.
        Where units are recomputed as memory asks for, bounds tell."""
        if live is None or self.request.recomputes_what_memory_asks_for(policy.recompute):
            return True
        bounds, held = self.bounds, pipelining.virtual_stages
        state = bounds.least_state(shape, policy, held)
        return bounds.may_fit(shape, policy) and bounds.ranked(shape, policy.recompute).has_room(live, held, *state)

    # Cuts --------------------------------------------------------------------------------------------------------

    def cuts(self, shape: Shape, policies: Sequence[Policy], pipelining: Pipelining) -> list[Cut]:
        """The cut that memory does not bind and, for policies that have too little room for it, the best cut that fits
        by the estimate that cuts use; ``policies`` are of one recompute mode."""
        bounds, ranked = self.bounds, self.bounds.ranked(shape, policies[0].recompute)
        name, virtual = pipelining.schedule, pipelining.virtual_stages
        policies = [policy for policy in policies if policy.has_stages(pipelining)]
        if not policies:
            return []
        placement = placement_of(name, shape.degrees[0], virtual)
        live = live_microbatches(name, ranked.ranks, shape.microbatches, virtual)
        roomy = [
            p for p in policies
            if self._may_offload or ranked.has_room(live, virtual, *bounds.least_state(shape, p, virtual))
        ]  # fmt: skip
        if not roomy:
            return []
        found: dict[tuple[int, ...], list[Policy]] = {}
        free = self._starts(shape, roomy[0], pipelining, placement, live, ranked, fit=False)
        if free is not None:
            found[free] = list(roomy)
        if self.request.stage_starts is None:
            for policy in roomy:
                fitting = self._starts(shape, policy, pipelining, placement, live, ranked, fit=True)
                if fitting is not None and fitting != free:
                    found.setdefault(fitting, []).append(policy)
        return [
            self.cut_bounds.first(Cut(shape, pipelining, tuple(those), starts, 0.0)) for starts, those in found.items()
        ]

    def draft(self, cut: Cut) -> Draft | None:
        """A cut with those of its policies under which it fits; None where none does, or where no unit needs
        recomputing after all."""
        shape, pipelining, starts = cut.shape, cut.pipelining, cut.starts
        recompute = cut.policies[0].recompute
        ranked = self.bounds.ranked(shape, recompute)
        live = live_microbatches(pipelining.schedule, ranked.ranks, shape.microbatches, pipelining.virtual_stages)
        if self.is_needless(cut):
            return None
        fitting = []
        for policy in cut.policies:
            decision = self.bounds.decision(shape, policy, pipelining, starts)
            memory = self._memory(decision, ranked, live, until_over=True)
            if not ranked.over_bytes(memory):
                fitting.append((policy, memory))
        if not fitting and self._may_offload and self.request.recomputes_what_memory_asks_for(recompute):
            return self._out_of_core(cut, ranked, live)
        if not fitting:
            return None
        kept = tuple(sorted(self.request.kept_units or ()))
        if self.request.recomputes_what_memory_asks_for(recompute):
            policy = fitting[0][0]
            decision = self.bounds.decision(shape, policy, pipelining, starts)
            ranked, kept, memory = as_few_as_memory_asks_for(
                decision, ranked, live, self.request_of(decision), self._memory, may_offload=self._may_offload
            )
            fitting = [(policy, memory)]
        least = self.cut_bounds.least_s(shape, [policy for policy, _ in fitting], pipelining, starts, ranked)
        return Draft(shape, pipelining, starts, tuple(fitting), max(cut.bound_s, least), ranked, kept)

    def _out_of_core(self, cut: Cut, ranked: RankTables, live: Sequence[int]) -> Draft | None:
        """A cut that does not fit with all units recomputed, with units offloaded that are never recomputed."""
        for policy in cut.policies:
            decision = self.bounds.decision(cut.shape, policy, cut.pipelining, cut.starts)
            found = labelled(decision, ranked, live, self._memory, None)
            if found is not None:
                tables, kept, memory = found
                least = self.cut_bounds.least_s(cut.shape, [policy], cut.pipelining, cut.starts, tables)
                fitting = ((policy, memory),)
                return Draft(cut.shape, cut.pipelining, cut.starts, fitting, max(cut.bound_s, least), tables, kept)
        return None

    def is_needless(self, cut: Cut) -> bool:
        """Whether a cut would recompute what memory asks for, and it asks for nothing."""
        if not self.request.recomputes_what_memory_asks_for(cut.policies[0].recompute):
            return False
        shape, pipelining = cut.shape, cut.pipelining
        ranks = shape.degrees[0]
        live = live_microbatches(pipelining.schedule, ranks, shape.microbatches, pipelining.virtual_stages)
        return self._fits_whole(shape, cut.policies[0], pipelining, live)

    def _fits_whole(self, shape: Shape, policy: Policy, pipelining: Pipelining, live: Sequence[int]) -> bool:
        """Whether everything fits without recompute: then the choice without recompute already exists."""
        whole = self.bounds.ranked(shape, "none")
        placement = placement_of(pipelining.schedule, shape.degrees[0], pipelining.virtual_stages)
        if self.request.stage_starts is not None or len(placement) > whole.units:
            return False
        decision = self.bounds.decision(shape, policy, pipelining, whole.free_cut(placement))
        memory = whole.memory(decision.stage_starts, placement, live, self.request_of(decision))
        return not whole.over_bytes(memory) and not whole.over_bytes(self._memory(decision, whole, live))

    @property
    def _may_offload(self) -> bool:
        return bool(self.request.offload)

    def by_policy(self, draft: Draft) -> list[Draft]:
        """A draft under each of its policies by itself, with the bound of its own time."""
        starts, ranked = draft.starts, draft.tables
        placement = placement_of(draft.pipelining.schedule, ranked.ranks, draft.pipelining.virtual_stages)
        decisions = [self._decided(draft, policy) for policy, _ in draft.policies]
        pipeline_s = least_pipeline_s(draft.shape, draft.pipelining, starts, ranked)
        bounds = self.step.least_steps_s(decisions, ranked, starts, placement, pipeline_s)
        return [
            replace(draft, policies=(own,), bound_s=max(draft.bound_s, bound_s * SAFE))
            for own, bound_s in zip(draft.policies, bounds, strict=True)
        ]

    def timed(self, draft: Draft) -> Timed:
        """A draft of one policy with its pipeline simulated."""
        ((policy, memory),) = draft.policies
        decision, ranked, pipelining = self._decided(draft, policy), draft.tables, draft.pipelining
        placement = placement_of(pipelining.schedule, ranked.ranks, pipelining.virtual_stages)
        pipeline = self.cut_bounds.pipeline(decision, self.step.stage_costs(decision, ranked, placement))
        return Timed(decision, ranked, self.step.predicted(decision, ranked, memory, placement, pipeline))

    def _decided(self, draft: Draft, policy: Policy) -> Decision:
        table = draft.tables.tables[0]
        return replace(
            self.bounds.decision(draft.shape, policy, draft.pipelining, draft.starts),
            kept_units=draft.kept_units,
            offloaded_units=tuple(sorted(table.offloaded)),
            other_recompute=table.other_recompute,
            other_units=tuple(sorted(table.others)),
        )

    def finished(self, timed: Timed) -> Scored:
        """A timed choice with its memory counted rank by rank."""
        decision, predicted = timed.decision, timed.predicted
        memory = by_stage(decision, timed.tables, predicted.memory_by_stage_rank, self.request_of(decision))
        return Scored(decision, timed.tables, replace(predicted, memory_by_stage_rank=memory), 0)

    def scored(self, cut: Cut) -> Scored | None:
        """A cut under its only policy; None where it does not fit, or needs no recomputing after all."""
        draft = self.draft(cut)
        return None if draft is None else self.finished(self.timed(draft))

    def mixed(self, choice: Scored, mode: Recompute, other: Recompute, kept: tuple[int, ...]) -> Scored | None:
        """A choice with all units computed again in a ``mode``, but for those that are ``kept`` and as many in another
        mode as have room. None where that does not fit, or takes no less time."""
        cut = self.as_cut(choice)
        shape, pipelining, starts = cut.shape, cut.pipelining, cut.starts
        policy = replace(cut.policies[0], recompute=mode)
        ranked = self.bounds.ranked(shape, mode)
        ranked = ranked.keeping(kept) if kept else ranked
        decision = self.bounds.decision(shape, policy, pipelining, starts)
        live = live_microbatches(pipelining.schedule, ranked.ranks, shape.microbatches, pipelining.virtual_stages)
        below_s = choice.tables.slowest_s(starts, decision.stage_ranks) * (1 - SAME)
        found = as_many_in_another_mode(decision, ranked, live, self._memory, other, below_s)
        if found is None:
            return None
        tables, memory = found
        units = tuple(sorted(tables.tables[0].kept))
        made = self.finished(self.timed(Draft(shape, pipelining, starts, ((policy, memory),), 0.0, tables, units)))
        return made if made.predicted.step_time_s < choice.predicted.step_time_s * (1 - SAME) else None

    def as_cut(self, choice: Cut | Draft | Timed | Scored) -> Cut:
        """What a choice is of, with its cut, before there is a bound of its time."""
        if isinstance(choice, Cut):
            return choice
        if isinstance(choice, Draft):
            policies = tuple(policy for policy, _ in choice.policies)
            return Cut(choice.shape, choice.pipelining, policies, choice.starts, choice.bound_s)
        d = choice.decision
        shape = Shape(d.mesh, d.placement_order, d.microbatch, d.microbatches)
        return Cut(shape, Pipelining(d.schedule, d.virtual_stages), (_policy_of(d),), d.stage_starts, 0.0)

    def without_limit(self, shape: Shape, policy: Policy, pipelining: Pipelining) -> Scored | None:
        """The choice with the cut that memory does not bind, with the bytes that it lacks and a bound of its time; None
        where there are fewer units than stages."""
        ranked = self.bounds.ranked(shape, policy.recompute)
        placement = placement_of(pipelining.schedule, ranked.ranks, pipelining.virtual_stages)
        live = live_microbatches(pipelining.schedule, ranked.ranks, shape.microbatches, pipelining.virtual_stages)
        starts = self._starts(shape, policy, pipelining, placement, live, ranked, fit=False)
        if starts is None:
            return None
        kept = tuple(sorted(self.request.kept_units or ()))
        decision = self._decided(Draft(shape, pipelining, starts, (), 0.0, ranked, kept), policy)
        request = self.request_of(decision)
        memory = by_stage(decision, ranked, ranked.memory(starts, placement, live, request), request)
        memory = less_apart(decision, ranked, memory, request)
        least_s = least_pipeline_s(shape, pipelining, starts, ranked)
        known = None if least_s is None else Pipeline(least_s, (least_s,) * ranked.ranks)
        predicted = self.step.predicted(decision, ranked, memory, placement, known)
        return Scored(decision, ranked, predicted, ranked.over_bytes(memory))

    def keeping(self, scored: Scored, kept: tuple[int, ...]) -> Scored:
        """A choice of `without_limit` with some units kept that would be computed again."""
        tables = scored.tables.keeping(kept)
        decision = replace(scored.decision, kept_units=kept)
        live = live_microbatches(decision.schedule, decision.pp, decision.microbatches, decision.virtual_stages)
        memory = self._memory(decision, tables, live)
        predicted = replace(scored.predicted, memory_by_stage_rank=memory)
        return Scored(decision, tables, predicted, tables.over_bytes(memory))

    def _starts(
        self,
        shape: Shape,
        policy: Policy,
        pipelining: Pipelining,
        placement: Sequence[int],
        live: Sequence[int],
        ranked: RankTables,
        *,
        fit: bool,
    ) -> tuple[int, ...] | None:
        given = self.request.stage_starts
        if given is not None:
            require_starts(given, len(placement), ranked.units)
            return tuple(given)
        if not fit and self.request.partitioner == DEFAULT:
            return ranked.free_cut(tuple(placement))
        whole_below, bucket = self.bounds.whole_below_bytes(shape, policy), self.bounds.bucket_bytes(shape, policy)
        sizes = len(placement), shape.degrees[1], shape.microbatches
        under_way = self._under_way(pipelining, shape.degrees[0], shape.microbatches)
        request = self.bounds.memory_request(policy, *sizes, whole_below, bucket, under_way)
        if self.request.partitioner == DEFAULT:
            found = ranked.cut(placement, live, request)
            return None if found is None else tuple(found)
        key = (shape, policy, fit, tuple(placement), tuple(live))
        if key not in self._cuts:
            tables = ranked if fit else ranked.with_limit(1 << 62)
            units, tasks = partition_input(
                self.tables.folded,
                self.tables.counter,
                ranked.tables[-1],
                self.tables.device,
                shape.microbatch,
                replace(request, limit_bytes=min(tables.limits_bytes)),
            )
            counts = [live[rank] for rank in placement]
            weight = MEMORY_WEIGHT if self.request.memory_weight is None else self.request.memory_weight
            self._cuts[key] = cut_units(self.request.partitioner, units, tasks, counts, weight)
        return self._cuts[key]

    # Times -------------------------------------------------------------------------------------------------------

    def with_peaks(self, scored: Scored) -> Scored:
        """The same choice with its memory less what never exists at once."""
        decision, memory = scored.decision, scored.predicted.memory_by_stage_rank
        memory = less_apart(decision, scored.tables, memory, self.request_of(decision))
        return replace(scored, predicted=replace(scored.predicted, memory_by_stage_rank=memory))

    def generated(self, scored: Scored) -> Scored | None:
        """The same choice with a schedule generated for its stages, within the memory that the rest leaves; None where
        there is no such schedule."""
        decision, ranked = scored.decision, scored.tables
        costs = ranked.stage_costs(decision.stage_starts, decision.stage_ranks)
        # Copies of gradients exist when activations are gone, so they are counted for the schedule that is made.
        buffers = ranked.buffers(decision.stage_starts, decision.stage_ranks, self.request_of(decision))
        room = [
            max(0, limit - beside - sum(use.classes[name] for name in STAYING))
            for limit, use, beside in zip(
                ranked.limits_bytes, scored.predicted.memory_by_stage_rank, buffers, strict=True
            )
        ]
        try:
            schedule = Schedule.build(
                AUTO,
                ranks=decision.pp,
                microbatches=decision.microbatches,
                virtual_stages=decision.virtual_stages,
                costs=costs,
                memory_limit_bytes=room,
            )
        except ScheduleError:
            return None
        rows = tuple(",".join(action.text for action in order) for order in schedule.table)
        made = replace(decision, schedule=AUTO, generated=rows)
        costs = ranked.stage_costs(made.stage_starts, schedule.placement)
        sizes = ranked.passed_on_bytes(made.stage_starts, schedule.placement)
        live = [peak_live(order, *sizes) for order in schedule.table]
        memory = scored.predicted.memory_by_stage_rank
        memory = with_activations(made, ranked, memory, live, self.request_of(made))
        predicted = self.step.predicted(made, ranked, memory, schedule.placement)
        found = self.with_peaks(Scored(made, ranked, predicted, 0))
        return None if ranked.over_bytes(found.predicted.memory_by_stage_rank) else found


def _policy_of(decision: Decision) -> Policy:
    d = decision
    residency = d.gathered_stages, d.look_ahead, d.reduce_after
    return Policy(d.recompute, d.shard, d.shard_group, *residency, d.offload_states)
