"""The units that a model itself computes again in the backward pass, by checkpoints around their ops."""

from shardwright.core.model.fold import Unit
from shardwright.core.model.graph import Graph

MOVES_NOTHING = frozenset({"view", "slice", "create"})
"""The kinds of op that may lie outside, such as those that take the rows of a layer out of stacked parameters."""


def is_checkpointed(graph: Graph, unit: Unit) -> bool:
    """Whether checkpoints of the model's own that keep nothing lie around all that a unit computes."""
    ops = [op for op in graph.ops[unit.first_op : unit.end_op] if op.in_checkpoint or op.kind not in MOVES_NOTHING]
    return bool(ops) and all(op.in_checkpoint for op in ops)
