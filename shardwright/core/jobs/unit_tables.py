"""The tables of a simulation of jobs: seconds, copies and bytes of every unit, checked as they enter."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.costs import MOST_BYTES, MOST_SECONDS

PerUnit = float | Sequence[Sequence[float]]
"""One number for every unit, or for each job its units' in order."""
MOST_DEVICES = 1 << 16


@dataclass(frozen=True, slots=True)
class UnitTables:
    """Jobs as numbers.

    Args:
        seconds: of each job's units, in order.
        copy_in_s, copy_out_s: seconds of the copy before and behind each unit; None: there is none.
        held_bytes: bytes on the device from the copy before a unit to the end of that behind it; None: not counted.
        arrival_s: of each job.
        runs: how many of each job's units are run until it ends, or fails.
    """

    seconds: tuple["array[float]", ...]
    copy_in_s: tuple["array[float]", ...] | None
    copy_out_s: tuple["array[float]", ...] | None
    held_bytes: tuple["array[int]", ...] | None
    arrival_s: tuple[float, ...]
    runs: tuple[int, ...]

    @property
    def jobs(self) -> int:
        return len(self.seconds)

    @classmethod
    def of(
        cls,
        units_s: Sequence[Sequence[float]],
        *,
        copy_in_s: PerUnit = 0.0,
        copy_out_s: PerUnit = 0.0,
        unit_bytes: PerUnit | None = None,
        arrival_s: Sequence[float] | None = None,
        ends_after: Mapping[int, int] | None = None,
    ) -> "UnitTables":
        """The tables of what a user gives. Raises ScheduleError for what cannot be, with its name."""
        if not isinstance(units_s, Iterable) or isinstance(units_s, str | bytes | Mapping):
            raise ScheduleError(f"units_s={units_s!r}: expected for each job the seconds of its units, in order")
        seconds = tuple(_row("units_s", job, units) for job, units in enumerate(units_s))
        if not seconds:
            raise ScheduleError("units_s has no jobs: expected for each job the seconds of its units, in order")
        for job, units in enumerate(seconds):
            if not units:
                raise ScheduleError(f"units_s[{job}] has no units: expected one or more, or leave job {job} out")
        held = None if unit_bytes is None else _bytes(unit_bytes, seconds)
        return cls(
            seconds,
            _copies("copy_in_s", copy_in_s, seconds),
            _copies("copy_out_s", copy_out_s, seconds),
            held,
            _arrivals(arrival_s, len(seconds)),
            _runs(ends_after, seconds),
        )


def _row(name: str, job: int, values: object, most: float = MOST_SECONDS) -> "array[float]":
    """The numbers of one job's units. Raises ScheduleError for what is no number, below 0 or above ``most``."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ScheduleError(f"{name}[{job}]={values!r}: expected a number for each unit of job {job}")
    entries = list(values)
    try:
        found = np.asarray(entries)
    except ValueError:
        found = np.empty(0, dtype=object)
    if not entries or (found.ndim == 1 and found.dtype.kind in "fiu" and _all_within(found, most)):
        return array("d", found.astype(np.float64).tobytes())
    for unit, value in enumerate(entries):
        if not _is_within(value, most):
            given = f"{name}[{job}][{unit}]={value!r} of unit {unit} of job {job}"
            raise ScheduleError(f"{given}: expected a number, finite, 0 or more and at most {most:g}")
    return array("d", map(float, entries))


def _all_within(values: NDArray[Any], most: float) -> bool:
    return bool((values >= 0).all() and (values <= most).all())  # false for NaN


def _is_within(value: object, most: float) -> TypeGuard[float]:
    """Whether a value is a number from 0 to ``most``: neither NaN nor a truth value."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and bool(0 <= value <= most)


def _per_unit(
    name: str, given: PerUnit, seconds: Sequence["array[float]"], most: float = MOST_SECONDS
) -> tuple["array[float]", ...]:
    """A number for every unit, from one for all or one for each."""
    if isinstance(given, int | float | np.number):
        if not _is_within(given, most):
            raise ScheduleError(f"{name}={given!r}: expected a number, finite, 0 or more and at most {most:g}")
        return tuple(array("d", [float(given)]) * len(units) for units in seconds)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ScheduleError(f"{name}={given!r}: expected one number for all units, or for each job its units' in order")
    rows = tuple(_row(name, job, values, most) for job, values in enumerate(given))
    if len(rows) != len(seconds):
        raise ScheduleError(f"{name} is of {len(rows)} jobs: expected {len(seconds)}, as units_s has")
    for job, (row, units) in enumerate(zip(rows, seconds, strict=True)):
        if len(row) != len(units):
            raise ScheduleError(f"{name}[{job}] has {len(row)} entries: expected {len(units)}, as units_s[{job}] has")
    return rows


def _copies(name: str, given: PerUnit, seconds: Sequence["array[float]"]) -> tuple["array[float]", ...] | None:
    rows = _per_unit(name, given, seconds)
    return rows if any(any(row) for row in rows) else None


def _bytes(given: PerUnit, seconds: Sequence["array[float]"]) -> tuple["array[int]", ...]:
    rows = _per_unit("unit_bytes", given, seconds, MOST_BYTES)
    for job, row in enumerate(rows):
        for unit, value in enumerate(row):
            if not value.is_integer():
                raise ScheduleError(f"unit_bytes[{job}][{unit}]={value!r}: expected a whole number of bytes")
    return tuple(array("q", map(int, row)) for row in rows)


def _arrivals(given: Sequence[float] | None, jobs: int) -> tuple[float, ...]:
    if given is None:
        return (0.0,) * jobs
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ScheduleError(f"arrival_s={given!r}: expected the second at which each job arrives")
    found = list(given)
    if len(found) != jobs:
        raise ScheduleError(f"arrival_s has {len(found)} entries: expected {jobs}, one for each job")
    for job, value in enumerate(found):
        if not _is_within(value, MOST_SECONDS):
            raise ScheduleError(
                f"arrival_s[{job}]={value!r}: expected a number, finite, 0 or more and at most {MOST_SECONDS:g}"
            )
    return tuple(map(float, found))


def _runs(ends_after: Mapping[int, int] | None, seconds: Sequence["array[float]"]) -> tuple[int, ...]:
    runs = [len(units) for units in seconds]
    if ends_after is None:
        return tuple(runs)
    if not isinstance(ends_after, Mapping):
        raise ScheduleError(f"ends_after={ends_after!r}: expected a mapping of jobs to the units that each runs")
    for job, units in ends_after.items():
        if type(job) is not int or not 0 <= job < len(runs):
            raise ScheduleError(f"ends_after names job {job!r}: expected 0 to {len(runs) - 1}")
        if type(units) is not int or not 0 <= units <= runs[job]:
            raise ScheduleError(f"ends_after[{job}]={units!r}: expected 0 to {runs[job]}, the units of job {job}")
        runs[job] = units
    return tuple(runs)


def require_devices(devices: object) -> int:
    """A number of devices. Raises ScheduleError for anything else."""
    if type(devices) is not int or not 1 <= devices <= MOST_DEVICES:
        raise ScheduleError(f"devices={devices!r}: expected a whole number of at least 1 and at most {MOST_DEVICES}")
    return devices
