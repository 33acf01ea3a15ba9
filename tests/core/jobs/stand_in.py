"""Plain list scheduling of jobs, one unit after another on the device that is free first, as an independent answer to
what a simulation of the policy gives where nothing is copied ahead."""

from types import SimpleNamespace

import numpy as np


def list_schedule(units_s, devices: int, policy: str = "sharded-lrtf", **_: object) -> SimpleNamespace:
    """The ends of units where the free device takes the job with the most work left of those that are ready first."""
    free, ready = [0.0] * devices, [0.0] * len(units_s)
    left = [list(map(float, units)) for units in units_s]
    rows: list[list[tuple[int, float]]] = [[] for _ in range(devices)]
    while any(left):
        device = min(range(devices), key=lambda each: free[each])
        open_jobs = [job for job, units in enumerate(left) if units]
        now = max(free[device], min(ready[job] for job in open_jobs))
        job = max((j for j in open_jobs if ready[j] <= now), key=lambda j: (sum(left[j]), -j))
        free[device] = ready[job] = now + left[job].pop(0)
        rows[device].append((job, free[device]))
    return SimpleNamespace(
        actions=[[SimpleNamespace(job=job) for job, _ in row] for row in rows],
        end_s=[np.array([end for _, end in row]) for row in rows],
    )
