"""Best-first search: bounds that take microseconds decide what is cut, bounds of cuts decide what is simulated.

A queue holds choices in the order of the time that they cannot get below. A choice starts with degrees, then gets
recompute, a number of stages per rank and a schedule. It is then cut, and then simulated under all memory policies that
the cut fits in. The first simulated choice that leaves the queue is as fast as any in the space, because all that is
left has a larger bound. No choice is discarded by a guess, so the fastest is that of an exhaustive enumeration in the
same simulator, for cuts by the slowest stage. Of few microbatches the fastest choices are then cut anew
(`core.search.polish`).

Where a margin is given, what is left of the queue within it is put in the order of simplicity instead, and opened until
the simplest is settled: again nothing that could be simpler is left. So only choices that may be simpler than the
answer are cut and simulated for it.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.layout.mesh import Mesh
from shardwright.core.search.cut_bounds import Counted, Cut
from shardwright.core.search.kept_products import recompute_choices
from shardwright.core.search.options import Progress
from shardwright.core.search.polish import Polisher
from shardwright.core.search.request import Request
from shardwright.core.search.scoring import Draft, Scored, Scorer, Timed
from shardwright.core.search.simplicity import Simplicity, least_simplicity, simplicity
from shardwright.core.search.space import ORDERS, SHARD_GROUPS, Pipelining, Policy, Shape, Space, splits_backward
from shardwright.core.tables.cost_tables import CostTables
from shardwright.core.values.found_once import found_once
from shardwright.core.values.recompute_modes import Recompute

REPORTED = 4
"""The number of runners-up that are reported, each with degrees of its own."""
MORE_DEGREES = 2
"""The number of degrees that are searched beyond those that are reported."""
OPENED = 100
"""The number of choices that are opened for a runner-up's degrees before these are given up; cuts do not count."""
FURTHER: dict[type, int] = {Cut: 4, Draft: 5, Timed: 6}
"""The settled steps of a choice that has stages; for a choice without stages they are the number of its parts."""
SAME = 1e-6
"""The relative difference below which times are equal, so that the simpler plan is taken."""

Live = tuple[int, ...] | None
"""The least number of live microbatches of one stage on every rank, as `Scorer.least_live` gives it."""


@dataclass(slots=True)
class Found:
    """The result of a search."""

    best: Scored | None
    """The answer: the simplest choice within the margin of the fastest, which it is without a margin."""
    fastest: Scored | None
    others: list[Scored]
    """The next fastest choices, each with other degrees, fastest first."""


class _Entry(NamedTuple):
    """A choice as far as it is made, and the seconds that it cannot get below."""

    bound_s: float
    settled: int
    """The settled steps, negated: among equal bounds the more settled choice comes first."""
    number: int
    """No two entries have the same."""
    choice: tuple[Any, ...]


class Search:
    """One search, with its queue."""

    def __init__(self, tables: CostTables, cluster: Cluster, request: Request, *, limited: bool = True) -> None:
        """A search over one cluster; ``limited``: only with what the runtimes carry out."""
        self.request = request
        runtimes = request.runtimes or (tables.graph.capabilities,)
        self.space = Space(
            request, cluster, len(tables.folded.units), runtimes, recompute_choices(tables, request), limited=limited
        )
        self.scorer = Scorer(tables, cluster, request)
        self._polisher = Polisher(self.scorer)
        self._queue: list[_Entry] = []
        self._unfit: list[tuple[float, Cut]] = []
        """Cuts that do not fit, with the seconds that they do not get below; another cut of the same choice may."""
        self._numbers = itertools.count()

    def run(
        self,
        progress: Progress | None = None,
        *,
        runners_up: int = REPORTED,
        below_s: float = float("inf"),
        margin: float = 0.0,
        within_s: float = float("inf"),
    ) -> Found:
        """The best choice and the next ones; no choice where none takes at most ``below_s``.

        Args:
            margin: the share of the fastest choice's time by which a simpler one may be slower.
            within_s: seconds that the answer takes at most, however simple.

        Raises PlanError when the request leaves nothing to choose from.
        """
        shapes = self.unlike(self.space.shapes())
        for shape in shapes:
            self._push(self.scorer.bounds.shape_bound_s(shape), shape)
        best: list[Scored] = []
        opened = 0
        while self._queue:
            entry = heapq.heappop(self._queue)
            if entry.bound_s > (best[0].predicted.step_time_s if best else min(below_s, within_s)) * (1 + SAME):
                heapq.heappush(self._queue, entry)
                break
            scored = self._settled(entry)
            if scored is not None:
                best.append(scored)
            if len(entry.choice) == 1 and isinstance(entry.choice[0], Shape):
                opened += 1
                if progress is not None:
                    progress(opened, len(shapes))
        if progress is not None:
            progress(len(shapes), len(shapes))
        best.sort(key=preference)
        fastest = self._polished(best, min(below_s, within_s))
        if fastest is None:
            return Found(None, None, [])
        if not best or fastest is not best[0]:
            best.insert(0, fastest)
        limit_s = min(fastest.predicted.step_time_s * (1 + margin), within_s)
        within = [scored for scored in best if scored.predicted.step_time_s <= limit_s * (1 + SAME)]
        answer = self._polisher.polished(self._simplest(within, limit_s)) if margin else fastest
        fastest = min(fastest, answer, key=preference)
        others = {_degrees(equal): equal for equal in reversed(best)}
        others.setdefault(_degrees(answer), answer)
        if runners_up:
            self._add_runners_up(others, runners_up)
        for named in (fastest, answer):
            others.pop(_degrees(named), None)
        next_best = sorted(map(self._polisher.polished, others.values()), key=preference)
        if next_best and preference(next_best[0]) < preference(fastest):  # only its new cut is that fast
            fastest, next_best[0] = next_best[0], fastest
            limit_s = min(fastest.predicted.step_time_s * (1 + margin), within_s)
            if answer.predicted.step_time_s > limit_s:
                answer, next_best[0] = fastest, answer
        next_best = next_best[:runners_up]
        with_peaks = self.scorer.with_peaks
        peaked = with_peaks(answer)
        return Found(peaked, peaked if answer is fastest else with_peaks(fastest), [*map(with_peaks, next_best)])

    def unlike(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The shapes, of those whose links are the same in every part of a step the one that is preferred."""
        if not self.scorer.cluster.is_uniform:
            return list(shapes)
        links, groups = self.scorer.links, (*SHARD_GROUPS, self.request.shard_group)
        order_of = {shape.mesh: shape.order for shape in shapes}
        chosen: dict[tuple[int, int, int], list[tuple[object, Mesh]]] = {}
        for mesh in sorted(order_of, key=lambda mesh: (order_of[mesh] != ORDERS[0], order_of[mesh])):
            pp, dp, tp = (mesh.axis_size(axis) for axis in ("pp", "dp", "tp"))
            ways = [size for size in groups if size is None or (size < dp and dp % size == 0)]
            nodes = [self.scorer.cluster.node_of(mesh.rank({"pp": rank})) for rank in range(pp)]
            data = [[links.shard_groups(mesh, rank, size) for size in ways] for rank in range(pp)]
            alone = links.places(mesh), data, nodes, links.pipelines_share_nodes(mesh)
            of_degrees = chosen.setdefault((pp, dp, tp), [])
            if all(known != alone for known, _ in of_degrees):
                of_degrees.append((alone, mesh))
        kept = {mesh for each in chosen.values() for _, mesh in each}
        return [shape for shape in shapes if shape.mesh in kept]

    def _polished(self, best: list[Scored], within_s: float) -> Scored | None:
        """The fastest choice of those that left the queue, are in it, or did not fit, once they are cut anew."""
        stays = [(scored.predicted.step_time_s, scored) for scored in best[1:]]
        queued = [(e.bound_s, e.choice[0]) for e in self._queue if not isinstance(e.choice[0], Shape)]
        return self._polisher.fastest(best[0] if best else None, [*stays, *queued, *self._unfit], within_s)

    def _simplest(self, fastest: list[Scored], limit_s: float) -> Scored:
        """The simplest choice of those that take at most ``limit_s``, the fastest of equally simple ones; ``fastest``:
        what has left the queue. What is opened and not taken is in the queue afterwards."""
        numbers = itertools.count()
        heap: list[tuple[Simplicity, float, int, Scored | _Entry]] = []
        slower: list[_Entry] = []

        def put(entry: _Entry, below: Simplicity | None) -> None:
            if entry.bound_s > limit_s:
                slower.append(entry)
                return
            least = _least_simplicity(entry.choice)
            heapq.heappush(heap, (least if below is None else max(least, below), entry.bound_s, next(numbers), entry))

        for scored in fastest:
            place = simplicity(scored.decision), scored.predicted.step_time_s, next(numbers), scored
            heapq.heappush(heap, place)
        for entry in self._queue:
            put(entry, None)
        while True:
            least, _, _, first = heapq.heappop(heap)
            if isinstance(first, Scored):
                found = first
                break
            self._queue = []
            settled = self._settled(first)
            if settled is not None:
                found = settled
                break
            for entry in self._queue:
                put(entry, least)
        self._queue = slower + [each for *_, each in heap if isinstance(each, _Entry)]
        heapq.heapify(self._queue)
        return found

    def _settled(self, entry: _Entry) -> Scored | None:
        """The choice, if it is settled and its time is exact; otherwise None, and its next choices are queued."""
        first = entry.choice[0]
        if isinstance(first, Timed):
            return self.scorer.finished(first)
        if isinstance(first, Cut):
            while first.counted < Counted.ROOM:
                first = self.scorer.cut_bounds.finer(first)
                if first.bound_s > entry.bound_s:
                    self._push(first.bound_s, first)
                    return None
            draft = self.scorer.draft(first)
            if draft is not None:
                self._push(max(draft.bound_s, entry.bound_s), draft)
            elif not self.scorer.is_needless(first):
                self._unfit.append((entry.bound_s, first))
        elif isinstance(first, Draft):
            if len(first.policies) > 1:
                for draft in self.scorer.by_policy(first):
                    self._push(max(draft.bound_s, entry.bound_s), draft)
            else:
                timed = self.scorer.timed(first)
                self._push(timed.predicted.step_time_s, timed)
        else:
            for bound, further in self._opened(entry):
                self._push(max(bound, entry.bound_s), *further)
        return None

    def _add_runners_up(self, found: dict[tuple[int, int, int], Scored], wanted: int) -> None:
        """Add the best choice of other degrees: each of the most promising degrees is searched by itself."""
        of_degrees: dict[tuple[int, int, int], list[_Entry]] = {}
        for entry in self._queue:
            of_degrees.setdefault(_degrees(entry.choice[0]), []).append(entry)
        expected_s = {
            degrees: self._least_expected_s(of_degrees[degrees]) for degrees in of_degrees.keys() - found.keys()
        }
        promising = sorted(expected_s, key=expected_s.__getitem__)
        for degrees in promising[: wanted + MORE_DEGREES]:
            self._queue = of_degrees[degrees]
            heapq.heapify(self._queue)
            times = sorted(scored.predicted.step_time_s for scored in found.values())
            longest = times[wanted] if len(times) > wanted else float("inf")
            opened = 0
            while self._queue and self._queue[0].bound_s <= longest and opened < OPENED:
                entry = heapq.heappop(self._queue)
                opened += not isinstance(entry.choice[0], Cut)
                scored = self._settled(entry)
                if scored is not None:
                    found[degrees] = scored
                    break

    def _least_expected_s(self, entries: list[_Entry]) -> float:
        """The least expected time of some entries; bounds of cuts that leave out what their ranks send are made finer
        in place as far as that decides."""
        heap = [(_expected_s(entry), number) for number, entry in enumerate(entries)]
        heapq.heapify(heap)
        while True:
            least_s, number = heap[0]
            entry = entries[number]
            first = entry.choice[0]
            if not isinstance(first, Cut) or first.counted in (Counted.RANKS, Counted.ROOM):
                return least_s
            first = self.scorer.cut_bounds.finer(first)
            entries[number] = entry._replace(bound_s=max(first.bound_s, entry.bound_s), choice=(first,))
            heapq.heapreplace(heap, (entries[number].bound_s, number))

    def _push(self, bound_s: float, *choice: Any) -> None:
        if bound_s != float("inf"):
            settled = FURTHER.get(type(choice[0]), len(choice))
            heapq.heappush(self._queue, _Entry(bound_s, -settled, next(self._numbers), choice))

    def _opened(self, entry: _Entry) -> Iterator[tuple[float, tuple[Any, ...]]]:
        """The choices that settle one thing more than an entry's, each with its bound; the same choice where a bound
        that takes longer is larger."""
        choice = entry.choice
        shape: Shape = choice[0]
        scorer = self.scorer
        if len(choice) == 1:
            modes: dict[object, list[Policy]] = {}
            for policy in self.space.policies(shape.degrees[1]):
                # The number of recomputed units depends on the memory left, so such policies share no pipeline.
                modes.setdefault(policy if policy.recompute == "full" else policy.recompute, []).append(policy)
            for alike in modes.values():
                yield scorer.bounds.bound_s(shape, alike), (shape, tuple(alike))
            return
        policies: tuple[Policy, ...] = choice[1]
        if len(choice) == 2:
            ways = self._ways(shape.degrees[0], shape.microbatches, policies[0].recompute)
            for policy in policies:
                possible = [
                    (members, live) for members, live in ways
                    if any(map(policy.has_stages, members)) and scorer.may_have_room(shape, policy, members[0], live)
                ]  # fmt: skip
                if policy.recompute == "full":
                    scorer.bounds.foresee(
                        shape, policy, [(members[0].virtual_stages, live) for members, live in possible]
                    )
                for members, live in possible:
                    yield self._bound_s(shape, (policy,), members, live), (shape, (policy,), members)
            return
        is_apart = policies[0].recompute == "full" or policies[0].gathered_stages is not None
        if len(choice[2]) > 1 and is_apart:
            for pipelining in choice[2]:
                if policies[0].has_stages(pipelining):
                    # Only where memory counts does a bound depend on more of the schedule than its gathers.
                    counts = policies[0].recompute != "full"
                    bound_s = self._bound_s(shape, policies, (pipelining,), counts_gathers=counts)
                    yield bound_s, (shape, policies, (pipelining,))
            return
        if policies[0].gathered_stages is not None:
            bound_s = self._bound_s(shape, policies, choice[2], counts_gathers=True)
            if bound_s > entry.bound_s:
                yield bound_s, choice
                return
        for pipelining in choice[2]:
            for cut in scorer.cuts(shape, policies, pipelining):
                yield cut.bound_s, (cut,)

    @found_once
    def _ways(self, pp: int, microbatches: int, recompute: Recompute) -> list[tuple[tuple[Pipelining, ...], Live]]:
        """The pipelines of some degrees, those together that differ in their schedule alone, with the microbatches that
        are live under any of them at least."""
        ways: dict[tuple[int, bool], list[Pipelining]] = {}
        for pipelining in self.space.pipelinings(pp, microbatches):
            if self.space.go_together(recompute, pipelining):
                split = splits_backward(pipelining.schedule, pipelining.virtual_stages)
                ways.setdefault((pipelining.virtual_stages, split), []).append(pipelining)
        return [(tuple(each), self.scorer.least_live(pp, microbatches, each)) for each in ways.values()]

    def _bound_s(
        self,
        shape: Shape,
        policies: Sequence[Policy],
        pipelinings: Sequence[Pipelining],
        live: Live = None,
        *,
        counts_gathers: bool = False,
    ) -> float:
        """Seconds below which no step gets under some policies of one recompute mode and some pipelines that differ in
        their schedule alone. ``live`` is as `_ways` gives it, None: not known yet; ``counts_gathers``: whether it is
        counted how often the only pipeline gathers a stage."""
        first = pipelinings[0]
        if live is None and policies[0].recompute == "full":
            live = self.scorer.least_live(shape.degrees[0], shape.microbatches, pipelinings)
        split = splits_backward(first.schedule, first.virtual_stages)
        gathered_by = first if counts_gathers else None
        bounds = self.scorer.bounds
        return bounds.bound_s(shape, policies, first.virtual_stages, split=split, live=live, gathered_by=gathered_by)


def preference(scored: Scored) -> tuple[float, Simplicity, int, int, str]:
    """The sort key of choices: fastest first; among equals the simpler, then the one that keeps more units and has
    larger microbatches."""
    d = scored.decision
    seconds = float(f"{scored.predicted.step_time_s:.6g}")
    return seconds, simplicity(d), -len(d.kept_units), -d.microbatch, d.placement_order


def _least_simplicity(choice: tuple[Any, ...]) -> Simplicity:
    """What no plan of a choice gets below."""
    first = choice[0]
    if isinstance(first, Shape):
        return least_simplicity(*choice)
    if isinstance(first, Cut):
        return least_simplicity(first.shape, first.policies, (first.pipelining,))
    if isinstance(first, Timed):
        return simplicity(first.decision)
    policies = tuple(policy for policy, _ in first.policies)
    offload = bool(first.tables.tables[0].offloaded)
    return least_simplicity(first.shape, policies, (first.pipelining,), offload=offload)


def _expected_s(entry: _Entry) -> float:
    """The bound of an entry, with the bubble of a plain pipeline where none is counted yet."""
    shape = entry.choice[0]
    if not isinstance(shape, Shape):
        return entry.bound_s
    return entry.bound_s * (1 + (shape.degrees[0] - 1) / shape.microbatches)


def _degrees(choice: Shape | Cut | Draft | Timed | Scored) -> tuple[int, int, int]:
    """The degrees of a choice, as (pp, dp, tp)."""
    if isinstance(choice, Timed | Scored):
        return choice.decision.pp, choice.decision.dp, choice.decision.tp
    return choice.degrees if isinstance(choice, Shape) else choice.shape.degrees
