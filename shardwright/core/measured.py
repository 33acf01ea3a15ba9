"""What stages cost, from timelines that were measured."""

import statistics
from collections import defaultdict
from collections.abc import Iterable

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import B, F, I, Kind, W
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.timeline import Span, Timeline


def measured_costs(timelines: Iterable[Timeline]) -> StageCosts:
    """The costs of stages whose actions were timed, for another schedule of the same stages.

    Seconds are medians over microbatches and timelines. Where only whole backwards ran, input and weight gradient take
    half of them each. A transfer takes what passed between the end of the action that sent and the start of the one
    that received, where the receiving rank had nothing else to do; 0 where it always had.

    Raises:
        ScheduleError: there is no timeline, or one has no forward or no backward of a stage.
    """
    seconds: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    crossing: defaultdict[int, list[float]] = defaultdict(list)
    stages = 0
    for timeline in timelines:
        ran: dict[tuple[int, Kind, int], Span] = {}
        free_s: dict[tuple[int, Kind, int], float] = {}
        for rank in range(timeline.ranks):
            before = 0.0
            for span in timeline.spans(rank):
                for part in span.action.flat:
                    key = (part.stage, part.kind, part.microbatch or 0)
                    ran[key], free_s[key] = span, before
                    stages = max(stages, part.stage + 1)
                if not span.action.parts:
                    seconds[span.action.stage, span.action.kind].append(span.end_s - span.start_s)
                before = span.end_s
        for (stage, kind, mb), span in ran.items():
            forward = kind is F
            nexts = ((stage + 1, F),) if forward else ((stage - 1, B), (stage - 1, I))
            for target in nexts if kind is not W else ():
                found = ran.get((*target, mb))
                if found is None or found.rank == span.rank or free_s[(*target, mb)] > span.end_s:
                    continue
                crossing[min(stage, target[0])].append(max(0.0, found.start_s - span.end_s))
    if not stages:
        raise ScheduleError("no timeline was given, or nothing ran in it: record at least one training step")

    def middle(stage: int, kind: Kind) -> float | None:
        found = seconds.get((stage, kind))
        return statistics.median(found) if found else None

    forward_s, input_s, weight_s = [], [], []
    for stage in range(stages):
        passes, whole, early, late = (middle(stage, kind) for kind in (F, B, I, W))
        if early is None or late is None:
            early = late = None if whole is None else whole / 2
        if passes is None or early is None or late is None:
            raise ScheduleError(f"the timelines lack a forward or a backward of stage {stage}: record training steps")
        forward_s.append(passes)
        input_s.append(early)
        weight_s.append(late)
    transfer_s = tuple(statistics.median(crossing[b]) if crossing.get(b) else 0.0 for b in range(stages - 1))
    return StageCosts(tuple(forward_s), tuple(input_s), tuple(weight_s), transfer_s, (1,) * stages)
