"""Simulation of jobs: for each job its units in order, in seconds, and a policy give a timeline."""

from collections.abc import Mapping, Sequence

import numpy as np

from shardwright.core.errors import ScheduleError, nearest
from shardwright.core.events import Log, Resource
from shardwright.core.events.log import renumbered
from shardwright.core.jobs.optimum import optimal_starts
from shardwright.core.jobs.policies import OPTIMUM, policy_names, queue_of
from shardwright.core.jobs.run import JobsRun
from shardwright.core.jobs.unit_tables import PerUnit, UnitTables, require_devices
from shardwright.core.jobs.units import CopyLog, Unit, UnitRow
from shardwright.core.schedule.costs import MOST_BYTES
from shardwright.core.schedule.timeline import MemoryOverTime, Timeline


def simulate_jobs(
    units_s: Sequence[Sequence[float]],
    devices: int,
    policy: str = "sharded-lrtf",
    *,
    copy_in_s: PerUnit = 0.0,
    copy_out_s: PerUnit = 0.0,
    double_buffering: bool = True,
    host_links: int | None = None,
    unit_bytes: PerUnit | None = None,
    device_bytes: int | None = None,
    arrival_s: Sequence[float] | None = None,
    ends_after: Mapping[int, int] | None = None,
    seed: int = 0,
) -> Timeline[Unit]:
    """The timeline of jobs that share devices: when each of their units would run, and where.

    A job is a chain of units, each of which runs on one device, any of them, once the one before it has ended. Of
    several models that train, cut into n shards each, a minibatch is 2n - 1 units: n - 1 forwards, the last shard's
    forward and backward in one, n - 1 backwards (Hydra, arXiv 2107.06469).

    Args:
        units_s: for each job its units in order, in seconds.
        devices: how many there are, all alike.
        policy: ``sharded-lrtf`` (of the jobs with no unit in flight the one with the most work left), ``fifo``,
            ``random``, ``shortest`` (the least work left), or ``optimum``, which is proven by OR-tools' CP-SAT and is
            for small cases without copies.
        copy_in_s, copy_out_s: seconds of the copy from the host before a unit and to the host behind it: one number for
            all, or for each job its units' in order. A job may go on elsewhere once its copy out has ended.
        double_buffering: whether the shard of the next unit is copied in while a unit runs; else a device waits for
            its copies.
        host_links: how many links to the host the devices share, each with two directions; device d uses link d modulo
            their number. Default: each device has its own.
        unit_bytes, device_bytes: bytes that a unit holds on its device, copies included, and how many a device has; no
            copy begins before there is room. `Timeline.memory` gives the bytes over time.
        arrival_s: the second at which each job arrives. Default: 0.
        ends_after: how many units a job runs until it ends early or fails, by job. No policy knows it beforehand.
        seed: of ``random``.

    Raises:
        ScheduleError: no jobs, a job without units, seconds that are negative, infinite or NaN, fewer devices than one,
            an unknown policy, a unit larger than a device, or a case that the optimum is not found for.

    Example:
        >>> simulate_jobs([[1, 2, 1], [1, 2, 1], [2, 2]], devices=2).makespan_s
        6.0
    """
    tables = UnitTables.of(
        units_s,
        copy_in_s=copy_in_s,
        copy_out_s=copy_out_s,
        unit_bytes=unit_bytes,
        arrival_s=arrival_s,
        ends_after=ends_after,
    )
    devices = require_devices(devices)
    _require_names(policy, double_buffering, host_links, seed)
    _require_room(tables, device_bytes)
    if policy == OPTIMUM:
        return _optimum(tables, devices)
    ran = JobsRun(
        tables,
        devices,
        queue_of(policy, tables.arrival_s, seed),
        double_buffering=double_buffering,
        host_links=host_links,
        device_bytes=device_bytes,
    )
    ran.run()
    memory = None
    if tables.held_bytes is not None:
        memory = tuple(device.memory.over_time() for device in ran.devices)
    return _timeline(ran.log, ran.ran_job, ran.ran_unit, devices, ran.copies, memory)


def _timeline(
    log: Log,
    jobs: Sequence[int],
    units: Sequence[int],
    devices: int,
    copies: CopyLog,
    memory: tuple[MemoryOverTime, ...] | None,
) -> Timeline[Unit]:
    times = log.by_lane(devices)
    order = np.arange(len(jobs)) if times.order is None else times.order
    job, unit = (np.array(each, dtype=np.int64)[order] for each in (jobs, units))
    return Timeline(
        tuple(UnitRow(job[row], unit[row]) for row in times.rows),
        tuple(times.start_s),
        tuple(times.end_s),
        copies,
        cause=tuple(times.cause),
        transfer_cause=renumbered(np.array(copies.cause, dtype=np.int64), order),
        held=memory or tuple((np.empty(0), np.empty(0, dtype=np.int64)) for _ in range(devices)),
        outer_transfers=copies.outer,
        lane="device",
    )


def timeline_in_order(tables: UnitTables, devices: int, starts: Sequence[tuple[float, int, int]]) -> Timeline[Unit]:
    """The timeline of units in the order of their planned starts, each on the device that is free first. None starts
    later than planned where no more than ``devices`` were planned to run at once."""
    log, held = Log(), [Resource() for _ in range(devices)]
    jobs = [Resource(at) for at in tables.arrival_s]
    for _, job, unit in starts:
        at = min(range(devices), key=lambda each: held[each].free_s)
        number = len(log.lane)
        start, end, cause = held[at].take(jobs[job].free_s, jobs[job].last, tables.seconds[job][unit], number)
        log.add(at, start, end, cause)
        jobs[job].free_s, jobs[job].last = end, number
    return _timeline(log, [job for _, job, _ in starts], [unit for *_, unit in starts], devices, CopyLog(), None)


def _optimum(tables: UnitTables, devices: int) -> Timeline[Unit]:
    """The timeline of the optimum: the units in the order of its starts, each on the device that is free first."""
    if tables.copy_in_s or tables.copy_out_s or tables.held_bytes:
        raise ScheduleError("policy='optimum' knows no copies and no bytes: leave them out, or take another policy")
    if any(runs < len(units) for runs, units in zip(tables.runs, tables.seconds, strict=True)):
        raise ScheduleError("policy='optimum' knows all units beforehand: leave out ends_after, and shorten the lists")
    return timeline_in_order(tables, devices, optimal_starts(tables, devices))


def _require_names(policy: object, double_buffering: object, host_links: object, seed: object) -> None:
    if policy not in policy_names():
        raise ScheduleError(f"no policy is named {policy!r}: {nearest(str(policy), policy_names())}")
    if not isinstance(double_buffering, bool):
        raise ScheduleError(f"double_buffering={double_buffering!r}: expected True or False")
    if host_links is not None and (type(host_links) is not int or host_links < 1):
        raise ScheduleError(f"host_links={host_links!r}: expected a whole number of at least 1, or None")
    if type(seed) is not int:
        raise ScheduleError(f"seed={seed!r}: expected a whole number")


def _require_room(tables: UnitTables, device_bytes: object) -> None:
    """Raise ScheduleError for a unit that is larger than a device."""
    if device_bytes is None:
        return
    if type(device_bytes) is not int or not 1 <= device_bytes <= MOST_BYTES:
        raise ScheduleError(f"device_bytes={device_bytes!r}: expected a whole number of at least 1")
    if tables.held_bytes is None:
        raise ScheduleError("device_bytes without unit_bytes: give the bytes of every unit too")
    for job, sizes in enumerate(tables.held_bytes):
        most = max(sizes)
        if most > device_bytes:
            raise ScheduleError(
                f"unit {sizes.index(most)} of job {job} holds {most} bytes, {most - device_bytes} more than a device "
                f"has ({device_bytes}): cut the model into smaller shards"
            )
