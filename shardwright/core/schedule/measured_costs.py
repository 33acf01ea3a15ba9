"""The costs of stages, from timelines that were measured."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import B, F, I, Kind, W
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.timeline import Span, Timeline


def measured_costs(timelines: Iterable[Timeline]) -> StageCosts:
    """The costs of stages whose actions were timed, for another schedule of the same stages.

    Seconds are medians over microbatches and timelines. A transfer takes what passed between the end of the action that
    sent and the start of the one that received, where the receiving rank had nothing else to do; 0 where it always had.

    Splitting a backward costs something: its forward keeps more, and its halves take longer than the whole. To predict
    schedules of either kind, record one in which some microbatches are split:
    ``split_backward(schedule, range(1, microbatches, 2), delay=1)``. The time by which their forwards take longer is
    then counted to the input gradient. Where only whole backwards ran, a half takes half of one; where only halves did,
    a whole one takes both.

    Raises:
        ScheduleError: there is no timeline, or one has no forward or no backward of a stage, ran slices, or is of jobs.
    """
    seconds: defaultdict[tuple[int, Kind, bool], list[float]] = defaultdict(list)
    crossing: defaultdict[int, list[float]] = defaultdict(list)
    stages = 0
    for timeline in timelines:
        if timeline.held is not None:
            raise ScheduleError("a timeline of jobs has no stages: record the steps of a pipeline")
        ran: dict[tuple[int, Kind, int], Span] = {}
        free_s: dict[tuple[int, Kind, int], float] = {}
        for rank in range(timeline.ranks):
            before = 0.0
            for span in timeline.spans(rank):
                for part in span.action.flat:
                    if part.slice is not None:
                        raise ScheduleError(f"{part} is of a slice: costs are measured of microbatches that run whole")
                    key = (part.stage, part.kind, part.microbatch or 0)
                    ran[key], free_s[key] = span, before
                    stages = max(stages, part.stage + 1)
                before = span.end_s
        for (stage, kind, mb), span in ran.items():
            if not span.action.parts:
                seconds[stage, kind, (stage, W, mb) in ran].append(span.end_s - span.start_s)
            forward = kind is F
            nexts = ((stage + 1, F),) if forward else ((stage - 1, B), (stage - 1, I))
            for target in nexts if kind is not W else ():
                found = ran.get((*target, mb))
                if found is None or found.rank == span.rank or free_s[(*target, mb)] > span.end_s:
                    continue
                crossing[min(stage, target[0])].append(max(0.0, found.start_s - span.end_s))
    if not stages:
        raise ScheduleError("no timeline was given, or nothing ran in it: record at least one training step")

    def middle(stage: int, kind: Kind, is_split: bool) -> float | None:
        found = seconds.get((stage, kind, is_split))
        return statistics.median(found) if found else None

    forward_s, input_s, weight_s, whole_s = [], [], [], []
    for stage in range(stages):
        passes, before_split = middle(stage, F, False), middle(stage, F, True)
        whole, early, late = middle(stage, B, False), middle(stage, I, True), middle(stage, W, True)
        if early is None or late is None:
            early = late = None if whole is None else whole / 2
        elif passes is not None and before_split is not None:
            early += before_split - passes
        passes = before_split if passes is None else passes
        if passes is None or early is None or late is None:
            raise ScheduleError(f"the timelines lack a forward or a backward of stage {stage}: record training steps")
        forward_s.append(passes)
        input_s.append(max(early, 0.0))
        weight_s.append(late)
        whole_s.append(whole or early + late)
    transfer_s = tuple(statistics.median(crossing[b]) if crossing.get(b) else 0.0 for b in range(stages - 1))
    costs = StageCosts(tuple(forward_s), tuple(input_s), tuple(weight_s), transfer_s, (1,) * stages)
    return costs if costs.backward_s == tuple(whole_s) else replace(costs, whole_backward_s=tuple(whole_s))
