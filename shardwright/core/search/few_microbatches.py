"""The cut of a pipeline with few microbatches, by the makespan of its schedule.

With many microbatches the slowest stage decides. With few, a step is nearer to the sum of all stages, so that messages,
the ends of the pipeline and what is done once a step weigh as much. Here cuts are compared by what a step takes under
them: the makespan of the schedule, counted for many cuts at once, and a tail that grows with the parameters of the
fullest rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.core.partition.cut_search import Starts, searched_cuts
from shardwright.core.partition.exact import Matrix, range_sums
from shardwright.core.plan.decision import placement_of
from shardwright.core.schedule import StageCosts
from shardwright.core.schedule.makespans import Makespans, StageSeconds
from shardwright.core.schedule.peak_memory import walk_activations
from shardwright.core.schedule.schedule import Schedule
from shardwright.core.search.bounds import Bounds
from shardwright.core.search.exchanges import Held
from shardwright.core.search.predict import largest_unit
from shardwright.core.search.space import Pipelining, Policy, Shape
from shardwright.core.tables.memory import named_schedule
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.tables.unit_table import UnitTable

MOST_MICROBATCHES = 8
"""The number of microbatches up to which cuts are compared by their makespan. Beyond it the least largest stage time
decides: filling and draining a pipeline of p stages are then at most (p - 1) / (m + p - 1) of a step, and do not differ
much from cut to cut."""
PRICE_OF_UNEVENNESS = 1e-3
"""The share of a step that a largest stage of twice the mean time costs: of cuts that are as fast, the more even one is
taken, which suffers least where a stage takes longer than predicted."""
CHECKED_IN_ORDER = 16
"""The number of cuts whose memory is counted for a policy in the order of their time. After them those are counted that
are estimated to take less memory than all before."""
MOST_CHECKED = 64
"""The number of cuts whose memory is counted for a policy in all."""
ESTIMATE_SHARE = 0.02
"""The share of a device's memory by which a cut that fits may be estimated not to. What is left out of the estimate
makes it too small as a rule, not too large: this is for the rest."""
FOLLOWING_COSTS = ("interleaved",)
"""The schedules whose order follows from the costs (SageMaker's), so that each cut has another."""
Fits = Callable[[Policy, tuple[int, ...]], bool]
"""Whether a cut fits the memory under a policy."""


@dataclass(frozen=True)
class Staged:
    """A shape and a schedule with the unit costs on every rank, to be cut."""

    shape: Shape
    pipelining: Pipelining
    ranked: RankTables

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return placement_of(self.pipelining.schedule, self.ranked.ranks, self.pipelining.virtual_stages)

    @cached_property
    def _unit_sums(self) -> list[tuple[Matrix, Matrix, Matrix]]:
        """The seconds of the forward, the input gradient and the weight gradient of every range of units, for each
        pipeline rank."""
        found: dict[int, tuple[Matrix, Matrix, Matrix]] = {}
        for table in self.ranked.tables:
            if id(table) not in found:
                found[id(table)] = (
                    range_sums([unit.forward_s for unit in table.units]),
                    range_sums(np.array([unit.input_grad_s for unit in table.units]) + table.again_s),
                    range_sums([unit.weight_grad_s for unit in table.units]),
                )
        return [found[id(table)] for table in self.ranked.tables]

    def seconds(self, cuts: Starts) -> StageSeconds:
        """The seconds of the stages of many cuts; ``cuts``: (cuts, stages), the first units."""
        ends = self.ends(cuts)
        forward, input_grad, weight_grad = (
            np.stack([self._unit_sums[rank][kind][ends[stage]] for stage, rank in enumerate(self.placement)])
            for kind in range(3)
        )
        boundaries = [np.array(self.ranked.tables[rank].boundary_s) for rank in self.placement]
        transfer = [boundaries[stage][cuts[:, stage]] for stage in range(1, cuts.shape[1])]
        return StageSeconds(forward, input_grad, weight_grad, np.stack(transfer))

    def ends(self, cuts: Starts) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """The (first units, ends) of every stage of many cuts."""
        after = np.concatenate([cuts[:, 1:], np.full((len(cuts), 1), self.ranked.units)], axis=1)
        return [(cuts[:, stage], after[:, stage]) for stage in range(cuts.shape[1])]

    def by_stage(self, cuts: Starts, sizes: Callable[[UnitTable], Matrix]) -> list[NDArray[np.float64]]:
        """A size of every stage, of many cuts."""
        matrices = {id(table): sizes(table) for table in self.ranked.tables}
        return [
            matrices[id(self.ranked.tables[rank])][ends]
            for rank, ends in zip(self.placement, self.ends(cuts), strict=True)
        ]

    def by_rank(self, cuts: Starts, sizes: Callable[[UnitTable], Matrix]) -> list[list[NDArray[np.float64]]]:
        """A size of every stage of many cuts, by the rank that holds it."""
        found: list[list[NDArray[np.float64]]] = [[] for _ in self.ranked.tables]
        for rank, size in zip(self.placement, self.by_stage(cuts, sizes), strict=True):
            found[rank].append(size)
        return found


def is_few(shape: Shape) -> bool:
    """Whether a pipeline has so few microbatches that its cut is found by makespans. With a single one nothing is
    gained: it passes all units, however they are cut."""
    return shape.mesh.axis_size("pp") > 1 and 1 < shape.microbatches <= MOST_MICROBATCHES


def fastest_cuts(
    staged: Staged, policies: Sequence[Policy], bounds: Bounds, known: Sequence[int], fits: Fits
) -> dict[tuple[int, ...], list[Policy]]:
    """The fastest cut that fits under each policy, with the policies that take it.

    ``known``: a cut from which the search begins where there are too many to look at all of them.
    """
    makespans = Makespans.of(_schedule(staged, known))

    def makespan_s(cuts: Starts) -> NDArray[np.float64]:
        costs = staged.seconds(cuts)
        stages = costs.forward + costs.input_grad + costs.weight_grad
        uneven = stages.max(axis=0) / np.maximum(stages.mean(axis=0), 1e-300) - 1
        found: NDArray[np.float64] = makespans.seconds(costs) * (1 + PRICE_OF_UNEVENNESS * uneven)
        return found

    cuts, pipeline_s = searched_cuts(makespan_s, staged.ranked.units, len(staged.placement), [known])
    shares = Shares(staged, makespans.schedule, cuts)
    found: dict[tuple[int, ...], list[Policy]] = {}
    for policy in policies:
        step_s = pipeline_s + _tail_s(staged, policy, bounds, shares, float(pipeline_s.min()))
        promising = _fastest_first(cuts, step_s, partial(_estimated_over, policy, bounds, shares))
        cut = next((cut for cut in promising if fits(policy, cut)), None)
        if cut is not None:
            found.setdefault(cut, []).append(policy)
    return found


def _fastest_first(
    cuts: Starts, step_s: NDArray[np.float64], estimated_over: Callable[[], NDArray[np.float64]]
) -> Iterator[tuple[int, ...]]:
    """The cuts that may fit, the fastest first; see `MOST_CHECKED`. ``estimated_over`` gives the share of its memory
    that the fullest rank lacks, for every cut; it is asked for when the fastest cut of all was not taken."""
    fastest = int(np.argmin(step_s))
    yield tuple(cuts[fastest].tolist())
    over, order = estimated_over(), np.argsort(step_s, kind="stable")
    order = order[(over[order] <= ESTIMATE_SHARE) & (order != fastest)]
    least = np.minimum.accumulate(np.concatenate([[np.inf], over[order]]))[:-1]
    later = np.flatnonzero(over[order] < least)
    first = order[:CHECKED_IN_ORDER].tolist()
    then = order[later[later >= CHECKED_IN_ORDER]].tolist()
    for index in [*first, *then][: MOST_CHECKED - 1]:
        yield tuple(cuts[index].tolist())


def _schedule(staged: Staged, known: Sequence[int]) -> Schedule:
    """The schedule; where its order follows from the costs, that for the ``known`` cut."""
    name, ranks = staged.pipelining.schedule, staged.ranked.ranks
    sizes = staged.shape.microbatches, staged.pipelining.virtual_stages
    if name not in FOLLOWING_COSTS:
        return named_schedule(name, ranks, *sizes)
    costs: StageCosts = staged.ranked.stage_costs(known, staged.placement)
    return Schedule.build(name, ranks=ranks, microbatches=sizes[0], virtual_stages=sizes[1], costs=costs)


@dataclass(frozen=True)
class Shares:
    """The holdings of every rank for many cuts under a schedule, of shape (ranks, cuts). Parameters that two stages of
    a rank share count twice."""

    staged: Staged
    schedule: Schedule
    cuts: Starts

    @cached_property
    def trained(self) -> NDArray[np.float64]:
        """The trained parameter entries."""
        return np.stack([sum(rank) for rank in self.staged.by_rank(self.cuts, lambda table: table.range_trained)])

    @cached_property
    def elements(self) -> NDArray[np.float64]:
        """All parameter entries."""
        return np.stack([sum(rank) for rank in self.staged.by_rank(self.cuts, lambda table: table.range_elements)])

    @cached_property
    def passing_bytes(self) -> NDArray[np.float64]:
        """The peak of the activations, and what the passes of a stage hold beside them, messages included."""
        staged, found = self.staged, []
        kept, freed, working = (
            staged.by_stage(self.cuts, sizes)
            for sizes in (
                lambda table: table.range_kept,
                lambda table: table.range_freed_by_input_grad - table.range_between,
                lambda table: table.range_working,
            )
        )
        crossing = np.array([0, *staged.ranked.tables[0].boundary_bytes[1:], 0])
        sent = [2.0 * (crossing[first] + crossing[end]) for first, end in staged.ends(self.cuts)]
        for rank, order in enumerate(self.schedule.table):
            stages = [stage for stage, on in enumerate(staged.placement) if on == rank]
            sizes: Any = {stage: kept[stage] for stage in stages}
            less: Any = {stage: freed[stage] for stage in stages}
            most = np.zeros(len(self.cuts))
            for live, _ in walk_activations(order, sizes, less):
                most = np.maximum(most, live)
            beside = [np.maximum.reduce([each[stage] for stage in stages]) for each in (working, sent)]
            found.append(most + sum(beside))
        return np.stack(found)


def _tail_s(staged: Staged, policy: Policy, bounds: Bounds, shares: Shares, pipeline_s: float) -> NDArray[np.float64]:
    """The seconds after the pipeline for many cuts, taken to grow evenly with the trained parameters of the fullest
    rank, from those of an even share to those of the whole model."""
    first, ranks = staged.ranked.tables[0], staged.ranked.ranks
    trained, elements = float(first.range_trained[0, -1]), float(first.range_elements[0, -1])
    decision = bounds.undivided(staged.shape, policy)
    largest = largest_unit(first)
    even_s, all_s = (
        bounds.step.least_tail_s(
            staged.shape.mesh,
            decision,
            Held(trained / ways, elements / ways, 0.0, len(first.units), largest),
            pipeline_s,
        )
        for ways in (ranks, 1)
    )
    share = (shares.trained.max(axis=0) - trained / ranks) / max(1.0, trained - trained / ranks)
    tail: NDArray[np.float64] = even_s + (all_s - even_s) * share
    return tail


def _estimated_over(policy: Policy, bounds: Bounds, shares: Shares) -> NDArray[np.float64]:
    """An estimate of the share of its memory that the fullest rank lacks, for many cuts; below 0 there is room."""
    staged = shares.staged
    held, trained = bounds.least_state(staged.shape, policy, staged.pipelining.virtual_stages)
    need = held * shares.elements + trained * shares.trained + shares.passing_bytes
    over: NDArray[np.float64] = (need / np.maximum(1, staged.ranked.limits_bytes)[:, None] - 1).max(axis=0)
    return over
