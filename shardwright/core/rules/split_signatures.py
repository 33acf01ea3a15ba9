"""The signatures that split something: one for every label of an op that may be cut along an axis."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from shardwright.core.layout.placements import Partial, Placement, Reduction, Replicate, Split
from shardwright.core.layout.signature import Need, Signature
from shardwright.core.model.graph import Graph, Op
from shardwright.core.rules import linearity as F

Blocks = tuple[int, ...]


def split_signatures(
    graph: Graph, op: Op, batch: int, blocks: Mapping[int, Blocks] | None = None
) -> tuple[Signature, ...]:
    """One signature for every label that can be split, at ``batch`` samples.

    ``blocks`` gives the parts of some labels' (whole) dims, which are then split part by part. Slices and
    concatenations cut a whole at the borders of their parts even without ``blocks``.
    """
    shapes = [graph.tensors[t].shape(batch) for t in (*op.inputs, *op.outputs)]
    sizes = graph.label_sizes(op, batch)
    found = []
    for label in sorted(sizes):
        signature = _of_label(op, label, sizes[label], shapes, (blocks or {}).get(label, ()))
        if signature is not None:
            found.append(signature)
    if op.kind in ("view", "copy") and len(op.inputs) == len(op.outputs) == 1:
        found += _inner_dims(op, shapes)
    return tuple(dict.fromkeys(found))


def _of_label(op: Op, label: int, size: int, shapes: Sequence[tuple[int, ...]], blocks: Blocks) -> Signature | None:
    outcome = _outcome(op, label)
    if outcome is None:
        return None
    result, need = outcome
    if op.kind in ("slice", "concat"):
        blocks = _refined(op, label, size, shapes, blocks)
    places: list[Placement] = []
    for position, (labels, shape) in enumerate(zip(op.labels, shapes, strict=True)):
        if labels.count(label) > 1:
            return None
        if label not in labels:
            is_output = position >= len(op.inputs)
            places.append(Partial(result) if is_output and result else Replicate())
            continue
        dim = labels.index(label)
        own = _own_blocks(op, position, shape[dim], size, blocks)
        if own is None:
            return None
        places.append(Split(dim, own))
    outputs = places[len(op.inputs) :]
    if result is None and any(isinstance(p, Replicate) for p in outputs):
        return None  # an output that does not carry the label would need all of it
    return Signature(tuple(places[: len(op.inputs)]), tuple(outputs), need)


def _outcome(op: Op, label: int) -> tuple[Reduction | None, Need] | None:
    """The (reduction left in outputs without the label, need of the op), or None where the label is never split."""
    role, name = op.role(label), op.base_name
    if op.kind == "reduction" and not any(label in labels for labels in op.output_labels):
        if len(op.inputs) > 1:  # a mean whose weights are counted: the counts are added up first
            return ("sum", "combine") if role == "sum" else None
        reduction = F.REDUCED.get(name) or F.REDUCED_BY_SUFFIX.get(_suffix(name))
        return (reduction, "") if reduction is not None and len(op.outputs) == 1 else None
    match role:
        case "map":
            return None, ""
        case "sum":
            return ("sum", "") if op.kind in ("contraction", "reduction") else None
        case "index":
            return "sum", "offset"
        case "statistic":
            return (None, "combine") if op.kind in ("softmax", "normalization") else None
        case _:
            return None


def _suffix(name: str) -> str:
    return "/" + name.partition("/")[2]


def _own_blocks(op: Op, position: int, size: int, whole: int, blocks: Blocks) -> Blocks | None:
    """The blocks of one operand's dim, from those of the label; None where they do not fit it."""
    if not blocks:
        return ()
    if size == whole:
        return blocks
    if op.kind in ("slice", "concat"):
        which = position - len(op.inputs) if op.kind == "slice" else position
        if which < 0 or which >= len(op.offsets):
            return None
        start, end = op.offsets[which], op.offsets[which] + size
        borders = list(accumulate(blocks, initial=0))
        inside = tuple(b - a for a, b in pairwise(borders) if start <= a and b <= end)
        return inside if len(inside) > 1 else ()
    scaled = tuple(b * size // whole for b in blocks)  # heads that merge with their width, grouped key heads
    return scaled if all(b * size % whole == 0 for b in blocks) else None


def _refined(op: Op, label: int, size: int, shapes: Sequence[tuple[int, ...]], blocks: Blocks) -> Blocks:
    """The blocks with borders wherever a part starts or ends."""
    borders = set(accumulate(blocks)) if blocks else set()
    parts = range(len(op.inputs), len(op.labels)) if op.kind == "slice" else range(len(op.inputs))
    for position in parts:
        labels = op.labels[position]
        which = position - len(op.inputs) if op.kind == "slice" else position
        if label in labels and which < len(op.offsets):
            own = shapes[position][labels.index(label)]
            if own != size:
                borders |= {op.offsets[which], op.offsets[which] + own}
    places = sorted(borders | {0, size})
    return tuple(b - a for a, b in pairwise(places)) if len(places) > 2 else ()


def _inner_dims(op: Op, shapes: Sequence[tuple[int, ...]]) -> Iterator[Signature]:
    """The signatures of a dim that merges into a larger one behind another (3 of q|k|v, then heads): splitting it is
    splitting every block of the merged dim. The same holds the other way for a dim that comes apart."""
    before, after = shapes
    if len(before) < len(after):
        for merged, (first, end) in _groups(before, after):
            yield from _blocks_of(merged, range(first, end), after, inputs_first=True)
    elif len(after) < len(before):
        for merged, (first, end) in _groups(after, before):
            yield from _blocks_of(merged, range(first, end), before, inputs_first=False)


def _blocks_of(merged: int, dims: range, shape: tuple[int, ...], *, inputs_first: bool) -> Iterator[Signature]:
    outer = 1
    for dim in dims:
        inner = 1
        for later in dims:
            if later > dim:
                inner *= shape[later]
        if outer > 1 and shape[dim] > 1:
            whole: Placement = Split(merged, (shape[dim] * inner,) * outer)
            part: Placement = Split(dim)
            yield Signature((whole,), (part,)) if inputs_first else Signature((part,), (whole,))
        outer *= shape[dim]


def _groups(merged: Sequence[int], apart: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """The (dim of ``merged``, range of dims of ``apart`` that it is made of) for every dim made of several."""
    j = 0
    for i, size in enumerate(merged):
        first, covered = j, 1
        while j < len(apart) and (covered < size or (j == first and covered == size)):
            covered *= apart[j]
            j += 1
        if covered != size:
            return
        if j - first > 1:
            yield i, (first, j)
