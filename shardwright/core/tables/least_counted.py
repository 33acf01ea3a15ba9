"""The least bytes that a rank takes, as memory is counted for cuts, with so many units that are alike."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.tables.gathered_units import least_made_bytes, least_passes_bytes
from shardwright.core.tables.memory_request import MANY, MemoryRequest
from shardwright.core.tables.unit_table import UnitTable

ROUNDED = 3 / MANY
"""The bytes of an entry by which its share may be too large, as three sizes are each rounded up over `MANY`."""

Bytes = NDArray[np.float64]
Kinds = Sequence[tuple[tuple[int, ...], tuple[float, ...]]]


def least_counted_bytes(
    table: UnitTable,
    units: tuple[int, ...],
    added: tuple[float, ...],
    live: Bytes,
    held: Bytes,
    request: MemoryRequest,
) -> Bytes:
    """The bytes below which no rank's use gets as `RankTables.memory` counts it, whichever other units it has.

    Messages, the batch, the model's buffers and buckets are left out.

    Args:
        table: the units of the ranks, which are all alike.
        units: those that are alike.
        added: what one of them adds at least, as in `RankTables.kinds`.
        live: the numbers of live microbatches of one stage, of shape (ways, ranks, 1): ways to divide a pipeline's work
            are counted together.
        held: the number of stages on each rank, of shape (ways, 1, 1).
        request: what is asked of memory; its bucket and messages do not count.

    Returns:
        Bytes of shape (ways, ranks, units): of a rank with one of them, with two, and so on.
    """
    elements, trained, kept, working = added
    counts = np.arange(1.0, len(units) + 1)
    # Of n units in some stages one stage has at least n / stages, rounded up.
    fullest = np.ceil(counts / held)
    fixed = counts * ((request.held_bytes - ROUNDED) * elements + (request.trained_bytes - ROUNDED) * trained)
    if not request.shares_sums:
        fixed = fixed + working
    else:
        most, whole = np.full(fullest.shape, float(least_passes_bytes(table, units, request))), 0.0 * fullest
        if request.shard >= 2:
            if request.gathered_stages is not None:
                share = np.minimum(1.0, request.gathered_stages / held)
                whole += np.ceil(counts * share) * elements * PRECISION_BYTES[request.precision]
            if request.reduces_each:
                most = np.maximum(most, fullest * least_made_bytes(table, units, request))
            else:
                whole += counts * trained * request.gradient_width
        fixed = fixed + np.maximum(working, most + whole)
    found: Bytes = fixed + live * (fullest * kept)
    return found


def may_fit_as_counted(
    table: UnitTable,
    kinds: Kinds,
    limits_bytes: Sequence[int],
    live: Sequence[int],
    held: int,
    request: MemoryRequest,
) -> bool:
    """Whether the ranks have room for the units that are alike, as memory is counted for cuts; False means that no cut
    is counted to fit.

    Args:
        table, request: as in `least_counted_bytes`.
        kinds: as in `RankTables.kinds`.
        limits_bytes: the memory of every rank.
        live: the number of live microbatches of one stage on every rank.
        held: the number of stages on each rank.
    """
    alive, stages = np.array(live, dtype=np.float64)[None, :, None], np.full((1, 1, 1), float(held))
    limits = np.array(limits_bytes, dtype=np.float64)[:, None]
    for units, added in kinds:
        fits = least_counted_bytes(table, units, added, alive, stages, request)[0] <= limits
        if int((fits * np.arange(1, len(units) + 1)).max(axis=1).sum()) < len(units):
            return False
    return True
