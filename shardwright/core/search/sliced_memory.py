"""The memory of ranks whose sequences go through the pipeline in slices, followed from action to action
(`core.search.sliced_walk`)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.core.plan.decision import Decision
from shardwright.core.schedule.actions import Action, B, F, W
from shardwright.core.schedule.messages_by_action import messages_by_action
from shardwright.core.search.sliced_stages import SlicedStages
from shardwright.core.search.sliced_walk import Moment, peaks, walk
from shardwright.core.tables.memory import MemoryUse, live_microbatches
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_tables import UNCOUNTED_BYTES, RankTables

SETTLED = 3
"""The microbatches for each pipeline rank behind which a schedule's memory is as in the rest of it."""


def followed(decision: Decision) -> Decision:
    """The decision with as few microbatches as show its memory: some rounds of the pipeline where activations settle,
    all of them where they grow with every one, as under schedules that run all forwards first."""
    few = SETTLED * decision.pp
    if decision.microbatches <= few:
        return decision
    asked = decision.schedule, decision.pp
    live = [live_microbatches(*asked, m, decision.virtual_stages) for m in (few, decision.microbatches)]
    if live[0] != live[1]:
        return decision
    return replace(decision, batch=few * decision.dp * decision.microbatch)


class SlicedMemory:
    """The memory of one choice in slices, from the tables of whole sequences and those of its slices."""

    def __init__(self, decision: Decision, ranked: RankTables, request: MemoryRequest, stages: SlicedStages) -> None:
        self.decision, self.ranked, self.request, self.stages = decision, ranked, request, stages
        self.ends = ranked.ends(decision.stage_starts)
        self._schedule = followed(decision).compute_schedule(None)
        self._counts = messages_by_action(self._schedule) if decision.pp > 1 else ()

    def memory(self, before: Sequence[MemoryUse]) -> tuple[MemoryUse, ...]:
        """The memory of every rank, which for whole sequences is as ``before``."""
        decision = self.decision
        buckets = self.ranked.buckets(decision.stage_starts, decision.stage_ranks, self.request)
        found = []
        for rank, use in enumerate(before):
            staying = self._staying(rank)
            live, beside, peak, full = peaks(self.moments(rank))
            # A bucket is there from the first gradient on, and never beside all of them.
            most = min(full, peak + buckets[rank]) + staying
            buffers = beside + staying + buckets[rank]
            apart = use.gradients_bytes + live + buffers - most
            found.append(
                replace(
                    use,
                    activations_bytes=live,
                    buffers_bytes=buffers + max(0, -apart),
                    apart_bytes=max(0, apart),
                )
            )
        return tuple(found)

    def moments(self, rank: int) -> Iterator[Moment]:
        """The memory of a rank at each of its actions, without what stays all through a step."""
        order, table, longest = self._schedule.table[rank], self.ranked.tables[rank], self.stages.longest_share
        first = list(dict.fromkeys(p.stage for action in order for p in action.flat if p.kind in (B, W)))
        held = {stage: self.ends[stage] for stage in first}
        of = self.stages.of_rank(table, held, first)
        crossing = [0, *(int(table.boundary_bytes[start] * longest) for start, _ in self.ends[1:])]
        sent = beginning = [0] * len(order)
        if self._counts:
            arriving, coming = self._constants(rank, order)
            sent = [size + more for size, more in zip(self._counts[rank].sizes(crossing), coming, strict=True)]
            both = zip(self._counts[rank].beginning_sizes(crossing), arriving, coming, strict=True)
            beginning = [size + max(more) for size, *more in both]
        return walk(order, of, sent, beginning)

    def _constants(self, rank: int, order: Sequence[Action]) -> tuple[list[int], list[int]]:
        """The bytes of messages without a gradient that come in for each action of a rank, and of those for the next
        one, whose receives are posted by then. They come with the first slice, and are among what it holds from then
        on."""
        sizes = [*(self.ranked.tables[rank].constant_bytes or (0,) * self.ranked.units), 0]
        needed = [
            max((sizes[self.ends[p.stage][0]] for p in a.flat if p.kind is F and p.stage and not p.slice), default=0)
            for a in order
        ]
        return needed, [*needed[1:], 0]

    def _staying(self, rank: int) -> int:
        """The bytes that stay on a rank all through the passes beside those: what no graph shows, and messages without
        a gradient that it has sent and does not keep itself."""
        table, placement = self.ranked.tables[rank], self.decision.stage_ranks
        if self.decision.pp == 1 or not table.constant_bytes:
            return UNCOUNTED_BYTES
        constant, held = (
            [*table.constant_bytes, 0],
            [e for e, on in zip(self.ends, placement, strict=True) if on == rank],
        )
        return UNCOUNTED_BYTES + max(max(0, constant[b] - self.stages.kept_before(table, (a, b))) for a, b in held)
