"""The log of a run: when each piece of work ran on its lane, and what it waited for."""

from array import array
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(slots=True)
class Log:
    """The start, end and cause of every piece of work, by its number.

    A cause is the number of other work, `NOTHING`, or -2 - t for transfer t. Lists whose lengths are known number their
    work lane after lane (`of_lists`); decisions number it in the order in which it starts (`add`).
    """

    start_s: MutableSequence[float] = field(default_factory=lambda: array("d"))
    end_s: MutableSequence[float] = field(default_factory=lambda: array("d"))
    cause: MutableSequence[int] = field(default_factory=lambda: array("q"))
    lane: MutableSequence[int] = field(default_factory=lambda: array("i"))
    """The lane of each piece of work; empty where lists are numbered lane after lane."""
    offset: Sequence[int] = ()
    """The number of the first work of each lane, and that behind the last; empty where lanes are noted one by one."""

    @classmethod
    def of_lists(cls, lengths: Iterable[int]) -> "Log":
        """The log of lists of known lengths, one for each lane."""
        offset = [0, *accumulate(lengths)]
        return cls([0.0] * offset[-1], [0.0] * offset[-1], [-1] * offset[-1], offset=offset)

    def add(self, lane: int, start_s: float, end_s: float, cause: int) -> int:
        """Note a piece of work on a lane; returns its number."""
        self.start_s.append(start_s)
        self.end_s.append(end_s)
        self.cause.append(cause)
        self.lane.append(lane)
        return len(self.lane) - 1

    def by_lane(self, lanes: int) -> "LaneTimes":
        """The times of each lane, its work in the order in which it was noted."""
        if self.offset:
            rows = [slice(a, b) for a, b in pairwise(self.offset)]
            start, end = ([np.array(of[row], dtype=np.float64) for row in rows] for of in (self.start_s, self.end_s))
            return LaneTimes(start, end, [np.array(self.cause[row], dtype=np.int64) for row in rows], rows, None)
        lane = np.array(self.lane, dtype=np.int64)
        order = np.argsort(lane, kind="stable")
        rows = [slice(a, b) for a, b in pairwise(np.searchsorted(lane[order], np.arange(lanes + 1)).tolist())]
        starts, ends = (np.array(of, dtype=np.float64)[order] for of in (self.start_s, self.end_s))
        cause = renumbered(np.array(self.cause, dtype=np.int64)[order], order)
        return LaneTimes(
            [starts[row] for row in rows], [ends[row] for row in rows], [cause[row] for row in rows], rows, order
        )


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """What ran on each lane: start and end in seconds, and causes, numbered over all lanes in their order."""

    start_s: list[Seconds]
    end_s: list[Seconds]
    cause: list[Numbers]
    rows: list[slice]
    """The numbers of each lane."""
    order: Numbers | None
    """The numbers that the work had, in this order; None: the same."""


def renumbered(cause: Numbers, order: Numbers) -> Numbers:
    """Causes by the new numbers of work that has been put into an order; what is no work stays as it is."""
    if not len(order):
        return cause
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    found: Numbers = np.where(cause >= 0, number[np.maximum(cause, 0)], cause)
    return found
