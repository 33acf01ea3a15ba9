"""Where the time of a step goes, rank by rank: computing, waiting for messages, waiting for the pipeline, the tail."""

from dataclasses import dataclass, replace

from shardwright.core.plan import Plan
from shardwright.core.simulate import simulate_schedule


@dataclass(frozen=True, slots=True)
class RankStep:
    """One pipeline rank's step; the parts add up to the step's time."""

    compute_s: float
    """Forward and backward of all microbatches, with what is computed again and the tensor axis's collectives."""
    transfer_s: float
    """Idle that would not be there if messages between stages took no time."""
    bubble_s: float
    """Idle of the schedule itself: filling, draining, unequal stages."""
    gradients_s: float
    """Reduction of gradients over the data axis and between tied stages that nothing hides."""
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.transfer_s + self.bubble_s + self.gradients_s + self.optimizer_s


def break_down(plan: Plan) -> tuple[RankStep, ...]:
    """The parts of a planned step, for every pipeline rank.

    The schedule is simulated twice, with messages and without: what differs in a rank's idle time, messages cost it.
    Raises ScheduleError when the schedule does not admit the plan's sizes.
    """
    schedule, costs = plan.build_schedule(), plan.stage_costs()
    sent = simulate_schedule(schedule, costs)
    free = simulate_schedule(schedule, replace(costs, transfer_s=tuple(0.0 for _ in costs.transfer_s)))
    tail = plan.predicted
    found = []
    for rank in range(sent.ranks):
        compute = sum(float(b - a) for a, b in zip(sent.start_s[rank], sent.end_s[rank], strict=True))
        idle = max(0.0, sent.makespan_s - compute)
        bubble = min(idle, max(0.0, free.makespan_s - compute))
        found.append(RankStep(compute, idle - bubble, bubble, tail.data_parallel_s, tail.optimizer_s))
    return tuple(found)
