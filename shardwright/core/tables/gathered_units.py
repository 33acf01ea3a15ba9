"""The bytes of sharded parameters, and of their gradients, that are whole in the passes of single units."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.unit_work import PRECISION_BYTES
from shardwright.core.tables.unit_table import MemoryRequest, UnitTable


def gathered_by_unit(table: UnitTable, ends: tuple[int, int], request: MemoryRequest) -> NDArray[np.float64]:
    """The bytes of sharded parameters, and of gradients, that are whole at the backward of each unit of a stage: of
    the unit, of the one before, whose parameters are gathered ahead, and of the one behind, whose gradients are on
    their way to the ranks that keep their sums. Units that stay whole are left out."""
    units = np.arange(*ends)
    if not request.gathers_units or request.shard < 2 or request.ways == 1:
        return np.zeros((2, len(units)))
    own = _unit_bytes(table, units, request) * (request.shard == 3 and request.gathered_stages is None)
    held = np.pad(np.where(own < request.whole_below_bytes, 0.0, own), 1)
    trained = np.pad(table.range_trained[units, units + 1], (0, 1))
    width, sent = PRECISION_BYTES[request.precision], request.gradient_width * (2 - 1 / request.ways)
    gradients = np.maximum(trained[:-1] * width + trained[1:] * sent, trained[:-1] * sent) * request.reduces_each
    return np.stack([held[:-2] + held[1:-1] + held[2:], gradients])


def staying_bytes(table: UnitTable, stages: Iterable[tuple[int, int]], request: MemoryRequest) -> int:
    """The bytes on a rank, beside its shards, of the units that stay whole all through a step with their gradients
    (`Decision.whole_below_bytes`)."""
    whole = 0.0
    for ends in stages if request.whole_below_bytes else ():
        units = np.arange(*ends)
        held = _unit_bytes(table, units, request)
        gradients = table.range_trained[units, units + 1] * request.gradient_width
        whole += float((held + gradients)[held < request.whole_below_bytes].sum())
    return int(whole * (1 - 1 / request.ways))


def _unit_bytes(table: UnitTable, units: NDArray[np.int64], request: MemoryRequest) -> NDArray[np.float64]:
    """The bytes of the parameters of each unit."""
    return table.range_elements[units, units + 1] * float(PRECISION_BYTES[request.precision])
