"""The memory of every pipeline rank in a planned step, by class, from action to action."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shardwright.core.capabilities import PLAIN_MEMORY, MemoryTraits
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule.peak_memory import StageMemory, walk_memory
from shardwright.core.schedule.simulate import simulate_schedule
from shardwright.core.schedule.timeline import Span
from shardwright.core.tables.memory import MemoryUse


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory of one rank from ``start_s`` to ``end_s``, in seconds from the start of the step."""

    start_s: float
    end_s: float
    memory: MemoryUse


def memory_over_time(plan: Plan, traits: MemoryTraits = PLAIN_MEMORY) -> tuple[tuple[Moment, ...], ...]:
    """The moments of each pipeline rank, one after the other from the start of the step to its end.

    Parameters, optimizer states and the batch stay. Activations of a microbatch appear with its forward and go with its
    backward, or with its weight gradient where the backward is split: a plan does not say which of them the input
    gradient frees. Buffers exist while an action runs, at their maximum for every action. Gradients stay too, unless
    the plan's runtime, whose memory traits are ``traits``, makes them anew in every step: then those of a stage appear
    with its first backward. The last moment is the optimizer's. No moment is shown above the predicted peak: the excess
    is in its ``apart_bytes``. Of an edited plan it is the step before the edit, which its figures are of.
    Raises ScheduleError when the schedule does not admit the plan's sizes.
    """
    plan = plan.as_counted
    timeline = simulate_schedule(plan.build_schedule(), plan.pass_costs())
    count = plan.decision.slice_count  # slices alike: the costs of single ones do not show what they share
    kept = [size // count for size in plan.stage_costs().activation_bytes]
    return tuple(_of_rank(plan, traits, rank, timeline.spans(rank), kept) for rank in range(timeline.ranks))


def _of_rank(
    plan: Plan, traits: MemoryTraits, rank: int, spans: Sequence[Span], kept: Sequence[int]
) -> tuple[Moment, ...]:
    most = plan.predicted.memory_by_stage_rank[rank]
    share = _gradient_bytes(plan, rank, most.gradients_bytes)
    sizes = {stage: StageMemory(kept[stage], gradients=size) for stage, size in share.items()}
    made_anew = most.apart_bytes > 0 or traits.gradients_when_made
    memories = tuple(walk_memory([span.action for span in spans], sizes))
    # Values that several units of a stage share count once in the peak; the costs of single units do not show that.
    peak = max(1, *(memory.activations for memory in memories))
    found: list[Moment] = []

    def until(end_s: float, activations: int, buffers_bytes: int, gradients: int, update_bytes: int = 0) -> None:
        start_s = found[-1].end_s if found else 0.0
        if end_s <= start_s:
            return
        use = replace(
            most,
            activations_bytes=activations * most.activations_bytes // peak,
            gradients_bytes=gradients if made_anew else most.gradients_bytes,
            buffers_bytes=buffers_bytes,
            apart_bytes=0,
            update_bytes=update_bytes,
        )
        found.append(Moment(start_s, end_s, replace(use, apart_bytes=max(0, use.total_bytes - most.total_bytes))))

    live = gradients = 0
    for span, memory in zip(spans, memories, strict=True):
        until(span.start_s, live, 0, gradients)
        _, _, live, gradients = memory
        until(span.end_s, memory.activations, most.buffers_bytes, gradients)
    until(plan.predicted.step_time_s, live, 0, gradients, most.update_bytes)
    return tuple(found)


def _gradient_bytes(plan: Plan, rank: int, total_bytes: int) -> dict[int, int]:
    """The gradient bytes of each stage of the rank, in proportion to the trained parameters of its units."""
    costs = plan.costs.on_rank(rank)
    held = {
        stage: sum(costs.classes[costs.unit_classes[unit]].trained_elements for unit in units)
        for stage, (units, at) in enumerate(zip(plan.stage_units, plan.decision.stage_ranks, strict=True))
        if at == rank
    }
    everything = max(1, sum(held.values()))
    bounds = [0]
    for elements in held.values():
        bounds.append(bounds[-1] + elements)
    return {
        stage: total_bytes * b // everything - total_bytes * a // everything
        for stage, (a, b) in zip(held, pairwise(bounds), strict=True)
    }
