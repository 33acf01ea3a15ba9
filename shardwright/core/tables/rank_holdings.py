"""What the stages of one pipeline rank hold, whatever the memory policy of parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.tables.stage_messages import Ends, sent_bytes
from shardwright.core.tables.stage_working import working_of
from shardwright.core.tables.unit_table import UnitTable


@dataclass(frozen=True, slots=True)
class Holdings:
    """The holdings of one pipeline rank: entries of parameters, and bytes of one microbatch."""

    elements: int
    trained: int
    updated: int
    """The trained entries whose optimizer states are on this rank."""
    kept: int
    working: int
    sent: int
    """With those of values without a gradient, ``constant`` bytes."""
    constant: int
    batch: tuple[int, int]
    """The bytes of the batch, as in `UnitTable.batch_bytes`."""
    away: int
    """The offloaded bytes."""
    buffers: tuple[int, ...]
    """The bytes of the model's buffers: without replicas, and with them."""
    stages: tuple[tuple[int, int], ...]
    """The (first unit, end) of each of its stages."""


def holdings_of(
    table: UnitTable, stages: Sequence[Ends], *, are_several: bool, sends: bool, summed: bool, again: bool
) -> Holdings:
    """The holdings of a rank; where it has several stages, the bytes of one microbatch are of its fullest.

    Args:
        are_several: whether the model is cut into several stages.
        sends: whether there are several ranks.
        summed: whether gradients are summed over replicas.
        again: whether there are several microbatches.
    """
    elements = int(sum(table.range_elements[a, b] for a, b in stages) - table.tied_twice(stages))
    trained = int(sum(table.range_trained[a, b] for a, b in stages) - table.tied_twice(stages, trained=True))
    of_table = working_of(table)
    working = max(
        of_table.stage_working(a, b, summed=summed, again=again)
        if are_several or not table.found_bytes
        else of_table.whole_working(summed=summed)
        for a, b in stages
    )
    sent, constant = sent_bytes(table, stages) if sends else (0, 0)
    return Holdings(
        elements,
        trained,
        updated=trained - table.updated_elsewhere(stages),
        kept=int(max(table.range_kept[a, b] for a, b in stages)),
        working=working,
        sent=sent,
        constant=constant,
        batch=table.batch_bytes(stages),
        away=max(sum(table.units[u].saved_bytes for u in table.offloaded if a <= u < b) for a, b in stages),
        buffers=tuple(table.model_buffers_bytes(stages, replicated=several) for several in (False, True)),
        stages=tuple(stages),
    )
