"""When the jobs of a plan end: their passes, simulated under a policy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.core.errors import PlanError, nearest
from shardwright.core.jobs.policies import OPTIMUM, policy_names
from shardwright.core.jobs.shard_pass import ShardPass
from shardwright.core.jobs.simulate import simulate_jobs

MOST_SIMULATED = 200_000
"""The most passes that are simulated. Of longer lists each simulated pass stands for several of the same kind."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """The ends of a simulated list of jobs."""

    makespan_s: float
    finish_s: tuple[float, ...]


def require_policy(policy: str, *, copies_beside: bool) -> None:
    """Raise PlanError for a policy that is not known, or that knows no copies where these run beside passes."""
    known = policy_names()
    if policy not in known:
        raise PlanError(f"policy={policy!r}: {nearest(str(policy), known)}")
    if policy == OPTIMUM and copies_beside:
        others = ", ".join(name for name in known if name != OPTIMUM)
        raise PlanError(f"policy={policy!r} knows no copies that run beside passes: take one of {others}")


def simulated(
    jobs: Sequence[tuple[Sequence[ShardPass], int]],
    devices: int,
    policy: str,
    *,
    double_buffering: bool,
    copies_beside: bool,
) -> Simulated:
    """The ends of jobs, each given by the passes of a step and the number of steps. A job has ended when its last pass
    has been copied out.

    Where copies take the devices' own time, a pass lasts as long as it computes and is copied. Where a simulated pass
    stands for several, it lasts as long as these together, so that every job has all its work: ends are wrong by about
    a pass so long.
    """
    require_policy(policy, copies_beside=copies_beside)
    total = sum(len(passes) * steps for passes, steps in jobs)
    shorter = max(1, math.ceil(total / MOST_SIMULATED))
    counts = [max(1, round(own / shorter)) for _, own in jobs]

    def rows(seconds: Callable[[ShardPass], float]) -> list[list[float]]:
        return [
            [seconds(own) * steps / count for own in passes] * count
            for (passes, steps), count in zip(jobs, counts, strict=True)
        ]

    timeline = simulate_jobs(
        rows(lambda own: own.run_s if copies_beside else own.seconds(beside=False)),
        devices,
        policy=policy,
        double_buffering=double_buffering,
        copy_in_s=rows(lambda own: own.in_s) if copies_beside else 0.0,
        copy_out_s=rows(lambda own: own.out_s) if copies_beside else 0.0,
    )
    finish = [0.0] * len(jobs)
    for units, end_s in zip(timeline.actions, timeline.end_s, strict=True):
        for unit, end in zip(units, end_s, strict=True):
            finish[unit.job] = max(finish[unit.job], float(end))
    for copy in timeline.transfers:
        finish[copy.action.job] = max(finish[copy.action.job], copy.end_s)
    return Simulated(max(finish), tuple(finish))
