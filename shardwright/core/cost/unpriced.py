"""The ops of which nothing but their operands is known: their names, and an estimate from above of their cost."""

import math
from collections import Counter

from shardwright.core.cost.unit_work import contraction_flops
from shardwright.core.model.graph import Graph

WORTH_SAYING = 0.001
"""The share of all FLOPs or bytes above which ops without a cost rule are named."""


def unpriced_text(graph: Graph, batch: int = 2) -> str | None:
    """A sentence that names the ops without a cost rule and their estimated share of the work; None when they are none
    or next to nothing."""
    names: Counter[str] = Counter()
    flops = moved = all_flops = all_moved = 0
    for op in graph.ops:
        work = contraction_flops(graph, op, batch)
        size = sum(graph.tensors[t].size_bytes(batch) for t in (*op.inputs, *op.outputs))
        all_flops, all_moved = all_flops + work, all_moved + (size if op.kind not in ("view", "create") else 0)
        if op.kind == "opaque":
            names[op.name] += 1
            flops, moved = flops + work, moved + size
    share_of_flops, share_of_bytes = flops / max(1, all_flops), moved / max(1, all_moved)
    if not names or max(share_of_flops, share_of_bytes) < WORTH_SAYING:
        return None
    said = ", ".join(f"{name} × {count}" if count > 1 else name for name, count in names.most_common(5))
    more = f" and {len(names) - 5} others" if len(names) > 5 else ""
    percent = f"{math.ceil(share_of_flops * 1000) / 10:g}% of the FLOPs, {math.ceil(share_of_bytes * 1000) / 10:g}%"
    return (
        f"no cost rule for {said}{more}: estimated from above by their operands, at {percent} of the bytes moved; "
        f"`shardwright doctor --rules` lists what has rules"
    )
