"""Resources: what work holds for a time. Devices, links by direction and host links hold one piece of work at a time;
memory holds as many bytes as there are."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

NOTHING = -1
"""The number of no work: what the first work of a resource waited for."""


@dataclass(slots=True)
class Resource:
    """A device, one direction of a link, a host link: one piece of work at a time, first come, first served."""

    free_s: float = 0.0
    """The time from which it is free."""
    last: int = NOTHING
    """The number of the work that held it last, as in `Timeline.cause`."""

    def take(self, ready_s: float, cause: int, seconds: float, number: int) -> tuple[float, float, int]:
        """Hold it for work that is ready at a time because of another; returns start, end and what the start waited
        for."""
        start = self.free_s
        if ready_s >= start:
            start = ready_s
        else:
            cause = self.last
        self.free_s = end = start + seconds
        self.last = number
        return start, end, cause


@dataclass(slots=True)
class Memory:
    """The memory of a device or a host, in bytes, and its use over time."""

    capacity_bytes: int | None = None
    """None: no limit."""
    used_bytes: int = 0
    times_s: list[float] = field(default_factory=list)
    """The times at which the use changed."""
    sizes_bytes: list[int] = field(default_factory=list)
    """The use from each of these times on."""

    def has_room(self, size_bytes: int) -> bool:
        return self.capacity_bytes is None or self.used_bytes + size_bytes <= self.capacity_bytes

    def take(self, time_s: float, size_bytes: int) -> None:
        """Take bytes, or give them back where ``size_bytes`` is below 0. Times come in their order."""
        if not size_bytes:
            return
        self.used_bytes += size_bytes
        if self.times_s and self.times_s[-1] == time_s:
            self.sizes_bytes[-1] = self.used_bytes
        else:
            self.times_s.append(time_s)
            self.sizes_bytes.append(self.used_bytes)

    def over_time(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The times at which the use changed, and the bytes from then on."""
        return np.array(self.times_s, dtype=np.float64), np.array(self.sizes_bytes, dtype=np.int64)
