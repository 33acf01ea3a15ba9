"""Policies: whose unit runs next, among the jobs that have none in flight.

A policy is a queue. A job is put into it when it arrives and when its unit has ended, with the seconds of work that it
has left, and taken out when its next unit is chosen. It knows nothing of devices or of time, so that a simulation and a
runtime use the same.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Protocol

from shardwright.core.errors import ScheduleError, nearest

Waiting = tuple[int, float]
"""A job, and the seconds of work that it has left."""


class JobQueue(Protocol):
    """The jobs that have no unit in flight."""

    def put(self, job: int, left_s: float) -> None:
        """A job may run its next unit from now on."""

    def take(self, besides: Waiting | None = None) -> int | None:
        """Choose a job, and take it out; None where there is none. ``besides``: a job that is not in the queue and may
        be chosen too."""


class RankedQueue:
    """The job of the least key first; of equal keys the one of the lowest number."""

    __slots__ = ("_heap", "_key")

    def __init__(self, key: Callable[[int, float], float]) -> None:
        self._key, self._heap = key, list[tuple[float, int]]()

    def put(self, job: int, left_s: float) -> None:
        heappush(self._heap, (self._key(job, left_s), job))

    def take(self, besides: Waiting | None = None) -> int | None:
        heap = self._heap
        if besides is not None and (not heap or (self._key(*besides), besides[0]) < heap[0]):
            return besides[0]
        return heappop(heap)[1] if heap else None


class RandomQueue:
    """Each job with the same probability."""

    __slots__ = ("_draw", "_jobs")

    def __init__(self, seed: int) -> None:
        self._draw, self._jobs = random.Random(seed), list[int]()

    def put(self, job: int, left_s: float) -> None:
        self._jobs.append(job)

    def take(self, besides: Waiting | None = None) -> int | None:
        jobs = self._jobs
        count = len(jobs) + (besides is not None)
        chosen = self._draw.randrange(count) if count else 0
        if chosen == len(jobs):
            return None if besides is None else besides[0]
        jobs[chosen], jobs[-1] = jobs[-1], jobs[chosen]
        return jobs.pop()


def sharded_lrtf(arrival_s: Sequence[float], seed: int) -> JobQueue:
    """The job with the most work left first (Sharded-LRTF of Hydra: Nagrecha and Kumar, arXiv 2110.08633)."""
    return RankedQueue(lambda _, left_s: -left_s)


def shortest(arrival_s: Sequence[float], seed: int) -> JobQueue:
    """The job with the least work left first."""
    return RankedQueue(lambda _, left_s: left_s)


def fifo(arrival_s: Sequence[float], seed: int) -> JobQueue:
    """The job that arrived first, first; of those that arrived together the one named first."""
    return RankedQueue(lambda job, _: arrival_s[job])


def at_random(arrival_s: Sequence[float], seed: int) -> JobQueue:
    """Any job."""
    return RandomQueue(seed)


POLICIES: Mapping[str, Callable[[Sequence[float], int], JobQueue]] = {
    "sharded-lrtf": sharded_lrtf,
    "fifo": fifo,
    "random": at_random,
    "shortest": shortest,
}
"""Queues by the name of their policy, made from the jobs' arrivals in seconds and a seed."""
OPTIMUM = "optimum"
"""The proven optimum, for small cases: no queue, but the answer of a solver that knows all units beforehand."""


def policy_names() -> tuple[str, ...]:
    """The names of the policies."""
    return (*POLICIES, OPTIMUM)


def queue_of(policy: str, arrival_s: Sequence[float], seed: int = 0) -> JobQueue:
    """The queue of a policy, empty. Raises ScheduleError for a name that is no queue's."""
    make = POLICIES.get(policy) if isinstance(policy, str) else None
    if make is None:
        raise ScheduleError(f"no policy is named {policy!r}: {nearest(str(policy), policy_names())}")
    return make(arrival_s, seed)
