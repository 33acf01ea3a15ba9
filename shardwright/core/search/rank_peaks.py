"""The peak memory of each rank, more exact than the estimate that cuts use: activations by stage, and gradients only
while they exist."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwright.core.plan.decision import Decision
from shardwright.core.schedule.action_table import ActionTable
from shardwright.core.schedule.actions import Action, B, W
from shardwright.core.schedule.messages_by_action import MessageCounts, messages_by_action, usual_messages_by_action
from shardwright.core.schedule.messages_under_way import usual_messages_under_way
from shardwright.core.schedule.named_schedule import named_schedule
from shardwright.core.schedule.peak_memory import NO_MESSAGES, Messages, StageMemory, peak_below_sum
from shardwright.core.search.space import splits_backward
from shardwright.core.tables.gathered_stages import gathering_moments, peak_of
from shardwright.core.tables.gathered_units import stage_passes
from shardwright.core.tables.memory import MemoryUse, live_bytes, live_microbatches
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.tables.stage_memory import stage_memories
from shardwright.core.tables.stage_moments import StageMoments

MOST_FOLLOWED = 16
"""The most stages whose messages are followed from action to action: of more, schedules are long, and searches have
many of them."""


def by_stage(
    decision: Decision, ranked: RankTables, memory: tuple[MemoryUse, ...], request: MemoryRequest
) -> tuple[MemoryUse, ...]:
    """Memory with activations by the stage that each belongs to, less what input gradients have freed. A cut counts all
    of them as those of a rank's largest stage, held until the backward has ended."""
    if decision.virtual_stages == 1 and not splits_backward(decision.schedule, 1):
        return memory
    sizes = ranked.passed_on_bytes(decision.stage_starts, decision.stage_ranks)
    live = live_bytes(decision.schedule, decision.pp, decision.microbatches, decision.virtual_stages, *sizes)
    return with_activations(decision, ranked, memory, live, request)


def with_activations(
    decision: Decision,
    ranked: RankTables,
    memory: Sequence[MemoryUse],
    activations: Sequence[int],
    request: MemoryRequest,
) -> tuple[MemoryUse, ...]:
    """Memory with other activations."""
    buffers = ranked.buffers(decision.stage_starts, decision.stage_ranks, request)
    if splits_backward(decision.schedule, decision.virtual_stages):
        more = ranked.input_grads(decision.stage_starts, decision.stage_ranks)
        buffers = [beside + size for beside, size in zip(buffers, more, strict=True)]
    return tuple(
        replace(use, activations_bytes=size, buffers_bytes=beside, apart_bytes=0)
        for use, size, beside in zip(memory, activations, buffers, strict=True)
    )


def is_long(decision: Decision) -> bool:
    """Whether a step has so many microbatches that gradients exist at its peak."""
    return decision.microbatches > 2 * decision.stages


def less_apart(
    decision: Decision,
    ranked: RankTables,
    memory: tuple[MemoryUse, ...],
    request: MemoryRequest,
    *,
    until_over: bool = False,
) -> tuple[MemoryUse, ...]:
    """Memory less what never exists at once, where gradients take memory when they are made: messages, and in a step
    of few microbatches gradients, that are not there at the fullest moment. ``until_over``: whether all else may be
    left as it is once a rank is found to have too little memory."""
    if request.divides_gradients:
        return _less_divided(decision, ranked, memory, request, until_over=until_over)
    if not request.gradients_when_made or decision.shard >= 2:
        return memory
    ends, placement = ranked.ends(decision.stage_starts), decision.stage_ranks
    # A bucket is there before all of its gradients are, and never beside all gradients.
    buckets = ranked.buckets(decision.stage_starts, placement, request)
    buffers = ranked.buffers(decision.stage_starts, placement, request)
    if splits_backward(decision.schedule, decision.virtual_stages):
        walked = _apart_of_halves(decision, ranked, request)
        apart_of = [max(own, bucket + min(0, own)) for own, bucket in zip(walked, buckets, strict=True)]
        return tuple(
            replace(use, buffers_bytes=beside + max(0, -apart), apart_bytes=max(0, apart))
            for use, beside, apart in zip(memory, buffers, apart_of, strict=True)
        )
    if is_long(decision) and decision.stages > MOST_FOLLOWED:
        return tuple(replace(use, apart_bytes=bucket) for use, bucket in zip(memory, buckets, strict=True))
    few = min(decision.microbatches, 2 * decision.stages)
    schedule = _schedule(decision, few)
    sent = _Sent(decision, ranked, request, schedule, few)
    found = []
    for rank, (use, beside, bucket) in enumerate(zip(memory, buffers, buckets, strict=True)):
        order = schedule.table[rank]
        stages = _stages_of(decision, ranked, rank, order, request)
        messages = sent.messages(rank)
        bare = {at: _without_gradients(of) for at, of in stages.items()}
        # With all gradients at every moment, and no bucket, which is never beside all of them.
        apart = bucket + peak_below_sum(order, bare, messages, sent.most[rank])
        if request.shares_sums and decision.microbatches == 1:  # buckets leave while gradients are made
            stages = {
                stage: replace(sizes, first_backward=stage_passes(ranked.tables[rank], ends[stage], request).first)
                for stage, sizes in stages.items()
            }
        if not is_long(decision):
            apart = max(apart, peak_below_sum(order, stages, messages, sent.most[rank]))
        found.append(replace(use, buffers_bytes=beside + max(0, -apart), apart_bytes=max(0, apart)))
    return tuple(found)


def _schedule(decision: Decision, microbatches: int) -> ActionTable:
    """The schedule of a decision with so many microbatches; one that is generated has its own number."""
    if decision.generated:
        return decision.build_schedule(None)
    return named_schedule(decision.schedule, decision.pp, microbatches, decision.virtual_stages)


class _Sent:
    """The messages between stages in a step of so many microbatches, followed from action to action where there are
    few stages."""

    def __init__(
        self, decision: Decision, ranked: RankTables, request: MemoryRequest, schedule: ActionTable, microbatches: int
    ) -> None:
        starts, placement = decision.stage_starts, decision.stage_ranks
        self.most: Sequence[int] = [0] * decision.pp
        """The bytes of messages that are counted on every rank; 0 where they are not followed."""
        self._counts: Sequence[MessageCounts] = ()
        self._tables, self._starts = ranked.of_bytes.tables, starts
        if decision.pp == 1 or decision.stages > MOST_FOLLOWED:
            return
        if decision.generated:
            self._counts, asked = messages_by_action(schedule), request
        else:
            settled = decision.schedule, decision.pp, microbatches, decision.virtual_stages
            self._counts = usual_messages_by_action(*settled)
            # Those of as many microbatches as are followed: under some schedules they grow with every one.
            asked = replace(request, under_way=usual_messages_under_way(*settled))
        self.most = ranked.messages(starts, placement, asked)

    def messages(self, rank: int) -> Messages:
        if not self._counts:
            return NO_MESSAGES
        boundaries = self._tables[rank].boundary_bytes
        crossing = [0, *(boundaries[start] for start in self._starts[1:])]
        return Messages(self._counts[rank].sizes(crossing), self._counts[rank].beginning_sizes(crossing))


def _without_gradients(stage: StageMemory) -> StageMemory:
    """The memory of a stage whose gradients are counted as there already."""
    behind = stage.working if stage.backward_again is None else stage.backward_again
    return replace(stage, gradients=0, first_backward=stage.activations + behind)


def _stages_of(
    decision: Decision, ranked: RankTables, rank: int, order: Sequence[Action], request: MemoryRequest
) -> dict[int, StageMemory]:
    """The memory of the stages of a rank, which runs them in an order."""
    ends = ranked.ends(decision.stage_starts)
    held = {stage: ends[stage] for stage, on in enumerate(decision.stage_ranks) if on == rank}
    # What is exchanged, or in another precision than sums are, is made before it is added.
    at_once = decision.dp == decision.tp == 1 and decision.precision == "fp32" and not decision.shard
    turns = _backward_order(order)
    return stage_memories(ranked.tables[rank], held, turns, request.gradient_width, adds_at_once=at_once)


def _apart_of_halves(decision: Decision, ranked: RankTables, request: MemoryRequest) -> list[int]:
    """The bytes by which the peak of every rank is below the sum of its parts under a schedule with split backwards;
    below 0 where an input gradient holds more for a while than any other pass. Long schedules are extrapolated from
    short ones, as in `live_bytes`."""

    def apart(microbatches: int) -> list[int]:
        schedule = _schedule(decision, microbatches)
        sent = _Sent(decision, ranked, request, schedule, microbatches)
        every = [
            (rank, order, _stages_of(decision, ranked, rank, order, request))
            for rank, order in enumerate(schedule.table)
        ]
        return [peak_below_sum(order, stages, sent.messages(rank), sent.most[rank]) for rank, order, stages in every]

    first, second = 4 * decision.pp, 5 * decision.pp
    if decision.microbatches <= second or decision.generated:
        return apart(decision.microbatches)
    return [min(pair) for pair in zip(apart(first), apart(second), strict=True)]


def _less_divided(
    decision: Decision,
    ranked: RankTables,
    memory: tuple[MemoryUse, ...],
    request: MemoryRequest,
    *,
    until_over: bool,
) -> tuple[MemoryUse, ...]:
    """Memory less what is never there at once of units or stages that are gathered and of gradients that are summed
    while the step runs, the fullest rank first. Long schedules are extrapolated from short ones, as in `live_bytes`."""
    starts, placement = decision.stage_starts, decision.stage_ranks

    def peak(rank: int, microbatches: int) -> int:
        if decision.generated:
            moments = StageMoments(decision.with_residency(decision.compute_schedule(None)).table)
        else:
            sizes = decision.pp, microbatches, decision.virtual_stages
            residency = decision.gathered_stages, decision.look_ahead, decision.reduces_each
            moments = gathering_moments(decision.schedule, *sizes, *residency)
        return peak_of(rank, ranked, starts, placement, moments, request)

    first, second = 4 * decision.pp, 5 * decision.pp
    is_whole = decision.microbatches <= second or bool(decision.generated) or _keeps_more(decision, second)
    growth = (decision.microbatches - second) / (second - first)
    passing, over = ranked.passing(starts, placement, request), ranked.over_by_rank(memory)
    found = list(memory)
    for rank in sorted(range(decision.pp), key=lambda rank: -over[rank]):
        if is_whole:
            most = peak(rank, decision.microbatches)
        else:
            early, late = peak(rank, first), peak(rank, second)
            most = int(late + (late - early) * growth + 0.5)
        use = memory[rank]
        apart = use.activations_bytes + use.gradients_bytes + passing[rank] - most
        beside = use.buffers_bytes + max(0, -apart)  # as where two passes overlap
        found[rank] = replace(use, buffers_bytes=beside, apart_bytes=max(0, apart))
        if until_over and ranked.over_by_rank(found)[rank] > 0:
            break
    return tuple(found)


def _keeps_more(decision: Decision, microbatches: int) -> bool:
    """Whether more activations are live in a step than in one of so many microbatches: what is largest at first may not
    be so in the end."""

    def live(count: int) -> Sequence[int]:
        return live_microbatches(decision.schedule, decision.pp, count, decision.virtual_stages)

    return live(microbatches) != live(decision.microbatches)


def _backward_order(actions: Iterable[Action]) -> list[int]:
    """The stages in the order in which they first make gradients of parameters."""
    return list(dict.fromkeys(part.stage for action in actions for part in action.flat if part.kind in (B, W)))
