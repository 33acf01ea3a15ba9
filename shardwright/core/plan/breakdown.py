"""The time of a step by its parts, for each rank: computing, waiting for messages, waiting for the pipeline, tail."""

from dataclasses import dataclass, replace

from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import StageCosts
from shardwright.core.schedule.simulate import simulate_schedule


@dataclass(frozen=True, slots=True)
class RankStep:
    """The step of one pipeline rank; the parts add up to the step's time."""

    compute_s: float
    """Seconds of the forward and backward of all microbatches, with recomputation."""
    tensor_s: float
    """Seconds of collectives on the tensor axis, which a pass waits for."""
    transfer_s: float
    """Idle seconds that messages between stages cause."""
    bubble_s: float
    """Idle seconds of the schedule itself: filling, draining, unequal stages."""
    gradients_s: float
    """Seconds of the reduction of gradients over the data axis and between tied stages that nothing hides."""
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.tensor_s + self.transfer_s + self.bubble_s + self.gradients_s + self.optimizer_s


def break_down(plan: Plan) -> tuple[RankStep, ...]:
    """The parts of a planned step, for every pipeline rank.

    The schedule is simulated twice, with messages and without: the difference in a rank's idle time is the cost of
    messages. Of an edited plan it is the step before the edit, which its costs are of.
    Raises ScheduleError when the schedule does not admit the plan's sizes.
    """
    plan = plan.as_counted
    schedule, costs = plan.build_schedule(), plan.pass_costs()
    sent = simulate_schedule(schedule, costs)
    each = (costs,) if isinstance(costs, StageCosts) else costs
    free = simulate_schedule(schedule, [replace(own, transfer_s=tuple(0.0 for _ in own.transfer_s)) for own in each])
    tail = plan.predicted
    found = []
    for rank in range(sent.ranks):
        busy = sum(float(b - a) for a, b in zip(sent.start_s[rank], sent.end_s[rank], strict=True))
        idle = max(0.0, sent.makespan_s - busy)
        bubble = min(idle, max(0.0, free.makespan_s - busy))
        tensor = min(busy, _collectives_s(plan, rank))
        found.append(RankStep(busy - tensor, tensor, idle - bubble, bubble, tail.data_parallel_s, tail.optimizer_s))
    return tuple(found)


def _collectives_s(plan: Plan, rank: int) -> float:
    """The seconds that a pipeline rank's units spend on collectives over the tensor axis in all microbatches."""
    costs = plan.costs.on_rank(rank)
    held = (unit for units, at in zip(plan.stage_units, plan.decision.stage_ranks, strict=True) if at == rank
            for unit in units)  # fmt: skip
    return plan.microbatches * sum(costs.classes[costs.unit_classes[unit]].collective_s for unit in held)
