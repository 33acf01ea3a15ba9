"""The proven optimum of a few jobs on a few devices, by OR-tools' CP-SAT: what policies are measured against."""

import math
from collections.abc import Sequence
from typing import Any

from shardwright.core.errors import MissingFrameworkError, ScheduleError
from shardwright.core.jobs.policies import queue_of
from shardwright.core.jobs.run import JobsRun
from shardwright.core.jobs.unit_tables import UnitTables

MOST_UNITS = 64
"""The most units that an optimum is looked for of."""
_RESOLUTION = 20_000
"""Where seconds are no multiples of anything large, they are rounded to this share of the makespan to be improved."""
_LIMIT_S = 120.0


def optimal_starts(tables: UnitTables, devices: int, limit_s: float = _LIMIT_S) -> list[tuple[float, int, int]]:
    """(start in seconds, job, unit) of every unit, in order, with the shortest makespan that there is: exactly where
    the seconds are multiples of one number of at least a 20,000th of it, else of seconds rounded to that.

    Raises:
        MissingFrameworkError: OR-tools is not installed.
        ScheduleError: there are too many units, or the time limit ended before the proof.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingFrameworkError("policy='optimum' needs OR-tools: pip install 'shardwright[solver]'") from error
    count = sum(map(len, tables.seconds))
    if count > MOST_UNITS:
        raise ScheduleError(f"policy='optimum' is for at most {MOST_UNITS} units, here {count}: take another policy")
    known = JobsRun(tables, devices, queue_of("sharded-lrtf", tables.arrival_s))
    known.run()
    horizon_s = max(known.log.end_s)
    step_s = _step_s([*tables.arrival_s, *(each for units in tables.seconds for each in units)], horizon_s)
    horizon = round(horizon_s / step_s) + count
    model = cp_model.CpModel()
    begin = {}
    makespan = model.new_int_var(0, horizon, "makespan")
    on_device: list[list[Any]] = [[] for _ in range(devices)]
    load: list[list[Any]] = [[] for _ in range(devices)]
    intervals = []
    for job, units in enumerate(tables.seconds):
        before: Any = round(tables.arrival_s[job] / step_s)
        for unit, seconds in enumerate(units):
            length = round(seconds / step_s)
            start = begin[job, unit] = model.new_int_var(0, horizon, f"{job}U{unit}")
            model.add(start >= before)
            intervals.append(model.new_fixed_size_interval_var(start, length, ""))
            before = start + length
            runs_on = [model.new_bool_var("") for _ in range(min(devices, len(intervals)))]  # the first on the first
            model.add_exactly_one(runs_on)
            for device, runs in enumerate(runs_on):
                on_device[device].append(model.new_optional_fixed_size_interval_var(start, length, runs, ""))
                load[device].append(length * runs)
        model.add(makespan >= before)
    for those, seconds_on in zip(on_device, load, strict=True):
        model.add_no_overlap(those)
        model.add(sum(seconds_on) <= makespan)
    model.add_cumulative(intervals, [1] * len(intervals), devices)
    for job, unit, at in zip(known.ran_job, known.ran_unit, known.log.start_s, strict=True):
        model.add_hint(begin[job, unit], round(at / step_s))
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status != cp_model.OPTIMAL:
        raise ScheduleError(
            f"no optimum of {count} units on {devices} devices was proven within {limit_s:g} s: take fewer units, or "
            f"another policy"
        )
    return sorted((solver.value(start) * step_s, job, unit) for (job, unit), start in begin.items())


def _step_s(all_s: Sequence[float], horizon_s: float) -> float:
    """The seconds of which all are counted as whole multiples."""
    ratios = [each.as_integer_ratio() for each in all_s]
    below = math.lcm(*(ratio[1] for ratio in ratios))
    exact = math.gcd(*(above * (below // each) for above, each in ratios)) / below if below <= _RESOLUTION else 0.0
    return exact if exact * _RESOLUTION >= horizon_s and exact else horizon_s / _RESOLUTION or 1.0
