"""Ranks that share a machine, where those at work get what idle ones leave unused."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


def lent_clock(start_s: Sequence[Seconds], end_s: Sequence[Seconds], share: float) -> Callable[[Seconds], Seconds]:
    """The clock of ranks that lend their idle parts of a machine: from the times of actions when each rank has its own
    part to the times when idle parts are lent.

    While k of p ranks are at work, ``share`` of what the others leave makes all that happens faster: what takes a
    second then takes 1 - share·(p - k)/p. With 1 the machine is busy whenever any rank is, and k ranks are each p/k
    times as fast. While none is at work, nothing is faster. The order of events stays, so that no action starts before
    what it waits for.

    Args:
        start_s, end_s: the times of each rank's actions, arrays of shape [actions of the rank].
        share: the share that is lent, from 0 to 1.
    """
    ranks = len(start_s)
    moments, where = np.unique(np.concatenate([*start_s, *end_s]), return_inverse=True)
    half = len(where) // 2
    steps = np.bincount(where[:half], minlength=len(moments)) - np.bincount(where[half:], minlength=len(moments))
    working = np.cumsum(steps)[:-1]
    idle = np.where(working > 0, ranks - working, 0)
    passed = np.concatenate([moments[:1], moments[0] + np.cumsum(np.diff(moments) * (1 - share * idle / ranks))])

    def clock(times: Seconds) -> Seconds:
        lent: Seconds = np.interp(times, moments, passed)
        return lent

    return clock
