"""Jobs simulated once more, plainly: the whole state looked at whenever anything ends. And the bound of Hydra."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import shardwright as sw

Chooses = Callable[[int, float, float], tuple[float, int]]
CHOICES: dict[str, Chooses] = {
    "sharded-lrtf": lambda job, left, arrival: (-left, job),
    "shortest": lambda job, left, arrival: (left, job),
    "fifo": lambda job, left, arrival: (arrival, job),
}
Row = tuple[int, int, float, float]
"""Job, unit, start and end."""


def plainly(
    units_s: Sequence[Sequence[float]], devices: int, policy: str, arrival_s: Sequence[float], runs: Sequence[int]
) -> list[list[Row]]:
    """The rows of each device under a policy, nothing copied. ``runs``: how many of its units each job runs."""
    rows: list[list[Row]] = [[] for _ in range(devices)]
    free_s, job_s = [0.0] * devices, list(arrival_s)
    position = [0] * len(units_s)
    left = [float(sum(units)) for units in units_s]
    now = min(arrival_s)
    while position != list(runs):
        for device in range(devices):
            if free_s[device] > now:
                continue
            there = [j for j in range(len(units_s)) if position[j] < runs[j] and job_s[j] <= now]
            if not there:
                continue
            job = min(there, key=lambda j: CHOICES[policy](j, left[j], arrival_s[j]))
            seconds = units_s[job][position[job]]
            rows[device].append((job, position[job], now, now + seconds))
            free_s[device] = job_s[job] = now + seconds
            left[job] -= seconds
            position[job] += 1
        now = min((time for time in (*free_s, *job_s) if time > now), default=now)
    return rows


def rows_of(timeline: sw.Timeline) -> list[list[Row]]:
    return [
        [(span.action.job, span.action.number, span.start_s, span.end_s) for span in timeline.spans(device)]
        for device in range(timeline.ranks)
    ]


def faults_of(timeline: sw.Timeline, units_s: Sequence[Sequence[float]]) -> list[str]:
    """What a timeline does that it may not: units left out, out of order, too short, or two at once on a device."""
    found = []
    ran: dict[tuple[int, int], tuple[float, float]] = {}
    for device, rows in enumerate(rows_of(timeline)):
        found += [f"two at once on {device}: {a} {b}" for a, b in pairwise(rows) if b[2] < a[3]]
        for job, unit, start, end in rows:
            found += [f"{job}U{unit} twice"] if (job, unit) in ran else []
            found += [f"{job}U{unit} too short"] if end != start + units_s[job][unit] else []
            ran[job, unit] = start, end
    for job, units in enumerate(units_s):
        missing = [unit for unit in range(len(units)) if (job, unit) not in ran]
        found += [f"job {job} lacks {missing}"] if missing else []
        pairs = pairwise(range(len(units))) if not missing else ()
        found += [f"{job}U{b} before its time" for a, b in pairs if ran[job, b][0] < ran[job, a][1]]
    return found


def bound_s(units_s: Sequence[Sequence[float]], devices: int) -> float:
    """Hydra's bound on the makespan."""
    whole = [sum(units) for units in units_s]
    return max(max(whole), sum(whole) / devices) + max(max(units) for units in units_s)


def hydra_units(shards: int, forward_s: float, backward_s: float, minibatches: int = 1) -> list[float]:
    """The units of equal shards: forwards, the last shard in one, backwards that recompute."""
    once = [forward_s] * (shards - 1) + [forward_s + backward_s] * shards
    return once * minibatches
