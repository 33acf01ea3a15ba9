"""The parts of timed steps: units, time beside the microbatches, idle time that is lent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.core.plan.plan import Plan
from shardwright.core.schedule.simulate import simulate_schedule

LEAST_UPDATE = 0.25
"""The least share of the counted optimizer time that its step takes: parameters that stay in a cache are at best a few
times as fast."""

Seconds = Sequence[tuple[float, float]]
"""The (forward, backward) seconds of each unit."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """The result of timed steps of a pipeline, or of one stage."""

    factor: float
    """The factor by which units take longer than their own seconds."""
    beside_s: float
    """The seconds beside all microbatches, above the counted ones of gradients and optimizer."""
    update_share: float
    """The share of the counted optimizer time that its step took."""
    idle_lent: float
    """The share of idle time that is lent, as in `StageCosts`."""


def fit_steps(
    plans: Sequence[Plan], seconds: Seconds, few_s: float, more_s: float, update_share: float = 1.0
) -> StepFit:
    """The parts with which the predicted steps of two plans take the measured time.

    The time of the second step above the first is that of the additional microbatches. The time of the first step above
    its own microbatches is beside them. Where a step is shorter than its parts, idle time was lent: the ranks of a
    pipeline shared a machine. One stage has no idle time: there its optimizer took less than is counted, at least
    `LEAST_UPDATE`. Where that does not explain the steps, the squares of their relative errors are minimised. Where
    messages alone take as long, or no unit took any time, the factor is 1.

    Args:
        plans: two plans of one pipeline, with few and with many microbatches.
        seconds: the seconds of every unit in one microbatch, all wrong by one factor.
        few_s: the measured time of the first plan's step.
        more_s: the measured time of the second plan's step above that.
        update_share: the share for a pipeline, as found with one stage.
    """
    from scipy.optimize import brentq, minimize_scalar  # which planning does without: loading it takes a while

    steps = _Steps(plans, seconds, few_s, more_s, update_share)
    if steps.differ_s(0.0) >= more_s or not sum(map(sum, seconds)):
        return steps.at(1.0)
    most = 1.0
    while steps.differ_s(most) < more_s:
        most *= 2
    factor = float(brentq(lambda tried: steps.differ_s(tried) - more_s, 0.0, most, rtol=1e-12))
    if steps.wrong(factor) > 1e-12:
        factor = float(minimize_scalar(steps.wrong, bounds=(0.0, factor), method="bounded").x)
    return steps.at(factor)


@dataclass(frozen=True, slots=True)
class _Steps:
    plans: Sequence[Plan]
    seconds: Seconds
    few_s: float
    more_s: float
    update_share: float

    def at(self, factor: float) -> StepFit:
        """The other parts where units take ``factor`` times as long: those with which the first step takes its measured
        time, or as nearly as possible."""
        (alone_s, lent_s), counted = self._pipeline_s(self.plans[0], factor), self.plans[0].predicted
        lack_s = alone_s + counted.data_parallel_s + self.update_share * counted.optimizer_s - self.few_s
        share, lent = self.update_share, 0.0
        if lack_s > 0 and self.plans[0].decision.pp > 1:
            lent = min(1.0, lack_s / (alone_s - lent_s)) if alone_s > lent_s else 0.0
        elif lack_s > 0 and counted.optimizer_s > 0:
            share = max(LEAST_UPDATE, share - lack_s / counted.optimizer_s)
        return StepFit(factor, max(0.0, -lack_s), share, lent)

    def predicted_s(self, factor: float) -> tuple[float, float]:
        """The predicted seconds of both steps, with the other parts that follow from the factor."""
        found, counted = self.at(factor), self.plans[0].predicted
        beside_s = found.beside_s + counted.data_parallel_s + found.update_share * counted.optimizer_s
        few, many = (self._pipeline_s(planned, factor) for planned in self.plans)
        lent = found.idle_lent
        return (1 - lent) * few[0] + lent * few[1] + beside_s, (1 - lent) * many[0] + lent * many[1] + beside_s

    def differ_s(self, factor: float) -> float:
        few, many = self.predicted_s(factor)
        return many - few

    def wrong(self, factor: float) -> float:
        pairs = zip(self.predicted_s(factor), (self.few_s, self.few_s + self.more_s), strict=True)
        return sum((said / took - 1) ** 2 for said, took in pairs)

    def _pipeline_s(self, planned: Plan, factor: float) -> tuple[float, float]:
        """The seconds of the plan's pipeline, with messages as predicted: with no idle time lent, and with all of
        it."""
        stages = [[factor * sum(part) for part in zip(*(self.seconds[unit] for unit in units), strict=True)]
                  for units in planned.stage_units]  # fmt: skip
        forward, half = tuple(ahead for ahead, _ in stages), tuple(back / 2 for _, back in stages)
        costs = replace(planned.stage_costs(), forward_s=forward, input_grad_s=half, weight_grad_s=half, idle_lent=0.0)
        schedule = planned.build_schedule()
        alone_s = simulate_schedule(schedule, costs).makespan_s
        if planned.decision.pp == 1:
            return alone_s, alone_s
        return alone_s, simulate_schedule(schedule, replace(costs, idle_lent=1.0)).makespan_s
