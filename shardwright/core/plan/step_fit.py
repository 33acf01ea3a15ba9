"""What steps that were timed say of their parts: units, what is beside the microbatches, idle time that is lent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy.optimize import brentq, minimize_scalar

from shardwright.core.plan.plan import Plan
from shardwright.core.schedule.simulate import simulate_schedule

LEAST_UPDATE = 0.25
"""Of what is counted for the optimizer's step, what it takes at least: parameters that stay in a cache are at best a
few times as fast."""

Seconds = Sequence[tuple[float, float]]
"""Of every unit, forward and backward."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """What steps of a pipeline, or of one stage, took."""

    factor: float
    """By which units take longer than they say."""
    beside_s: float
    """Beside all microbatches, above what is counted for gradients and optimizer."""
    update_share: float
    """What the optimizer's step took of what is counted for it."""
    idle_lent: float
    """As of `StageCosts`."""


def fit_steps(
    plans: Sequence[Plan], seconds: Seconds, few_s: float, more_s: float, update_share: float = 1.0
) -> StepFit:
    """The parts that make the steps of two plans take what they took.

    What the second step takes above the first is that of the microbatches between; what the first takes above its own
    microbatches is beside them. Where a step is shorter than its parts, idle time was lent: the ranks of a pipeline
    shared a machine. One stage has no idle time: there its optimizer took less than is counted, at least
    `LEAST_UPDATE`. Where that does not explain the steps, the squares of the shares by which they are wrong are least;
    where messages alone take as long, or no unit took any time, the factor is 1.

    Args:
        plans: one pipeline, with few and with many microbatches.
        seconds: of every unit in one microbatch; wrong by one factor.
        few_s: what the first plan's step took.
        more_s: what the second's took above that.
        update_share: of a pipeline, as it was found with one stage.
    """
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
        """The other parts where units take ``factor`` times as long, so that the first step takes what it took, or as
        nearly as they can."""
        (alone_s, lent_s), counted = self._pipeline_s(self.plans[0], factor), self.plans[0].predicted
        lack_s = alone_s + counted.data_parallel_s + self.update_share * counted.optimizer_s - self.few_s
        share, lent = self.update_share, 0.0
        if lack_s > 0 and self.plans[0].decision.pp > 1:
            lent = min(1.0, lack_s / (alone_s - lent_s)) if alone_s > lent_s else 0.0
        elif lack_s > 0 and counted.optimizer_s > 0:
            share = max(LEAST_UPDATE, share - lack_s / counted.optimizer_s)
        return StepFit(factor, max(0.0, -lack_s), share, lent)

    def predicted_s(self, factor: float) -> tuple[float, float]:
        """Both steps, with the other parts as they follow."""
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
        """Of the plan's pipeline, its messages taking what they are predicted to take: with nothing of the idle time
        lent, and with all of it."""
        stages = [[factor * sum(part) for part in zip(*(self.seconds[unit] for unit in units), strict=True)]
                  for units in planned.stage_units]  # fmt: skip
        forward, half = tuple(ahead for ahead, _ in stages), tuple(back / 2 for _, back in stages)
        costs = replace(planned.stage_costs(), forward_s=forward, input_grad_s=half, weight_grad_s=half, idle_lent=0.0)
        schedule = planned.build_schedule()
        alone_s = simulate_schedule(schedule, costs).makespan_s
        if planned.decision.pp == 1:
            return alone_s, alone_s
        return alone_s, simulate_schedule(schedule, replace(costs, idle_lent=1.0)).makespan_s
