"""The least bytes that a rank takes, as memory is counted for cuts, with so many units that are alike."""

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.unit_work import PRECISION_BYTES
from shardwright.core.tables.gathered_units import least_made_bytes, least_passes_bytes
from shardwright.core.tables.memory_request import MANY, MemoryRequest
from shardwright.core.tables.unit_table import UnitTable

ROUNDED = 3 / MANY
"""The bytes of an entry by which its share may be too large, as three sizes are each rounded up over `MANY`."""

Bytes = NDArray[np.float64]


def least_counted_bytes(
    table: UnitTable,
    units: tuple[int, ...],
    added: tuple[float, ...],
    live: Bytes,
    held: int,
    request: MemoryRequest,
) -> Bytes:
    """The bytes below which no rank's use gets as `RankTables.memory` counts it, whichever other units it has.

    Messages, the batch, the model's buffers and buckets are left out.

    Args:
        table: the units of the ranks, which are all alike.
        units: those that are alike.
        added: what one of them adds at least, as in `RankTables.kinds`.
        live: the numbers of live microbatches of one stage, of shape (ranks, 1).
        held: the number of stages on each rank.
        request: what is asked of memory; its bucket and messages do not count.

    Returns:
        Bytes of shape (ranks, units): of a rank with one of them, with two, and so on.
    """
    elements, trained, kept, working = added
    counts = np.arange(1.0, len(units) + 1)
    # Of n units in ``held`` stages one stage has at least n / held, rounded up.
    fullest = np.ceil(counts / held)
    state = counts * ((request.held_bytes - ROUNDED) * elements + (request.trained_bytes - ROUNDED) * trained)
    passing = np.full(len(units), working)
    if request.shares_sums:
        whole = np.zeros(len(units))
        most = np.full(len(units), least_passes_bytes(table, units, request))
        if request.shard >= 2:
            if request.gathered_stages is not None:
                share = min(1.0, request.gathered_stages / held)
                whole += np.ceil(counts * share) * elements * PRECISION_BYTES[request.precision]
            if request.reduces_each:
                most = np.maximum(most, fullest * least_made_bytes(table, units, request))
            else:
                whole += counts * trained * request.gradient_width
        passing = np.maximum(passing, most + whole)
    found: Bytes = state + passing + live * fullest * kept
    return found
