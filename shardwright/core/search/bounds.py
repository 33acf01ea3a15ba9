"""Bounds of choices, each computed in microseconds: the time that no step gets below, known before there is a cut."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.errors import PlanError
from shardwright.core.plan.decision import Decision
from shardwright.core.schedule.messages_under_way import UnderWay
from shardwright.core.search.exchanges import Held
from shardwright.core.search.forced_recompute import Forced, Way, forced
from shardwright.core.search.least_pipeline import least_of_any_stages, least_of_one_stage_each
from shardwright.core.search.options import VIRTUAL_STAGES
from shardwright.core.search.predict import LeastEnds, StepModel, of_units
from shardwright.core.search.request import Request
from shardwright.core.search.space import Pipelining, Policy, Shape
from shardwright.core.tables.cost_tables import CostTables, Place, is_one_stage
from shardwright.core.tables.memory import require_recomputable
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.mesh_links import Links
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.tables.unit_table import UnitTable
from shardwright.core.values.found_once import found_once
from shardwright.core.values.recompute_modes import Recompute

LATENCY_SHARE = 0.05
"""The share of a bucket's time that may be latency."""
FEW_MICROBATCHES = 8
"""The number of microbatches up to which pipelines are cut anew (`core.search.polish`)."""
SMALL_SHARE = 16
"""The part of the largest unit's parameters from which on a unit's are gathered for its passes: smaller ones may stay
whole, and add little to what is whole anyway."""
SAFE = 1 - 1e-9
"""The factor that lowers bounds, so that rounding never puts one above what it bounds."""


class Bounds:
    """The unit costs of every choice on one cluster, and the bounds that follow without a cut, for one search."""

    def __init__(self, tables: CostTables, cluster: Cluster, request: Request) -> None:
        self.tables, self.cluster, self.request = tables, cluster, request
        self.links = Links(cluster)
        self.step = StepModel(self.links, tables.precision, tables.execution)
        self._ranked: dict[tuple[object, ...], RankTables] = {}
        self._alike: dict[tuple[object, ...], RankTables] = {}
        self._fluid: dict[tuple[int, int], float] = {}
        self._of_whole_units: dict[tuple[int, int, int, bool, bool], float] = {}
        self._known_forced: dict[object, Forced] = {}
        self._foreseen: tuple[Shape, Policy, dict[tuple[int, tuple[int, ...]], Forced]] | None = None

    def ranked(self, shape: Shape, recompute: Recompute) -> RankTables:
        """The unit costs on every pipeline rank."""
        key = (shape.mesh, shape.microbatch, recompute)
        if key not in self._ranked:
            pp, _, tp = shape.degrees
            is_whole, found = is_one_stage(pp, recompute), []
            for places in self.links.places(shape.mesh):
                kinds = [
                    self.tables.table(tp, shape.microbatch, recompute, place, is_whole=is_whole) for place in places
                ]
                # Replicas on unlike devices wait for the slowest.
                found.append(kinds[0] if len(kinds) == 1 else max(kinds, key=lambda table: float(table.seconds.sum())))
            limits = tuple(self._limit_bytes(self.links.memory_bytes(shape.mesh, rank)) for rank in range(len(found)))
            # Meshes whose ranks cost the same have the same cuts.
            lent = self._idle_lent(shape, found)
            ranked = RankTables(tuple(found), limits, lent)
            unlinked = tuple(table.unlinked or table for table in found)
            if any(table.unlinked is not None for table in found):
                alone = tuple(map(id, unlinked)), limits, "unlinked"
                of_bytes = self._alike.setdefault(alone, RankTables(unlinked, limits))
                ranked = replace(ranked, unlinked=of_bytes)
            if recompute == self.request.recompute and self.request.names_units:
                ranked = self._as_named(ranked)
            self._ranked[key] = self._alike.setdefault((tuple(map(id, found)), limits, lent), ranked)
        return self._ranked[key]

    def _as_named(self, ranked: RankTables) -> RankTables:
        """The tables with the units that are named by number. Raises PlanError for units that the model lacks."""
        names = "kept_units", "offloaded_units", "other_units"
        named: dict[str, tuple[int, ...]] = {name: tuple(getattr(self.request, name) or ()) for name in names}
        if max(itertools.chain(*named.values())) >= ranked.units:
            said = " and ".join(f"{name}={list(units)}" for name, units in named.items() if units)
            raise PlanError(f"{said} name units that the model's {ranked.units} lack")
        kept, away, other = named.values()
        if kept or away:
            ranked = ranked.keeping(kept, away)
        if self.request.other_recompute is not None:
            require_recomputable(other, ranked.tables[0].recomputable)
            ranked = ranked.mixing(self.request.other_recompute, other)
        return ranked

    def _limit_bytes(self, memory_bytes: int) -> int:
        """What a plan may use of a device's memory."""
        return int(memory_bytes * (1 - self.request.left_free))

    def _idle_lent(self, shape: Shape, tables: Sequence[UnitTable]) -> float:
        """The share of the time left by idle ranks that busy ranks of their pipeline get: the least that was measured
        for any unit. 0 where ranks are unlike, or not all on one node."""
        lent = min(table.idle_lent for table in tables)
        return lent if lent and self.links.pipelines_share_nodes(shape.mesh) else 0.0

    @found_once
    def whole_below_bytes(self, shape: Shape, policy: Policy) -> int:
        """The size of a unit's parameters below which they stay whole all through a step: as pinned, or where the
        latency of their gather is longer than its bytes take, and they are small beside the largest unit's."""
        if policy.shard < 3 or policy.gathered_stages is not None or not self._exchanges_as_planned:
            return 0
        if self.request.whole_below_bytes is not None:
            return self.request.whole_below_bytes
        units = self._first(shape, policy.recompute).range_elements.diagonal(1)
        largest = float(units.max()) * PRECISION_BYTES[self.tables.precision]
        kinds = self.links.alike(shape.mesh)
        groups = [self.links.shard_groups(shape.mesh, pp, policy.shard_group)[0] for pp, *_ in kinds]
        return int(min(largest / SMALL_SHARE, *(group.latency_bytes for group in groups)))

    @found_once
    def hierarchical_gathers(self, shape: Shape, policy: Policy) -> bool:
        """Whether shard groups over several nodes gather, and sum, in two stages: as pinned, or where all have the
        stages and a unit of mean size takes less time so than in one ring. Without stages CPUs send every shard to
        every rank by itself, which crosses between nodes as many times as one holds ranks: there stages are taken."""
        if not policy.shard or shape.degrees[1] == 1 or not self._exchanges_as_planned:
            return False
        kinds = self.links.alike(shape.mesh)
        groups = [self.links.shard_groups(shape.mesh, pp, policy.shard_group)[0] for pp, *_ in kinds]
        if self.request.hierarchical_gathers is False or not all(group.has_stages for group in groups):
            return False
        if self.request.hierarchical_gathers or self.cluster.device(0).kind == "cpu":
            return True
        units = self._first(shape, policy.recompute).range_elements.diagonal(1)
        size = float(units.mean()) * PRECISION_BYTES[self.tables.precision]
        return all(group.all_gather_s(size, in_stages=True) < group.all_gather_s(size) for group in groups)

    @cached_property
    def _exchanges_as_planned(self) -> bool:
        """Whether all runtimes gather and sum as a plan says."""
        runtimes = self.request.runtimes or (self.tables.graph.capabilities,)
        return all(runtime.exchanges_as_planned for runtime in runtimes)

    @found_once
    def bucket_bytes(self, shape: Shape, policy: Policy) -> int | None:
        """The size of the buckets in which small whole gradients are summed: as large as the runtime likes, but no
        larger than takes `LATENCY_SHARE` of its time for latency, as what is in the last one is hidden by nothing.
        None where that is not for the plan to say."""
        if shape.degrees[1] == 1 or policy.shard >= 2 or not self._exchanges_as_planned:
            return None
        most = self.tables.graph.memory_traits.bucket_bytes_on(self.cluster.device(0).kind)
        groups = [self.links.axis(shape.mesh, pp, "dp") for pp, *_ in self.links.alike(shape.mesh)]
        enough = max(group.latency_bytes for group in groups) * (1 - LATENCY_SHARE) / LATENCY_SHARE
        return int(min(most, enough))

    @found_once
    def memory_request(
        self, policy: Policy, stages: int, dp: int, microbatches: int, whole_below_bytes: int = 0,
        bucket_bytes: int | None = None, under_way: tuple[UnderWay, ...] = (),
    ) -> MemoryRequest:  # fmt: skip
        """The choices that decide the bytes of a parameter, and of the batch, under a policy."""
        ways = policy.shard_group or dp
        request, traits = self.request, self.tables.graph.memory_traits
        if bucket_bytes is None:
            is_summed = dp > 1 and policy.shard < 2
            bucket_bytes = traits.bucket_bytes_on(self.cluster.device(0).kind) if is_summed else 0
        is_one_program = traits.stages_are_programs and stages == 1
        return MemoryRequest(
            0,
            self.tables.precision,
            request.optimizer,
            policy.shard,
            ways,
            request.gradient_precision or ("fp32" if traits.gradients_in_fp32 else None),
            bucket_bytes,
            microbatches,
            dp > 1,
            traits.gradients_when_made or (is_one_program and microbatches == 1),
            traits.gathers_units,
            traits.stages_are_programs,
            is_one_program,
            self.cluster.device(0).kind == "cpu",
            policy.gathered_stages,
            policy.look_ahead,
            policy.reduce_after != "last",
            whole_below_bytes,
            self.tables.has_frozen_in_fp32,
            on_host=policy.offload_states != "none",
            under_way=under_way,
        )

    @found_once
    def undivided(self, shape: Shape, policy: Policy) -> Decision:
        """A decision of degrees and policy, before there is a cut: the tail of a step depends on nothing else, but for
        how often stages are gathered, here once."""
        if policy.gathered_stages is not None:
            policy = replace(policy, gathered_stages=1, look_ahead=None)
        return self.decision(shape, policy, Pipelining("1f1b", 1), ())

    def sharing(self, shape: Shape, policy: Policy, pipelining: Pipelining) -> Decision:
        """The same, but for how often stages are gathered, which depends on the schedule."""
        if policy.gathered_stages is None:
            return self.undivided(shape, policy)
        return self._decision(shape, policy, pipelining, ())

    def decision(self, shape: Shape, policy: Policy, pipelining: Pipelining, starts: Sequence[int]) -> Decision:
        """The choice as a plan has it; without ``starts``, a decision for what depends on degrees and policy alone."""
        return self._decision(shape, policy, pipelining, tuple(starts))

    @found_once
    def _decision(self, shape: Shape, policy: Policy, pipelining: Pipelining, starts: tuple[int, ...]) -> Decision:
        request = self.request
        pp, dp, tp = shape.degrees
        return Decision.unchecked(
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
            gathered_stages=policy.gathered_stages,
            look_ahead=policy.look_ahead,
            reduce_after=policy.reduce_after,
            offload_states=policy.offload_states,
            precision=self.tables.precision,
            optimizer=request.optimizer,
            loss_scope=request.loss_scope,
            sequence_parallel=self.tables.sequence_parallel(tp),
            gradient_precision=request.gradient_precision,
            placement_order=shape.order,
            hierarchical_gathers=self.hierarchical_gathers(shape, policy),
            whole_below_bytes=self.whole_below_bytes(shape, policy),
            activation_loading_horizon=request.activation_loading_horizon or 1,
            bucket_bytes=self.bucket_bytes(shape, policy),
            fp8_weights=self.tables.fp8_products.slots,
            like=request.like,
        )

    # Bounds ------------------------------------------------------------------------------------------------------

    def shape_bound_s(self, shape: Shape) -> float:
        """Seconds below which no step gets with these degrees and this microbatch, whatever is kept in memory."""
        recompute = self.request.recompute
        if self.request.searches_recompute or self.request.names_units:
            recompute = "none"
        pipeline = max(
            self._fluid_s(shape, recompute) * shape.microbatches, self._passing_s(shape, recompute, split=True)
        )
        pipeline = self._of_whole_units_s(shape, recompute, 0, pipeline, split=True)
        return self._lending_s(shape, recompute, pipeline) * SAFE

    def bound_s(
        self,
        shape: Shape,
        policies: Sequence[Policy],
        virtual_stages: int = 0,
        *,
        split: bool = True,
        live: Sequence[int] | None = None,
        gathered_by: Pipelining | None = None,
    ) -> float:
        """Seconds below which no step gets under some policies of one recompute mode; infinity where none has room.

        With ``virtual_stages`` of 1, the first microbatch must pass the ranks before a rank, and the last one must pass
        back. The least time of the slowest rank over all cuts then has a closed form. With 0, any number of stages is
        allowed. ``live``: the least number of live microbatches of one stage on every rank, None: not known yet. Where
        units are recomputed as memory asks for, no more of them are kept than it has room for. ``gathered_by``: the
        schedule that gathers stages, where it is to be counted how often.
        """
        recompute = policies[0].recompute
        few = self.request.recomputes_what_memory_asks_for(recompute)
        if few or (recompute == self.request.recompute and self.request.names_units):
            recompute = "none"  # any number of units may be kept
        fit = [policy for policy in policies if self.may_fit(shape, policy)]
        if not fit:
            return math.inf
        pipeline = self._least_pipeline_s(shape, recompute, virtual_stages, split=split)
        if live is not None and recompute != policies[0].recompute:
            pipeline = max(pipeline, self._forced_s(shape, policies[0], virtual_stages, live, split=split))
        pipeline = self._lending_s(shape, recompute, pipeline)
        steps = (self._least_ends(shape, policy, recompute, gathered_by).step_s(pipeline) for policy in fit)
        return min(steps) * SAFE

    def least_step_s(self, shape: Shape, policies: Sequence[Policy], pipeline_s: float) -> float:
        """Seconds below which no step gets under some policies of one recompute mode whose pipeline takes at least
        ``pipeline_s``, whichever units they keep."""
        recompute = policies[0].recompute
        some_may_be_kept = self.request.recomputes_what_memory_asks_for(recompute)
        if some_may_be_kept or (recompute == self.request.recompute and self.request.names_units):
            recompute = "none"
        return min(self._least_ends(shape, each, recompute, None).step_s(pipeline_s) for each in policies) * SAFE

    def sliced_bound_s(self, shape: Shape, policy: Policy | None, least_share: float) -> float:
        """Seconds below which no step gets whose sequences go through the pipeline in slices, however short, where all
        slices together take at least a share of the seconds of whole sequences; infinity where nothing has room.
        Without a policy, whatever is kept in memory."""
        recompute = self.request.recompute if policy is None else policy.recompute
        few = policy is not None and self.request.recomputes_what_memory_asks_for(recompute)
        if few or (policy is None and self.request.searches_recompute) or self.request.names_units:
            recompute = "none"
        if policy is not None and not self.may_fit(shape, policy):
            return math.inf
        pipeline = self._lending_s(shape, recompute, self._fluid_s(shape, recompute) * shape.microbatches) * least_share
        if policy is not None:
            pipeline = self._least_ends(shape, policy, recompute, None).step_s(pipeline)
        return pipeline * SAFE

    @found_once
    def _least_pipeline_s(self, shape: Shape, recompute: Recompute, virtual_stages: int, *, split: bool) -> float:
        """Seconds below which no pipeline gets whose idle time is not lent."""
        pipeline = self._fluid_s(shape, recompute) * shape.microbatches
        pipeline = max(pipeline, self._passing_s(shape, recompute, split=split))
        if virtual_stages == 1:
            pipeline = max(pipeline, self._filled_s(shape, recompute, split=split))
        return self._of_whole_units_s(shape, recompute, virtual_stages, pipeline, split=split)

    def _of_whole_units_s(
        self, shape: Shape, recompute: Recompute, virtual_stages: int, known_s: float, *, split: bool
    ) -> float:
        """Seconds below which no pipeline gets, from those that are known, as units are not divided. Pipelines with few
        microbatches are left out: those of them that were cut are the ones that are looked at for a new cut
        (`core.search.polish`)."""
        pp, m = shape.degrees[0], shape.microbatches
        if pp == 1 or m <= FEW_MICROBATCHES or not self.cluster.is_uniform:
            return known_s
        first, is_one_each = self._first(shape, recompute), virtual_stages == 1
        key = id(first), pp, m, is_one_each, split
        if key not in self._of_whole_units:
            find = least_of_one_stage_each if is_one_each else least_of_any_stages
            self._of_whole_units[key] = find(first, pp, m, known_s, splits_backward=split)
        return max(known_s, self._of_whole_units[key])

    @found_once
    def _least_ends(
        self, shape: Shape, policy: Policy, recompute: Recompute, gathered_by: Pipelining | None
    ) -> LeastEnds:
        """The bounds of where a step ends under a policy, whose units cost as under ``recompute``."""
        pp, first = shape.degrees[0], self._first(shape, recompute)
        busy = 0.0 if self._idle_lent(shape, [first]) else float(first.seconds.sum()) / pp * shape.microbatches
        trained, held = float(first.range_trained[0, -1]) / pp, float(first.range_elements[0, -1]) / pp
        mean = Held(trained, held, busy, *of_units(first))
        decision = self.undivided(shape, policy) if gathered_by is None else self.sharing(shape, policy, gathered_by)
        return self.step.least_ends(shape.mesh, decision, mean)

    def _forced_s(
        self, shape: Shape, policy: Policy, virtual_stages: int, live: Sequence[int], *, split: bool
    ) -> float:
        """Seconds below which no pipeline gets that recomputes what memory asks for."""
        if not self.cluster.is_uniform or self.request.names_units:
            return 0.0
        (found,), whole = self._forced(shape, policy, [(virtual_stages, tuple(live))]), self._first(shape, "none")
        pp, m = shape.degrees[0], shape.microbatches
        one_pass = self._passing_s(shape, "none", split=split) + found.again_s
        if virtual_stages == 1 and not split:  # as in `_filled_s`
            one_pass = max(one_pass, (float(whole.seconds.sum()) + found.again_s) / (1 - (1 - 1 / m) ** pp))
        return max(m * found.rank_s, one_pass)

    def foresee(self, shape: Shape, policy: Policy, ways: Sequence[tuple[int, Sequence[int] | None]]) -> None:
        """Count what memory forces to be recomputed under a policy in several ways, each given by its stages on a rank
        and its ``live`` microbatches as in `bound_s`: together they take little longer than one."""
        known = [(virtual_stages, tuple(live)) for virtual_stages, live in ways if live is not None]
        few = self.request.recomputes_what_memory_asks_for(policy.recompute)
        if known and few and self.cluster.is_uniform and self.may_fit(shape, policy):
            self._foreseen = shape, policy, dict(zip(known, self._forced(shape, policy, known), strict=True))

    def _forced(self, shape: Shape, policy: Policy, ways: Sequence[tuple[int, tuple[int, ...]]]) -> list[Forced]:
        """What memory forces to be recomputed in each way of `foresee`."""
        if self._foreseen is not None and self._foreseen[0] is shape and self._foreseen[1] is policy:
            known = self._foreseen[2]
            if all(way in known for way in ways):
                return [known[way] for way in ways]
        whole, ranked = self._first(shape, "none"), self.ranked(shape, policy.recompute).of_bytes
        lacking: dict[MemoryRequest, dict[object, Way]] = {}
        keys = []
        for virtual_stages, live in ways:
            way = Way(live, virtual_stages, self.least_state(shape, policy, virtual_stages))
            counted = self._counted(shape, policy, virtual_stages)
            keys.append((id(whole), id(ranked), way, counted))
            if keys[-1] not in self._known_forced:
                lacking.setdefault(counted, {})[keys[-1]] = way
        for counted, alike in lacking.items():
            self._known_forced.update(zip(alike, forced(whole, ranked, [*alike.values()], counted), strict=True))
        return [self._known_forced[key] for key in keys]

    @found_once
    def may_fit(self, shape: Shape, policy: Policy) -> bool:
        """Whether all ranks together have room for the parameters and one microbatch's activations."""
        pp = shape.degrees[0]
        # Units in another mode may keep less than the others.
        table = self._first(shape, "full" if self.request.other_units else policy.recompute)
        each, trained = self.least_state(shape, policy, self.request.stages_per_rank or max(VIRTUAL_STAGES))
        held = each * float(table.range_elements[0, -1]) + trained * float(table.range_trained[0, -1])
        if not self.request.offload:  # else they may be on the host
            held += float(table.range_kept[0, -1])
        if self.cluster.is_uniform:
            return held <= pp * self._limit_bytes(self.cluster.memory_bytes(0))
        return held <= sum(self.ranked(shape, policy.recompute).limits_bytes)

    def _counted(self, shape: Shape, policy: Policy, virtual_stages: int) -> MemoryRequest:
        """What is asked of memory as it is counted for cuts, without what units' bytes do not depend on."""
        pp, dp, _ = shape.degrees
        whole_below = self.whole_below_bytes(shape, policy)
        return self._counted_of(policy, pp * virtual_stages, dp, shape.microbatches, whole_below)

    @found_once
    def _counted_of(
        self, policy: Policy, stages: int, dp: int, microbatches: int, whole_below_bytes: int
    ) -> MemoryRequest:
        return replace(self.memory_request(policy, stages, dp, microbatches, whole_below_bytes, 0), microbatches=1)

    def least_state(self, shape: Shape, policy: Policy, virtual_stages: int) -> tuple[float, float]:
        """The least bytes of any parameter beside activations, and the least bytes of a trained one's gradient and
        states. The gradient is left out where a step is so short that activations may be gone when it is made."""
        pp, dp, _ = shape.degrees
        return self._least_state_of(policy, pp * virtual_stages, dp, shape.microbatches)

    @found_once
    def _least_state_of(self, policy: Policy, stages: int, dp: int, microbatches: int) -> tuple[float, float]:
        request = self.memory_request(policy, stages, dp, microbatches)
        is_short = microbatches <= 2 * stages
        may_be_apart = is_short and (request.divides_gradients or (request.gradients_when_made and policy.shard < 2))
        gradient = request.gradient_width / (request.ways if request.divides_gradients else 1)
        return request.held_bytes, request.trained_bytes - (gradient if may_be_apart else 0)

    def _lending_s(self, shape: Shape, recompute: Recompute, pipeline_s: float) -> float:
        """The bound of a pipeline whose idle time is lent, from the bound of one whose idle time is not."""
        first = self._first(shape, recompute)
        lent = self._idle_lent(shape, [first])
        if not lent:
            return pipeline_s
        work_s = float(first.seconds.sum()) * shape.microbatches / shape.degrees[0]
        return (1 - lent) * pipeline_s + lent * work_s

    def _filled_s(self, shape: Shape, recompute: Recompute, *, split: bool) -> float:
        """Seconds below which no pipeline of one stage per rank gets, filling and draining included."""
        pp, m = shape.degrees[0], shape.microbatches
        if pp == 1 or not self.cluster.is_uniform:
            return 0.0
        table = self._first(shape, recompute)
        whole = float(table.seconds.sum())
        # A rank waits for the forward of the work before it, and where backwards are whole for the backward too.
        share = 1.0
        if split:
            pairs = zip(table.units, table.seconds.tolist(), strict=True)
            share = min((u.forward_s / total for u, total in pairs if total > 0), default=1.0)
        if not 0 < share <= m:
            return 0.0
        # For every rank: share · (work before it) + m · (own work) ≤ T, so that all ranks together do at most
        # T / share · (1 - (1 - share / m)^pp).
        return whole * share / (1 - (1 - share / m) ** pp)

    @found_once
    def _passing_s(self, shape: Shape, recompute: Recompute, *, split: bool) -> float:
        """Seconds below which no pipeline gets, as every microbatch passes all units there and back. The last one to
        pass a unit, there or back, has waited for all others to pass it so."""
        if shape.degrees[0] == 1:
            return 0.0
        uniform = self.cluster.is_uniform
        tables = [self._first(shape, recompute)] if uniform else self.ranked(shape, recompute).tables
        ahead, back = [], []
        for table in tables:
            ahead.append([unit.forward_s for unit in table.units])
            whole = zip(table.units, table.seconds.tolist(), strict=True)
            back.append([total - u.forward_s - (u.weight_grad_s if split else 0.0) for u, total in whole])
        passes: list[float] = [min(each) for way in (ahead, back) for each in zip(*way, strict=True)]
        return sum(passes) + (shape.microbatches - 1) * max(passes)

    @found_once
    def _first(self, shape: Shape, recompute: Recompute) -> UnitTable:
        """The unit costs on the first rank, without messages."""
        pp, _, tp = shape.degrees
        place = Place(self.cluster.device(0), self.links.axis(shape.mesh, 0, "tp"), None, pp > 1)
        return self.tables.table(tp, shape.microbatch, recompute, place, is_whole=is_one_stage(pp, recompute))

    def _fluid_s(self, shape: Shape, recompute: Recompute) -> float:
        """Seconds of one microbatch if units could be divided freely over the ranks, each as fast as its device."""
        first = self._first(shape, recompute)
        if self.cluster.is_uniform:
            pp = shape.degrees[0]
            key = (id(first), pp)
            if key not in self._fluid:
                alike = Counter(map(id, first.units))
                # Equal units cannot be cut: one rank has at least its share of them, rounded up.
                whole = [-(-alike[id(u)] // pp) * s for u, s in zip(first.units, first.seconds.tolist(), strict=True)]
                self._fluid[key] = max(float(first.seconds.sum()) / pp, *whole)
            return self._fluid[key]
        base = first.seconds.tolist()
        rates = 0.0
        for table in self.ranked(shape, recompute).tables:
            ratios = [mine / other for mine, other in zip(table.seconds.tolist(), base, strict=True) if other > 0]
            rates += 1 / min(ratios, default=1.0)
        return float(sum(base)) / rates
