"""When the jobs of a plan end: their passes, simulated under a policy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.errors import PlanError, nearest
from shardwright.core.jobs.policies import policy_names
from shardwright.core.jobs.shard_pass import ShardPass
from shardwright.core.jobs.simulate import simulate_jobs

MOST_SIMULATED = 200_000
"""The most passes that are simulated. Of longer lists all jobs are shortened alike, and the ends are scaled."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """The ends of a simulated list of jobs."""

    makespan_s: float
    finish_s: tuple[float, ...]


def require_policy(policy: str) -> None:
    """Raise PlanError for a policy that is not known."""
    known = policy_names()
    if policy not in known:
        raise PlanError(f"policy={policy!r}: {nearest(str(policy), known)}")


def simulated(
    jobs: Sequence[tuple[Sequence[ShardPass], int]],
    devices: int,
    policy: str,
    *,
    double_buffering: bool,
    copies_beside: bool,
) -> Simulated:
    """The ends of jobs, each given by the passes of a step and the number of steps.

    Where copies take the devices' own time, a pass lasts as long as it computes and is copied.
    """
    require_policy(policy)
    total = sum(len(passes) * steps for passes, steps in jobs)
    shorter = max(1, math.ceil(total / MOST_SIMULATED))
    steps = [max(1, round(own / shorter)) for _, own in jobs]
    rows = [list(passes) * count for (passes, _), count in zip(jobs, steps, strict=True)]
    units_s = [[own.run_s if copies_beside else own.seconds(beside=False) for own in row] for row in rows]
    timeline = simulate_jobs(
        units_s,
        devices,
        policy=policy,
        double_buffering=double_buffering,
        copy_in_s=[[own.in_s for own in row] for row in rows] if copies_beside else 0.0,
        copy_out_s=[[own.out_s for own in row] for row in rows] if copies_beside else 0.0,
    )
    ends = [0.0] * len(jobs)
    for units, end_s in zip(timeline.actions, timeline.end_s, strict=True):
        for unit, end in zip(units, end_s, strict=True):
            ends[unit.job] = max(ends[unit.job], float(end))
    scales = [own / count for (_, own), count in zip(jobs, steps, strict=True)]
    finish = tuple(end * scale for end, scale in zip(ends, scales, strict=True))
    return Simulated(max(finish), finish)
