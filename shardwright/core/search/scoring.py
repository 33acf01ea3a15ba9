"""What a choice costs: a bound that takes microseconds, a cut with its memory, a simulated pipeline."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.core.cluster import Cluster
from shardwright.core.cost_tables import CostTables, Place
from shardwright.core.cutting import partition_input
from shardwright.core.decision import Decision, placement_of
from shardwright.core.errors import ScheduleError
from shardwright.core.links import Links
from shardwright.core.memory import MemoryUse, Recompute, live_microbatches
from shardwright.core.partition.partitioners import DEFAULT, cut_units
from shardwright.core.plan import Predicted
from shardwright.core.predict import StepModel, least_makespan_s, simulated_makespan_s
from shardwright.core.rank_tables import RankTables
from shardwright.core.request import VIRTUAL_STAGES, Request
from shardwright.core.schedule import AUTO, Schedule
from shardwright.core.schedule.live import peak_live
from shardwright.core.search.peaks import by_stage, is_long, less_apart, with_activations
from shardwright.core.search.space import RECOMPUTES, Pipelining, Policy, Shape, require_starts, splits_backward
from shardwright.core.stages import MemoryRequest, UnitTable

MOST_GIVEN_UP = 3
"""Of every stage's kept units, how many may give their memory to what is on its way to the host or back."""
SAFE = 1 - 1e-9
"""Bounds are lowered by this much, so that rounding never puts one above what it bounds."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A choice with its cut. ``over_bytes`` is what its fullest rank lacks (0 when it fits)."""

    decision: Decision
    tables: RankTables
    predicted: Predicted
    over_bytes: int
    exact: bool
    """Whether its pipeline was simulated; else its time is a bound that it does not get below."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A cut that memory did not bind, and the policies under which it fits: they share one pipeline."""

    shape: Shape
    pipelining: Pipelining
    starts: tuple[int, ...]
    policies: tuple[tuple[Policy, tuple[MemoryUse, ...]], ...]
    bound_s: float
    tables: RankTables
    kept_units: tuple[int, ...]


class Scorer:
    """Scores choices for one model on one cluster. Holds what all of them share."""

    def __init__(self, tables: CostTables, cluster: Cluster, request: Request) -> None:
        self.tables, self.cluster, self.request = tables, cluster, request
        self.links = Links(cluster)
        self.step = StepModel(self.links, tables.precision)
        self._ranked: dict[tuple[object, ...], RankTables] = {}
        self._firsts: dict[tuple[object, ...], UnitTable] = {}
        self._plain: dict[tuple[Shape, Policy], Decision] = {}
        self._fluid: dict[tuple[int, int], float] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...] | None] = {}

    def ranked(self, shape: Shape, recompute: Recompute) -> RankTables:
        """What units cost on every pipeline rank."""
        key = (shape.mesh, shape.microbatch, recompute)
        if key not in self._ranked:
            tp = shape.mesh.axis_size("tp")
            found = []
            for places in self.links.places(shape.mesh):
                kinds = [self.tables.table(tp, shape.microbatch, recompute, place) for place in places]
                # Replicas on unlike devices wait for the slowest.
                found.append(kinds[0] if len(kinds) == 1 else max(kinds, key=lambda table: float(table.seconds.sum())))
            limits = tuple(self.links.memory_bytes(shape.mesh, pp) for pp in range(len(found)))
            self._ranked[key] = RankTables(tuple(found), limits)
        return self._ranked[key]

    def memory_request(self, policy: Policy, dp: int) -> MemoryRequest:
        """What decides the bytes of a parameter under a policy."""
        ways = policy.shard_group or dp
        request = self.request
        travels = dp > 1 and policy.shard < 2
        return MemoryRequest(
            0,
            self.tables.precision,
            request.optimizer,
            policy.shard,
            ways,
            request.gradient_precision,
            self.tables.graph.capabilities.bucket_bytes if travels else 0,
        )

    def _request_of(self, decision: Decision) -> MemoryRequest:
        return self.memory_request(_policy(decision), decision.dp)

    @property
    def _when_made(self) -> bool:
        return self.tables.graph.capabilities.gradients_when_made

    def _memory(self, decision: Decision, ranked: RankTables, live: Sequence[int]) -> tuple[MemoryUse, ...]:
        """What the ranks hold, as counted for cuts; as a plan says it where that does not settle whether it fits."""
        request = self._request_of(decision)
        memory = most = ranked.memory(decision.stage_starts, decision.stage_ranks, live, request)
        if request.bucket_bytes and decision.virtual_stages > 1:
            # Gradients of one stage leave in copies while others are under way: all of them beside the rest at most.
            most = tuple(replace(use, buffers_bytes=use.buffers_bytes + use.gradients_bytes) for use in memory)
        if not ranked.over_bytes(most):
            return memory
        memory = by_stage(decision, ranked, memory, request)
        if is_long(decision) and ranked.over_bytes(
            by_stage(decision, ranked, memory, replace(request, bucket_bytes=0))
        ):
            return memory  # too much before any copies
        return less_apart(decision, ranked, memory, request, self._when_made)

    # Bounds ------------------------------------------------------------------------------------------------------

    def shape_bound_s(self, shape: Shape) -> float:
        """Seconds below which no step gets with these degrees and this microbatch, whatever is kept in memory."""
        recompute = next(mode for mode in RECOMPUTES if self.request.recompute in ("auto", mode))
        return self._fluid_s(shape, recompute) * shape.microbatches * SAFE

    def bound_s(
        self, shape: Shape, policies: Sequence[Policy], virtual_stages: int = 0, *, split: bool = True
    ) -> float:
        """The same under the best of some policies of one kind of recompute; infinity where none has room.

        With ``virtual_stages`` of 1 the first microbatch must come through the ranks before a rank, and the last one
        back: over all cuts the least of the slowest rank has a closed form. 0: any number of stages.
        """
        recompute = policies[0].recompute
        if recompute == "full" and self.request.recompute == "auto":
            recompute = "none"  # any number of units may be kept
        pipeline = self._fluid_s(shape, recompute) * shape.microbatches
        if virtual_stages == 1:
            pipeline = max(pipeline, self._filled_s(shape, recompute, split=split))
        pp = shape.mesh.axis_size("pp")
        elements = float(self._first(shape, recompute).range_elements[0, -1]) / pp
        least = math.inf
        for policy in policies:
            if self._may_fit(shape, policy):
                decision = self._undivided(shape, policy)
                least = min(least, self.step.least_tail_s(shape.mesh, decision, elements, pipeline))
        return (pipeline + least) * SAFE

    def _may_fit(self, shape: Shape, policy: Policy) -> bool:
        """Whether all ranks together have room for the parameters and one microbatch's activations."""
        pp = shape.mesh.axis_size("pp")
        table = self._first(shape, policy.recompute)
        state = self._least_state(shape, policy, self.request.stages_per_rank or max(VIRTUAL_STAGES))
        held = state * float(table.range_elements[0, -1]) + float(table.range_kept[0, -1])
        if self.cluster.is_uniform:
            return held <= pp * self.cluster.memory_bytes(0)
        return held <= sum(self.ranked(shape, policy.recompute).limits_bytes)

    def _least_state(self, shape: Shape, policy: Policy, virtual_stages: int) -> float:
        """Bytes below which no parameter with its gradient and states gets beside activations: without the gradient
        where a step is so short that these may be gone when it is made."""
        pp, dp, _ = shape.degrees
        request = self.memory_request(policy, dp)
        may_be_apart = self._when_made and policy.shard < 2 and shape.microbatches <= 2 * pp * virtual_stages
        return request.state_bytes_per_element - (request.gradient_width if may_be_apart else 0)

    def _filled_s(self, shape: Shape, recompute: Recompute, *, split: bool) -> float:
        """Seconds below which no pipeline of one stage per rank gets, filling and draining included."""
        pp, m = shape.mesh.axis_size("pp"), shape.microbatches
        if pp == 1 or not self.cluster.is_uniform:
            return 0.0
        table = self._first(shape, recompute)
        whole = float(table.seconds.sum())
        # Of what lies before a rank it waits for the forward, and where backwards are whole for the backward too.
        share = 1.0
        if split:
            pairs = zip(table.units, table.seconds.tolist(), strict=True)
            share = min((u.forward_s / total for u, total in pairs if total > 0), default=1.0)
        if not 0 < share <= m:
            return 0.0
        # For every rank: share · (work before it) + m · (own work) ≤ T, so that all ranks together do at most
        # T / share · (1 - (1 - share / m)^pp).
        return whole * share / (1 - (1 - share / m) ** pp)

    def _first(self, shape: Shape, recompute: Recompute) -> UnitTable:
        """What units cost on the first rank, messages left out."""
        key = (shape.mesh, shape.microbatch, recompute)
        if key not in self._firsts:
            pp, _, tp = shape.degrees
            place = Place(self.cluster.device(0), self.links.axis(shape.mesh, 0, "tp"), None, pp > 1)
            self._firsts[key] = self.tables.table(tp, shape.microbatch, recompute, place)
        return self._firsts[key]

    def _fluid_s(self, shape: Shape, recompute: Recompute) -> float:
        """Seconds of one microbatch if units could be divided at will over the ranks, each as fast as its device."""
        first = self._first(shape, recompute)
        if self.cluster.is_uniform:
            pp = shape.mesh.axis_size("pp")
            key = (id(first), pp)
            if key not in self._fluid:
                alike = Counter(map(id, first.units))
                # Units that are alike are whole: one rank has at least its share of them, rounded up.
                whole = [-(-alike[id(u)] // pp) * s for u, s in zip(first.units, first.seconds.tolist(), strict=True)]
                self._fluid[key] = max(float(first.seconds.sum()) / pp, *whole)
            return self._fluid[key]
        base = first.seconds.tolist()
        rates = 0.0
        for table in self.ranked(shape, recompute).tables:
            ratios = [mine / other for mine, other in zip(table.seconds.tolist(), base, strict=True) if other > 0]
            rates += 1 / min(ratios, default=1.0)
        return float(sum(base)) / rates

    # Cuts --------------------------------------------------------------------------------------------------------

    def draft(
        self, shape: Shape, policies: Sequence[Policy], pipelining: Pipelining
    ) -> tuple[Draft | None, list[Policy]]:
        """The cut that memory does not bind, with the policies under which it fits; and those that may have room for
        another cut alone."""
        recompute = policies[0].recompute
        ranked = self.ranked(shape, recompute)
        pp, _, _ = shape.degrees
        name, virtual = pipelining.schedule, pipelining.virtual_stages
        placement = placement_of(name, pp, virtual)
        live = live_microbatches(name, pp, shape.microbatches, virtual)
        if (
            recompute == "full"
            and self.request.recompute == "auto"
            and self._fits_whole(shape, policies[0], pipelining, live)
        ):
            return None, []
        roomy = [p for p in policies if ranked.has_room(live, virtual, self._least_state(shape, p, virtual))]
        starts = self._starts(shape, policies[0], placement, live, ranked, fit=False) if roomy else None
        if starts is None:
            return None, []
        fitting, tight = [], []
        for policy in roomy:
            memory = self._memory(self.decision(shape, policy, pipelining, starts), ranked, live)
            if not ranked.over_bytes(memory):
                fitting.append((policy, memory))
            elif self.request.stage_starts is None:
                tight.append(policy)
        if not fitting:
            return None, tight
        kept: tuple[int, ...] = ()
        if recompute == "full" and self.request.recompute == "auto":
            policy = fitting[0][0]
            ranked, kept, memory = self._keeping(self.decision(shape, policy, pipelining, starts), ranked, live)
            fitting = [(policy, memory)]
        costs = ranked.stage_costs(starts, placement)
        split = splits_backward(name, virtual)
        pipeline = least_makespan_s(costs, placement, shape.microbatches, splits_backward=split) if pp > 1 else None
        decisions = [self._undivided(shape, policy) for policy, _ in fitting]
        ranks, tied = ranked.work(starts, placement), ranked.tied(starts, placement)
        least = min(self.step.steps_s(decisions, ranks, tied, pipeline)) * SAFE
        return Draft(shape, pipelining, starts, tuple(fitting), least, ranked, kept), tight

    def _fits_whole(self, shape: Shape, policy: Policy, pipelining: Pipelining, live: Sequence[int]) -> bool:
        """Whether nothing need be recomputed at all: then the choice without recompute is there already."""
        whole = self.ranked(shape, "none")
        placement = placement_of(pipelining.schedule, shape.mesh.axis_size("pp"), pipelining.virtual_stages)
        if self.request.stage_starts is not None or len(placement) > whole.units:
            return False
        decision = self.decision(shape, policy, pipelining, whole.free_cut(placement))
        memory = whole.memory(decision.stage_starts, placement, live, self._request_of(decision))
        return not whole.over_bytes(memory) and not whole.over_bytes(self._memory(decision, whole, live))

    def _keeping(
        self, decision: Decision, ranked: RankTables, live: Sequence[int]
    ) -> tuple[RankTables, tuple[int, ...], tuple[MemoryUse, ...]]:
        """What fits with every unit recomputed, with as many kept as fit, and its memory."""
        starts, placement = decision.stage_starts, decision.stage_ranks
        kept = ranked.kept_units(starts, placement, live, self._request_of(decision))
        while True:
            keeping = ranked.keeping(kept) if kept else ranked
            memory = self._memory(decision, keeping, live)
            left = keeping.kept_but_one(kept, starts, placement, memory)
            if left == kept:
                break
            kept = left
        if self._may_offload:
            return self._offloading(decision, keeping, live, kept, memory)
        return keeping, kept, memory

    @property
    def _may_offload(self) -> bool:
        able = all(runtime.offload for runtime in self.request.runtimes or (self.tables.graph.capabilities,))
        return able if self.request.offload is None else self.request.offload

    def _offloading(
        self,
        decision: Decision,
        keeping: RankTables,
        live: Sequence[int],
        kept: tuple[int, ...],
        memory: tuple[MemoryUse, ...],
    ) -> tuple[RankTables, tuple[int, ...], tuple[MemoryUse, ...]]:
        """The same with some units offloaded, where that is faster and fits: what is on its way takes memory, for which
        units that would be kept may have to go."""
        starts, placement = decision.stage_starts, decision.stage_ranks
        best = keeping, kept, memory
        least = max(work.seconds for work in keeping.work(starts, placement))
        ends = keeping.ends(starts)
        for fewer in range(MOST_GIVEN_UP + 1):
            left = tuple(unit for a, b in ends for unit in [u for u in kept if a <= u < b][fewer:])
            away = keeping.keeping(left).offloaded_units(starts, placement)
            while away:
                tried = keeping.keeping(left, away)
                use = self._memory(decision, tried, live)
                if not tried.over_bytes(use):
                    seconds = max(work.seconds for work in tried.work(starts, placement))
                    if seconds < least * (1 - 1e-9):
                        best, least = (tried, left, use), seconds
                    break
                # One less of every stage.
                away = tuple(u for a, b in ends for u in [v for v in away if a <= v < b][:-1])
        return best

    def finished(self, draft: Draft) -> Scored:
        """A draft with its pipeline simulated, under the best of its policies (the first, which saves least, of
        equals)."""
        shape, pipelining, starts = draft.shape, draft.pipelining, draft.starts
        pp = shape.mesh.axis_size("pp")
        ranked = draft.tables
        placement = placement_of(pipelining.schedule, pp, pipelining.virtual_stages)
        pipeline: float | None = None
        if pp > 1:
            decision = self.decision(shape, draft.policies[0][0], pipelining, starts)
            pipeline = simulated_makespan_s(decision, ranked.stage_costs(starts, placement))
        ranks, tied = ranked.work(starts, placement), ranked.tied(starts, placement)
        sharded = [self._undivided(shape, policy) for policy, _ in draft.policies]
        times = [float(f"{seconds:.6g}") for seconds in self.step.steps_s(sharded, ranks, tied, pipeline)]
        policy, memory = draft.policies[times.index(min(times))]
        decision = replace(
            self.decision(shape, policy, pipelining, starts),
            kept_units=draft.kept_units,
            offloaded_units=tuple(sorted(ranked.tables[0].offloaded)),
        )
        memory = by_stage(decision, ranked, memory, self._request_of(decision))
        predicted = self.step.predicted(decision, ranked, memory, pipeline, placement)
        return Scored(decision, ranked, predicted, 0, exact=True)

    def cut(self, shape: Shape, policy: Policy, pipelining: Pipelining, *, fit: bool = True) -> Scored | None:
        """The choice with its cut, its memory and a bound of its time (exact where there is one stage); None where no
        cut fits, or, without ``fit``, where there are fewer units than stages."""
        ranked = self.ranked(shape, policy.recompute)
        pp, _, _ = shape.degrees
        name, virtual = pipelining.schedule, pipelining.virtual_stages
        placement = placement_of(name, pp, virtual)
        live = live_microbatches(name, pp, shape.microbatches, virtual)
        starts = self._starts(shape, policy, placement, live, ranked, fit=fit)
        if starts is None:
            return None
        decision = self.decision(shape, policy, pipelining, starts)
        memory = self._memory(decision, ranked, live)
        over = ranked.over_bytes(memory)
        if over and fit:
            return None
        if fit and policy.recompute == "full" and self.request.recompute == "auto":
            ranked, kept, memory = self._keeping(decision, ranked, live)
            away = tuple(sorted(ranked.tables[0].offloaded))
            decision = replace(decision, kept_units=kept, offloaded_units=away)
        costs = ranked.stage_costs(starts, placement)
        split = splits_backward(name, virtual)
        pipeline = least_makespan_s(costs, placement, shape.microbatches, splits_backward=split) if pp > 1 else None
        predicted = self.step.predicted(decision, ranked, memory, pipeline, placement)
        return Scored(decision, ranked, predicted, over, exact=pp == 1)

    def _starts(
        self,
        shape: Shape,
        policy: Policy,
        placement: Sequence[int],
        live: Sequence[int],
        ranked: RankTables,
        *,
        fit: bool,
    ) -> tuple[int, ...] | None:
        given = self.request.stage_starts
        if given is not None:
            require_starts(given, len(placement), ranked.units)
            return given
        tables = ranked if fit else ranked.with_limit(1 << 62)
        request = self.memory_request(policy, shape.mesh.axis_size("dp"))
        if self.request.partitioner == DEFAULT:
            found = tables.cut(placement, live, request) if fit else ranked.free_cut(tuple(placement))
            return None if found is None else tuple(found)
        key = (shape, policy if fit else policy.recompute, tuple(placement), tuple(live))
        if key not in self._cuts:
            units, tasks = partition_input(
                self.tables.folded,
                self.tables.counter,
                ranked.tables[-1],
                self.tables.device,
                shape.microbatch,
                replace(request, limit_bytes=min(tables.limits_bytes)),
            )
            counts = [live[rank] for rank in placement]
            self._cuts[key] = cut_units(self.request.partitioner, units, tasks, counts)
        return self._cuts[key]

    # Times -------------------------------------------------------------------------------------------------------

    def simulated(self, scored: Scored) -> Scored:
        """The same with its pipeline simulated."""
        if scored.exact:
            return scored
        decision, ranked = scored.decision, scored.tables
        placement = decision.stage_ranks
        pipeline = simulated_makespan_s(decision, ranked.stage_costs(decision.stage_starts, placement))
        memory = by_stage(decision, ranked, scored.predicted.memory_by_stage_rank, self._request_of(decision))
        predicted = self.step.predicted(decision, ranked, memory, pipeline, placement)
        return replace(scored, predicted=predicted, exact=True)

    def with_peaks(self, scored: Scored) -> Scored:
        """The same with its memory less what is never there at once."""
        decision, memory = scored.decision, scored.predicted.memory_by_stage_rank
        memory = less_apart(decision, scored.tables, memory, self._request_of(decision), self._when_made)
        return replace(scored, predicted=replace(scored.predicted, memory_by_stage_rank=memory))

    def generated(self, scored: Scored) -> Scored | None:
        """The same with a schedule generated for its stages, within the memory that the rest leaves; None where there
        is none."""
        decision, ranked = scored.decision, scored.tables
        costs = ranked.stage_costs(decision.stage_starts, decision.stage_ranks)
        # Copies of gradients that travel are there when activations are gone: they are counted of what is made.
        beside = ranked.buffers(decision.stage_starts, decision.stage_ranks)
        room = [
            max(0, limit - (use.parameters_bytes + use.gradients_bytes + use.optimizer_bytes + size))
            for limit, use, size in zip(ranked.limits_bytes, scored.predicted.memory_by_stage_rank, beside, strict=True)
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
        live = [peak_live(order, costs.activation_bytes) for order in schedule.table]
        memory = scored.predicted.memory_by_stage_rank
        memory = with_activations(made, ranked, memory, live, self._request_of(made))
        pipeline = simulated_makespan_s(made, costs)
        predicted = self.step.predicted(made, ranked, memory, pipeline, schedule.placement)
        found = self.with_peaks(Scored(made, ranked, predicted, 0, exact=True))
        return None if ranked.over_bytes(found.predicted.memory_by_stage_rank) else found

    def _undivided(self, shape: Shape, policy: Policy) -> Decision:
        """Degrees and policy as a decision, before there is a cut: what the end of a step depends on."""
        key = (shape, policy)
        if key not in self._plain:
            self._plain[key] = self.decision(shape, policy, Pipelining("1f1b", 1), ())
        return self._plain[key]

    def decision(self, shape: Shape, policy: Policy, pipelining: Pipelining, starts: Sequence[int]) -> Decision:
        """The choice as a plan has it; with no ``starts``, for what depends on degrees and policy alone."""
        request = self.request
        pp, dp, tp = shape.degrees
        return Decision(
            pp=pp,
            dp=dp,
            tp=tp,
            batch=request.batch,
            microbatch=shape.microbatch,
            schedule=pipelining.schedule,
            stage_starts=tuple(starts) or tuple(range(pp * pipelining.virtual_stages)),
            layouts=self.tables.layouts(tp) if starts else (),
            virtual_stages=pipelining.virtual_stages,
            recompute=policy.recompute,
            shard=policy.shard,
            shard_group=policy.shard_group,
            precision=self.tables.precision,
            optimizer=request.optimizer,
            loss_scope=request.loss_scope,
            sequence_parallel=self.tables.sequence_parallel(tp),
            gradient_precision=request.gradient_precision,
            placement_order=shape.order,
        )


def _policy(decision: Decision) -> Policy:
    return Policy(decision.recompute, decision.shard, decision.shard_group)
