"""Units and copies of jobs, as a timeline holds them."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from shardwright.core.schedule.timeline import HOST, Transfer

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
Kind = Literal["U", "IN", "OUT"]


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of one job, or the copy between host and device before it (`IN`) or behind it (`OUT`).

    A job's unit is what a device runs of it at once. Where the job is planned, its units are the passes of its shards
    (`ShardPass`); a unit of a model, of which shards are runs, is another thing.
    """

    job: int
    number: int
    kind: Kind = "U"

    @property
    def text(self) -> str:
        """The job, the kind and the number of the unit among the job's: `3U17`, `3IN17`."""
        return f"{self.job}{self.kind}{self.number}"

    @property
    def flat(self) -> tuple["Unit", ...]:
        return (self,)

    @property
    def letter(self) -> str:
        return _LETTERS[self.job % len(_LETTERS)]

    @property
    def series(self) -> str:
        return f"job {self.job}"

    @property
    def is_transfer(self) -> bool:
        return self.kind != "U"

    @property
    def numbers(self) -> Mapping[str, int]:
        return {"job": self.job, "unit": self.number}

    def __str__(self) -> str:
        return self.text


class UnitRow(Sequence[Unit]):
    """The units that one device ran, which become values only when looked at: there may be millions."""

    __slots__ = ("_jobs", "_numbers")

    def __init__(self, jobs: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        self._jobs, self._numbers = jobs, numbers

    def __len__(self) -> int:
        return len(self._jobs)

    @overload
    def __getitem__(self, index: int) -> Unit: ...
    @overload
    def __getitem__(self, index: slice) -> "UnitRow": ...
    def __getitem__(self, index: int | slice) -> "Unit | UnitRow":
        if isinstance(index, slice):
            return UnitRow(self._jobs[index], self._numbers[index])
        return Unit(int(self._jobs[index]), int(self._numbers[index]))


class CopyLog(Sequence[Transfer[Unit]]):
    """The copies between host and devices in the order in which links took them; they become values only when looked
    at."""

    __slots__ = ("_device", "_end", "_is_in", "_job", "_start", "_unit", "cause")

    def __init__(self) -> None:
        self._job, self._unit, self._device, self._is_in = array("i"), array("i"), array("i"), array("b")
        self._start, self._end = array("d"), array("d")
        self.cause = array("q")
        """What each copy waited for, as in `Log.cause`."""

    def add(self, job: int, unit: int, device: int, is_in: bool, start_s: float, end_s: float, cause: int) -> None:
        self._job.append(job)
        self._unit.append(unit)
        self._device.append(device)
        self._is_in.append(is_in)
        self._start.append(start_s)
        self._end.append(end_s)
        self.cause.append(cause)

    @property
    def outer(self) -> tuple[int, int] | None:
        """The copies that start first and end last; None where there are none."""
        return (int(np.argmin(self._start)), int(np.argmax(self._end))) if self._job else None

    def __len__(self) -> int:
        return len(self._job)

    @overload
    def __getitem__(self, index: int) -> Transfer[Unit]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Transfer[Unit], ...]: ...
    def __getitem__(self, index: int | slice) -> Transfer[Unit] | tuple[Transfer[Unit], ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        device, is_in = self._device[index], bool(self._is_in[index])
        copy = Unit(self._job[index], self._unit[index], "IN" if is_in else "OUT")
        source, target = (HOST, device) if is_in else (device, HOST)
        return Transfer(copy, source, target, self._start[index], self._end[index])
