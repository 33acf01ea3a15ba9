"""The ops of a captured model that have rules, and the share of its work that falls back on replicating everything."""

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.core.cost.unit_work import contraction_flops
from shardwright.core.model.graph import Graph, OpKind
from shardwright.core.rules.legal_signatures import is_fallback, signatures


@dataclass(frozen=True, slots=True)
class OpCoverage:
    """One op by the framework's name, over all graphs."""

    name: str
    kind: OpKind
    count: int
    rules: int
    """The most signatures of any occurrence, the replicated one included."""
    flops: int
    moved_bytes: int
    is_fallback: bool


@dataclass(frozen=True, slots=True)
class Coverage:
    """All ops of some graphs."""

    ops: tuple[OpCoverage, ...]

    @property
    def fallback_flops_share(self) -> float:
        return _share([(op.flops, op.is_fallback) for op in self.ops])

    @property
    def fallback_bytes_share(self) -> float:
        return _share([(op.moved_bytes, op.is_fallback) for op in self.ops])


def coverage(graphs: Iterable[Graph], batch: int = 2) -> Coverage:
    """Count the ops of the graphs by name and kind, with their FLOPs and the bytes of their operands and results."""
    found: dict[tuple[str, OpKind], list[int]] = {}
    fallback: set[tuple[str, OpKind]] = set()
    for graph in graphs:
        for op in graph.ops:
            key = (op.name, op.kind)
            row = found.setdefault(key, [0, 0, 0, 0])
            rules = len(signatures(graph, op, batch))
            row[0] += 1
            row[1] = max(row[1], rules)
            row[2] += contraction_flops(graph, op, batch)
            if op.kind not in ("view", "create"):
                row[3] += sum(graph.tensors[t].size_bytes(batch) for t in (*op.inputs, *op.outputs))
            has_entries = any(graph.tensors[t].elements(batch) > batch for t in (*op.inputs, *op.outputs))
            if is_fallback(op) or (rules == 1 and has_entries and op.kind != "create"):
                fallback.add(key)
    rows = (
        OpCoverage(name, kind, count, rules, flops, moved, (name, kind) in fallback)
        for (name, kind), (count, rules, flops, moved) in found.items()
    )
    return Coverage(tuple(sorted(rows, key=lambda op: (not op.is_fallback, op.kind, op.name))))


def _share(rows: list[tuple[int, bool]]) -> float:
    total = sum(size for size, _ in rows)
    return sum(size for size, falls in rows if falls) / total if total else 0.0
