"""The bytes of messages between stages on one pipeline rank: those that every schedule has, and those that pile up."""

from collections.abc import Sequence

from shardwright.core.schedule.messages_under_way import UnderWay
from shardwright.core.tables.unit_table import UnitTable

Ends = tuple[int, int]
"""The (first unit, end) of a stage."""


def sent_bytes(table: UnitTable, stages: Sequence[Ends]) -> tuple[int, int]:
    """The bytes of a value and a gradient at either end, on their way or there before they are used; and those of them
    that have no gradient.

    Stages of one rank run in turn: the one that sends most counts. Compiled stages are dispatched ahead, so all of them
    count; the gradient that such a backward makes for the previous stage is already among the bytes of its passes.
    """
    entering, together = (1, sum) if table.found_bytes else (2, max)
    crossing = (0, *table.boundary_bytes[1:], 0)
    constant = (0, *table.constant_bytes[1:], 0) if table.constant_bytes else (0,) * len(crossing)
    constants = together(constant[a] + constant[b] for a, b in stages)
    sent = together(entering * crossing[a] + 2 * crossing[b] + constant[a] + constant[b] for a, b in stages)
    return sent, constants


def piling_up_bytes(table: UnitTable, ends: Ends, messages: UnderWay) -> int:
    """The bytes of messages of a stage beyond two on either side."""
    first, end = ends
    before = table.boundary_bytes[first] if first else 0
    behind = table.boundary_bytes[end] if end < len(table.units) else 0
    return max(0, messages.before - 2) * before + max(0, messages.behind - 2) * behind
