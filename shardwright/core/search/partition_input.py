"""A model on devices, in the form that the partitioners take."""

from collections.abc import Callable
from functools import cache

from shardwright.core.cluster.hardware import Device
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import Folded
from shardwright.core.partition.partitioners import Units, paths_of
from shardwright.core.partition.tasks import Tasks, op_tasks
from shardwright.core.tables.memory import kept_bytes
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.unit_table import UnitTable


def partition_input(
    folded: Folded, counter: WorkCounter, table: UnitTable, device: Device, microbatch: int, request: MemoryRequest
) -> tuple[Units, Callable[[], Tasks]]:
    """The units of a model with their costs, and its ops, which are counted when they are first asked for."""
    forward = tuple(u.forward_s for u in table.units)
    backward = tuple(u.total_s - u.forward_s + float(a) for u, a in zip(table.units, table.again_s, strict=True))
    kept = tuple(float(kept_bytes(u, mode)) for u, mode in zip(table.units, table.modes, strict=True))
    everywhere, brought = _batch_bytes(table, request.microbatches)
    largest = max(range(len(forward)), key=lambda unit: table.boundary_bytes[unit] if unit else -1)
    units = Units(
        paths=paths_of(folded),
        forward_s=forward,
        backward_s=backward,
        state_bytes=tuple(
            u.parameter_elements * request.held_bytes + u.trained_elements * request.trained_bytes + batch
            for u, batch in zip(table.units, brought, strict=True)
        ),
        kept_bytes=kept,
        entering_bytes=tuple(float(size) for size in table.boundary_bytes),
        entering_s=table.boundary_s,
        send_s_per_byte=table.boundary_s[largest] / max(1, table.boundary_bytes[largest]),
        limit_bytes=float(request.limit_bytes - everywhere),
        first_op=tuple(unit.first_op for unit in folded.units),
    )

    @cache
    def tasks() -> Tasks:
        costs = list(zip(forward, backward, kept, units.state_bytes, strict=True))
        return op_tasks(folded, counter, costs, device, request.precision, microbatch)

    return units, tasks


def _batch_bytes(table: UnitTable, microbatches: int) -> tuple[int, list[int]]:
    """The bytes of the batch that every stage holds, and the bytes that each unit brings to its own stage: a value that
    several units read counts for the first."""
    everywhere, brought = 0, [0] * len(table.units)
    for size, is_divided, readers in table.batch:
        held = size * (microbatches if is_divided else 1)
        if table.batch_is_everywhere:
            everywhere += held
        elif readers:
            brought[readers[0]] += held
    return everywhere, brought
