"""The ops whose memory nobody knows: their names, as they are counted from above."""

from collections import Counter

from shardwright.core.model.graph import Graph

NAMED = 5
"""The most names that are said."""


def unknown_memory_text(graph: Graph) -> str | None:
    """A sentence that names the ops that could not be seen to run, and of which all operands and results count as kept;
    None when there are none."""
    names = Counter(op.name for op in graph.ops if op.memory is not None and not op.memory.is_known)
    if not names:
        return None
    said = ", ".join(f"{name} × {count}" if count > 1 else name for name, count in names.most_common(NAMED))
    more = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
    return f"the memory of {said}{more} is counted from above: all operands and results as kept, and as much again"
