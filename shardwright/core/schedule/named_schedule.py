"""Schedules by name, each built once for all who count with it."""

from functools import lru_cache

from shardwright.core.schedule.schedule import Schedule

SMALL_CELLS = 4096
"""The stages · microbatches up to which a schedule is small: of small ones a whole search's are remembered."""


def named_schedule(name: str, ranks: int, microbatches: int, virtual_stages: int, slices: int = 1) -> Schedule:
    """The schedule of `Schedule.build`, built once for the schedules used last: many choices of memory share it."""
    is_small = ranks * virtual_stages * microbatches * slices <= SMALL_CELLS
    return (_small if is_small else _large)(name, ranks, microbatches, virtual_stages, slices)


def _built(name: str, ranks: int, microbatches: int, virtual_stages: int, slices: int) -> Schedule:
    return Schedule.build(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages, slices=slices)


_small, _large = lru_cache(maxsize=512)(_built), lru_cache(maxsize=64)(_built)
