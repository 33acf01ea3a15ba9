"""Cuts of a pipeline with few microbatches, by the makespan of its schedule.

With many microbatches the slowest stage decides. With few, a step is nearer to the sum of all stages, so that messages,
the ends of the pipeline and what is done once a step weigh as much. Here cuts are compared by what a step takes under
them: the makespan of the schedule, counted for many cuts at once, and a tail that grows with the parameters of the
fullest rank. What is found is an order to try cuts in: each is then scored as any other.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.core.partition.cut_search import BEAM, MOST_LISTED, Starts, searched_cuts
from shardwright.core.partition.exact import Matrix, range_sums
from shardwright.core.plan.decision import placement_of
from shardwright.core.schedule.makespans import Makespans, StageSeconds
from shardwright.core.schedule.messages_under_way import messages_under_way
from shardwright.core.schedule.named_schedule import named_schedule
from shardwright.core.schedule.peak_memory import walk_activations
from shardwright.core.schedule.schedule import Schedule
from shardwright.core.search.bounds import Bounds
from shardwright.core.search.exchanges import Held
from shardwright.core.search.predict import of_units
from shardwright.core.search.space import Pipelining, Policy, Shape, splits_backward
from shardwright.core.tables.backward_halves import halves_of
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.tables.stage_working import working_of
from shardwright.core.tables.unit_table import UnitTable

PRICE_OF_UNEVENNESS = 2e-3
"""The share of a step that a fullest rank of twice the mean costs, in work or in parameters: of cuts that are about as
fast, the more even one is taken, which suffers least where a stage takes longer than predicted."""
TRIED_IN_ORDER = 16
"""The number of cuts that are tried in the order of their time. After them those are tried that are estimated to take
less memory than all before."""
MOST_TRIED = 64
"""The number of cuts that are tried in all."""
ESTIMATE_SHARE = 0.02
"""The share of a device's memory by which a cut that fits may be estimated not to. What is left out of the estimate
makes it too small as a rule, not too large: this is for the rest."""
FOLLOWING_COSTS = ("interleaved",)
"""The schedules whose order follows from the costs (SageMaker's), so that each cut has another."""


class Recut:
    """Cuts of one shape under one schedule, with the makespan of each."""

    def __init__(self, shape: Shape, pipelining: Pipelining, ranked: RankTables, known: Sequence[int]) -> None:
        """``known``: a cut, from which the search begins where there are too many to look at all of them."""
        self.shape, self.pipelining, self.ranked = shape, pipelining, ranked
        self._placement = placement_of(pipelining.schedule, ranked.ranks, pipelining.virtual_stages)
        self._of_rank = np.equal.outer(np.arange(ranked.ranks), self._placement).astype(float)
        self._sums: dict[tuple[str, int], Matrix] = {}
        self._makespans = Makespans.of(self._schedule(known))
        self._is_deep = comb(ranked.units - 1, len(self._placement) - 1) <= MOST_LISTED
        self._search(known, beam=1)

    def deepen(self) -> None:
        """Look at more cuts than those on the way from the first one to the best of its neighbours, and so on."""
        if not self._is_deep:
            self._is_deep = True
            self._search(tuple(self.cuts[np.argmin(self.pipeline_s)].tolist()), beam=BEAM)

    def _search(self, known: Sequence[int], beam: int) -> None:
        found = searched_cuts(self._priced_s, self.ranked.units, len(self._placement), known, beam)
        self.cuts, self.pipeline_s = found
        for name in ("_fullest_trained", "_passing_bytes"):
            self.__dict__.pop(name, None)

    def priced_s(self, starts: Sequence[int]) -> float:
        """The makespan under one cut, with the price of its unevenness."""
        return float(self._priced_s(np.array([starts], dtype=np.int64))[0])

    def fastest_first(
        self, shape: Shape, policy: Policy, bounds: Bounds, below_s: float, before_s: float
    ) -> Iterator[tuple[int, ...]]:
        """The cuts of a shape, whose ranks cost the same, that may fit under a policy and are estimated to take less
        than ``below_s``, the fastest first; see `MOST_TRIED`. ``before_s``: what a step is known to take beside the
        makespan as it is counted here, in which all is computed again that the policy may compute again: below 0 where
        it keeps some of it."""
        step_s = self.pipeline_s + np.minimum(self._tail_s(shape, policy, bounds), before_s)
        order = np.argsort(step_s, kind="stable")
        order = order[: np.searchsorted(step_s[order], below_s)]
        if len(order) == 0:
            return
        yield tuple(self.cuts[order[0]].tolist())
        over = self._estimated_over(policy, bounds)[order]
        fitting = np.flatnonzero(over <= ESTIMATE_SHARE)
        order, over = order[fitting[fitting > 0]], over[fitting[fitting > 0]]
        least = np.minimum.accumulate(np.concatenate([[np.inf], over]))[:-1]
        tried = (np.arange(len(order)) < TRIED_IN_ORDER) | (over < least)
        for index in order[tried][: MOST_TRIED - 1]:
            yield tuple(self.cuts[index].tolist())

    def _schedule(self, known: Sequence[int]) -> Schedule:
        """The schedule; where its order follows from the costs, that for the ``known`` cut."""
        name, sizes = self.pipelining.schedule, (self.shape.microbatches, self.pipelining.virtual_stages)
        if name not in FOLLOWING_COSTS:
            return named_schedule(name, self.ranked.ranks, *sizes)
        costs = self.ranked.stage_costs(known, self._placement)
        return Schedule.build(
            name, ranks=self.ranked.ranks, microbatches=sizes[0], virtual_stages=sizes[1], costs=costs
        )

    # Sizes of the stages of many cuts, of shape (stages, cuts) -----------------------------------------------------

    def _by_stage(self, cuts: Starts, name: str, sizes: Callable[[UnitTable], Matrix]) -> NDArray[np.float64]:
        ends = np.concatenate([cuts[:, 1:], np.full((len(cuts), 1), self.ranked.units)], axis=1)
        found = []
        for stage, rank in enumerate(self._placement):
            table = self.ranked.tables[rank]
            if (name, id(table)) not in self._sums:
                self._sums[name, id(table)] = sizes(table)
            found.append(self._sums[name, id(table)][cuts[:, stage], ends[:, stage]])
        return np.stack(found)

    def _seconds(self, cuts: Starts) -> StageSeconds:
        boundaries = [self.ranked.tables[rank].boundary_s for rank in self._placement]
        return StageSeconds(
            self._by_stage(cuts, "forward", lambda table: range_sums([u.forward_s for u in table.units])),
            self._by_stage(
                cuts, "input", lambda table: range_sums([u.input_grad_s for u in table.units] + table.again_s)
            ),
            self._by_stage(cuts, "weight", lambda table: range_sums([u.weight_grad_s for u in table.units])),
            np.stack([np.array(boundaries[stage])[cuts[:, stage]] for stage in range(1, cuts.shape[1])]),
        )

    def _entries(self, cuts: Starts) -> NDArray[np.float64]:
        return self._by_stage(cuts, "entries", lambda table: table.range_elements)

    def _trained(self, cuts: Starts) -> NDArray[np.float64]:
        return self._by_stage(cuts, "trained", lambda table: table.range_trained)

    # Figures of many cuts, of shape (cuts,) ------------------------------------------------------------------------

    def _priced_s(self, cuts: Starts) -> NDArray[np.float64]:
        costs = self._seconds(cuts)
        uneven = np.zeros(len(cuts))
        for sizes in (costs.forward + costs.input_grad + costs.weight_grad, self._entries(cuts)):
            ranks = self._of_rank @ sizes
            uneven += ranks.max(axis=0) / np.maximum(ranks.mean(axis=0), 1e-300) - 1
        priced: NDArray[np.float64] = self._makespans.seconds(costs) * (1 + PRICE_OF_UNEVENNESS * uneven)
        return priced

    def _tail_s(self, shape: Shape, policy: Policy, bounds: Bounds) -> NDArray[np.float64]:
        """The seconds after the pipeline, taken to grow evenly with the trained parameters of the fullest rank, from
        those of an even share to those of the whole model."""
        first, ranks = self.ranked.tables[0], self.ranked.ranks
        trained, entries = float(first.range_trained[0, -1]), float(first.range_elements[0, -1])
        decision, units = bounds.undivided(shape, policy), of_units(first)
        least = float(self.pipeline_s.min())

        def after_s(ways: int) -> float:
            held = Held(trained / ways, entries / ways, 0.0, *units)
            return bounds.step.least_ends(shape.mesh, decision, held).step_s(least) - least

        even_s, all_s = after_s(ranks), after_s(1)
        fullest = self._fullest_trained
        tail: NDArray[np.float64] = even_s + (all_s - even_s) * (fullest - trained / ranks) / max(
            1.0, trained - trained / ranks
        )
        return tail

    @cached_property
    def _fullest_trained(self) -> NDArray[np.float64]:
        fullest: NDArray[np.float64] = (self._of_rank @ self._trained(self.cuts)).max(axis=0)
        return fullest

    def _estimated_over(self, policy: Policy, bounds: Bounds) -> NDArray[np.float64]:
        """An estimate of the share of its memory that the fullest rank lacks; below 0 there is room. Parameters that
        two stages of a rank share count twice."""
        each, trained = bounds.least_state(self.shape, policy, self.pipelining.virtual_stages)
        need = self._of_rank @ (each * self._entries(self.cuts) + trained * self._trained(self.cuts))
        room = np.maximum(1, self.ranked.limits_bytes)[:, None]
        over: NDArray[np.float64] = ((need + self._passing_bytes) / room - 1).max(axis=0)
        return over

    def _working(self, table: UnitTable) -> Matrix:
        """What the passes of a stage hold for a while, the halves of its backward among them where it is split."""
        halves = halves_of(table)
        if not (halves.is_known and splits_backward(self.pipelining.schedule, self.pipelining.virtual_stages)):
            return working_of(table).range_working
        found: Matrix = np.maximum(working_of(table).range_working, halves.range_input_grad_working)
        return found

    @cached_property
    def _passing_bytes(self) -> NDArray[np.float64]:
        """The peak of the activations, and what the passes of a stage hold beside them, messages included: of shape
        (ranks, cuts)."""
        crossing = np.array([0, *self.ranked.tables[0].boundary_bytes[1:], 0])
        kept = self._by_stage(self.cuts, "kept", lambda table: table.range_kept)
        freed = self._by_stage(self.cuts, "freed", lambda t: halves_of(t).range_freed - halves_of(t).range_between)
        working = self._by_stage(self.cuts, "working", self._working)
        no_range = np.zeros((len(crossing), len(crossing)))
        before = self._by_stage(self.cuts, "before", lambda _: no_range + crossing[:, None])
        behind = self._by_stage(self.cuts, "behind", lambda _: no_range + crossing[None, :])
        is_program = bool(self.ranked.tables[0].found_bytes)
        messages = messages_under_way(self._makespans.schedule)
        found = []
        for rank, order in enumerate(self._makespans.schedule.table):
            own = np.flatnonzero(self._of_rank[rank])
            sizes: Any = dict(enumerate(kept))
            less: Any = dict(enumerate(freed))
            most = np.zeros(len(self.cuts))
            for live, _ in walk_activations(order, sizes, less):
                most = np.maximum(most, live)
            ahead, back = (2 if is_program else max(2, count) for count in messages[rank])
            sent = ahead * before[own] + back * behind[own]
            found.append(most + working[own].max(axis=0) + sent.max(axis=0))
        return np.stack(found)
