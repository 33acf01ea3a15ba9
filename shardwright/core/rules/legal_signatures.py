"""The rules of an op as a whole: every signature along one axis, and the conditions of a mesh with several axes."""

from collections.abc import Iterable, Mapping, Sequence

from shardwright.core.layout.placements import Layout, Replicate, Split
from shardwright.core.layout.signature import Signature
from shardwright.core.model.graph import Graph, Op
from shardwright.core.rules.partial_signatures import partial_signatures
from shardwright.core.rules.split_signatures import Blocks, split_signatures


def replicated(op: Op) -> Signature:
    """The signature with whole operands everywhere, legal for every op and the only one known of an opaque op."""
    return Signature((Replicate(),) * len(op.inputs), (Replicate(),) * len(op.outputs))


def signatures(
    graph: Graph, op: Op, batch: int = 2, blocks: Mapping[int, Blocks] | None = None
) -> tuple[Signature, ...]:
    """All signatures of an op along one axis: replicated, one for every label that can be split, partial values.

    ``blocks`` gives the parts of labels that are split part by part (see `split_signatures`). Whether a degree divides
    the dims that it splits is checked by `divides`.
    """
    found = [replicated(op), *split_signatures(graph, op, batch, blocks)]
    if op.kind != "opaque":
        found += partial_signatures(graph, op)
    return tuple(dict.fromkeys(found))


def is_fallback(op: Op) -> bool:
    """Whether replicating is all that is known of the op."""
    return op.kind == "opaque"


def divides(shape: Sequence[int], splits: Iterable[tuple[Split, int]]) -> bool:
    """Whether a tensor of ``shape`` can be cut in equal shards; ``splits`` are (placement, degree), one for each axis.

    Axes that split one dim cut it one after the other, all by the same blocks. A cut of the whole dim and a cut of its
    parts do not commute, so no tensor has both.
    """
    ways: dict[int, int] = {}
    parts: dict[int, Blocks] = {}
    for split, degree in splits:
        ways[split.dim] = ways.get(split.dim, 1) * degree
        if parts.setdefault(split.dim, split.blocks) != split.blocks:
            return False
    return all(all(part % n == 0 for part in parts[dim] or (shape[dim],)) for dim, n in ways.items())


def fits(shape: Sequence[int], layout: Layout, sizes: Mapping[str, int]) -> bool:
    """Whether a tensor of ``shape`` can have ``layout`` with equal shards on axes of these sizes."""
    return divides(shape, [(p, sizes[axis]) for axis, p in layout.placements if isinstance(p, Split)])
