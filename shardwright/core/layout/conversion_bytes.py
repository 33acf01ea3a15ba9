"""OneFlow's table of conversions along one axis, in closed form, for dims that divide (arXiv 2110.15032, table 2)."""

from shardwright.core.errors import LayoutError
from shardwright.core.layout.placements import Partial, Placement, Replicate, Split


def table_bytes(before: Placement, after: Placement, ranks: int, size_bytes: float) -> float:
    """Bytes that all ``ranks`` together move to convert a tensor of ``size_bytes`` in all: (n-1)/n·|T| between splits,
    (n-1)·|T| to gather or to reduce into shards, 2(n-1)·|T| to reduce and share, nothing for what is local."""
    if ranks < 1:
        raise LayoutError(f"an axis has at least one rank: given {ranks}")
    if before == after or isinstance(before, Replicate):
        return 0.0
    if isinstance(after, Partial):
        if not isinstance(before, Partial) or {before.op, after.op} == {"sum", "mean"}:
            return 0.0
        return 2 * (ranks - 1) * size_bytes  # reduced and shared, then replicated values stand as terms
    if isinstance(before, Split):
        return (ranks - 1) * size_bytes / (ranks if isinstance(after, Split) else 1)
    return (2 if isinstance(after, Replicate) else 1) * (ranks - 1) * size_bytes
