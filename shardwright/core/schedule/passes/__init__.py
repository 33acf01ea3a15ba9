"""Passes: each takes a schedule and returns another that does the same work."""

from shardwright.core.schedule.passes.backward import merge_backward, split_backward
from shardwright.core.schedule.passes.buffer_limits import bound_buffers
from shardwright.core.schedule.passes.sharding import insert_sharding, strip_sharding
from shardwright.core.schedule.passes.transfers import insert_transfers, strip_transfers, transfers_of

__all__ = [
    "bound_buffers",
    "insert_sharding",
    "insert_transfers",
    "merge_backward",
    "split_backward",
    "strip_sharding",
    "strip_transfers",
    "transfers_of",
]
