"""`auto`: a schedule built for exactly the costs and memory given; never longer than a named one that fits."""

from shardwright.core.schedule.auto.search import shortest

__all__ = ["shortest"]
