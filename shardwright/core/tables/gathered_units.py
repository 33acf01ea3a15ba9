"""The bytes of sharded parameters, and of their gradients, that are whole for a while in the passes of units."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.unit_work import PRECISION_BYTES
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.stage_memory import backward_passes
from shardwright.core.tables.unit_table import UnitTable


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


def most_gathered(table: UnitTable, stages: Sequence[tuple[int, int]], request: MemoryRequest) -> int:
    """The most bytes that a rank has whole for a while of what is sharded in its stages: of units, of as many stages as
    may be gathered at once, and of all gradients where they add up whole."""
    width = PRECISION_BYTES[request.precision]
    most = max(int(gathered_by_unit(table, ends, request).sum(0).max()) for ends in stages)
    if request.gathered_stages is not None:
        sizes = sorted((int(table.range_elements[ends]) for ends in stages), reverse=True)
        most += width * sum(sizes[: request.gathered_stages])
    if request.shard >= 2 and not request.reduces_each:
        most += sum(int(table.range_trained[ends]) for ends in stages) * (width + request.gradient_width)
    return most


def gathered_peak(table: UnitTable, ends: tuple[int, int], request: MemoryRequest) -> int:
    """The most bytes of one microbatch's passes over a stage with what is gathered unit by unit."""
    first, end = ends
    gathered = gathered_by_unit(table, ends, request)  # activations are freed while gradients are made
    forward = table.range_kept[first, end] + table.range_working[first, end] + gathered[0, -1]
    return int(max((backward_passes(table, ends) + gathered.sum(0)).max(), forward))


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
