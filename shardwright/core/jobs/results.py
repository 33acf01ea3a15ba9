"""What became of a list of jobs that a runtime has trained."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.core.jobs.units import Unit
from shardwright.core.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of one job."""

    losses: tuple[tuple[float, ...], ...]
    """The loss of every microbatch of every step that has ended."""
    failure: str
    """Why it ended before its last step; "" where it did not."""


@dataclass(frozen=True, slots=True, eq=False)
class JobsResult:
    """What became of a list of jobs, and when their passes ran."""

    jobs: Mapping[str, JobResult]
    timeline: Timeline[Unit]
    """The measured times of all passes, with the copies before and behind them, as units of jobs; a lane for each
    device."""
