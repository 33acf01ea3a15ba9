"""Schedules by name, each built once for all who count with it."""

from functools import lru_cache

from shardwright.core.schedule.schedule import Schedule


@lru_cache(maxsize=64)
def named_schedule(name: str, ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """The schedule of `Schedule.build`, built once for the schedules used last: many choices of memory share it."""
    return Schedule.build(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
