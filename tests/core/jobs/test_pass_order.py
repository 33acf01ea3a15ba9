"""The order in which a runtime takes passes is the one that the simulator predicts."""

import random
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import Any

import pytest

import shardwright as sw
from shardwright.core.jobs.pass_order import PassOrder
from shardwright.core.jobs.policies import POLICIES
from shardwright.core.jobs.shard_pass import ShardPass


def plan_of(seconds: list[list[float]], steps: list[int], devices: int, policy: str) -> Any:
    """As much of a plan of jobs as the order rests on."""
    jobs = [
        SimpleNamespace(passes=[ShardPass("forward", 0, each, 0.0, 0.0, 0, 0, 0, 0) for each in row], steps=count)
        for row, count in zip(seconds, steps, strict=True)
    ]
    return SimpleNamespace(jobs=jobs, devices=devices, policy=policy, copies_beside=False)


def ran(order: PassOrder, seconds: list[list[float]], devices: int, fails: dict[int, int]) -> None:
    """Run passes as long as they are planned to last: devices take them as they are free. ``fails``: the pass with
    which a job fails."""
    ends: list[tuple[float, int, int]] = []
    idle, now = list(range(devices)), 0.0
    begun: dict[int, float] = {}
    while True:
        while idle and (job := order.take(idle[0])) is not None:
            own = order.jobs[job]
            begun[job] = now
            heappush(ends, (now + seconds[job][own.done % own.passes], job, idle.pop(0)))
        if not ends:
            return
        now, job, device = heappop(ends)
        failure = "it failed" if fails.get(job) == order.jobs[job].done else ""
        order.end(job, begun[job], now, failure)
        idle = sorted([*idle, device])


@pytest.mark.parametrize("policy", POLICIES)
def test_passes_are_taken_in_the_simulated_order(policy: str) -> None:
    draw = random.Random(1)
    for case in range(40):
        count, devices = draw.randrange(1, 8), draw.randrange(1, 5)
        seconds = [[draw.uniform(0.5, 2.0) for _ in range(draw.randrange(1, 6))] for _ in range(count)]
        steps = [draw.randrange(1, 4) for _ in range(count)]
        units = [row * times for row, times in zip(seconds, steps, strict=True)]
        ends_after = {0: draw.randrange(1, len(units[0]) + 1)} if case % 2 else {}
        order = PassOrder(plan_of(seconds, steps, devices, policy), seed=case)
        ran(order, seconds, devices, {job: units - 1 for job, units in ends_after.items()})
        assert order.is_over
        found, simulated = order.timeline(), sw.simulate_jobs(units, devices, policy, ends_after=ends_after, seed=case)
        assert [list(row) for row in found.actions] == [list(row) for row in simulated.actions]
        assert found.makespan_s == pytest.approx(simulated.makespan_s)
