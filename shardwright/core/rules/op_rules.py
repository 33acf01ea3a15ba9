"""Labels for the ops of both frameworks: the dims of the operands that belong together (see `core.model.graph.Op`).

Backends call these functions when they translate an op. Each takes shapes and returns a `Labelled`: the labels of every
input, then of every output, and the special roles of some labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from shardwright.core.errors import CaptureError
from shardwright.core.model.graph import LabelRole

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Labelled:
    """The fields of `core.model.graph.Op` beside kind, name and operands."""

    labels: tuple[tuple[int, ...], ...]
    special: tuple[tuple[int, LabelRole], ...] = ()
    offsets: tuple[int, ...] = ()


def opaque(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Labelled:
    """Labels of an op of which nothing is known: whole tensors in, whole tensors out."""
    return Labelled(tuple((-1,) * len(shape) for shape in (*inputs, *outputs)))


def elementwise(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Labelled:
    """Labels of NumPy broadcasting: dims are aligned from the right, and size 1 stretches."""
    rank = max((len(s) for s in (*inputs, *outputs)), default=0)
    full = [max((s[i - rank] for s in (*inputs, *outputs) if len(s) >= rank - i), default=1) for i in range(rank)]

    def of(shape: Shape) -> tuple[int, ...]:
        first = rank - len(shape)
        return tuple(first + i if size == full[first + i] and size != 1 else -1 for i, size in enumerate(shape))

    return Labelled(tuple(of(shape) for shape in (*inputs, *outputs)))


def transpose(permutation: Sequence[int]) -> Labelled:
    """Labels of a transposition: output dim i is input dim ``permutation[i]``."""
    return Labelled((tuple(range(len(permutation))), tuple(permutation)))


def reshape(before: Shape, after: Shape) -> Labelled:
    """Labels of a reshape, whose dims stay, merge or come apart. In a group of dims that merge or come apart only the
    outermost keeps its label: a contiguous shard of it is a contiguous shard of the merged dim."""
    a: list[int] = [-1] * len(before)
    b: list[int] = [-1] * len(after)
    fresh = count()
    i = j = 0
    while i < len(before) and j < len(after):
        first_i, first_j, left, right = i, j, before[i], after[j]
        while left != right:
            if left < right:
                i += 1
                if i == len(before):
                    return Labelled((tuple(a), tuple(b)))
                left *= before[i]
            else:
                j += 1
                if j == len(after):
                    return Labelled((tuple(a), tuple(b)))
                right *= after[j]
        # Skip leading ones inside the group: they are not the outermost real dim.
        while first_i < i and before[first_i] == 1:
            first_i += 1
        while first_j < j and after[first_j] == 1:
            first_j += 1
        if before[first_i] != 1 and after[first_j] != 1:
            a[first_i] = b[first_j] = next(fresh)
        i, j = i + 1, j + 1
    return Labelled((tuple(a), tuple(b)))


def broadcast(before: Shape, after: Shape, dims: Sequence[int]) -> Labelled:
    """Labels of a broadcast: input dim i becomes output dim ``dims[i]``, and the other output dims are new."""
    source = tuple(d if before[i] == after[d] and before[i] != 1 else -1 for i, d in enumerate(dims))
    return Labelled((source, tuple(range(len(after)))))


def reduction(shape: Shape, dims: Sequence[int], *, keep_dims: bool = False, outputs: int = 1) -> Labelled:
    """Labels of a sum, mean, max … over ``dims``; the reduced labels are contracted."""
    reduced = {d % len(shape) for d in dims} if len(shape) else set()
    source = tuple(range(len(shape)))
    result = tuple(-1 if d in reduced else d for d in source if keep_dims or d not in reduced)
    return Labelled((source, *([result] * outputs)))


def over_dims(
    shape: Shape, dims: Sequence[int], role: LabelRole, *, extra_inputs: Sequence[Shape] = (), outputs: int = 1
) -> Labelled:
    """Labels of an op that keeps its tensor's shape and works along ``dims``: softmax and normalisation ("statistic"),
    sort and cumulative sum ("whole"). Extra inputs are aligned from the right."""
    source = tuple(range(len(shape)))
    extras = elementwise([shape, *extra_inputs], [shape]).labels[1:-1]
    special = tuple((d % len(shape), role) for d in dims)
    return Labelled((source, *extras, *([source] * outputs)), special)


def contraction(left: str, right: str, out: str) -> Labelled:
    """Labels of a product in einsum letters: ``contraction("bsk", "kn", "bsn")``. ``_`` is a dim never split."""
    return Labelled(_of_letters(left, right, out)[0])


def _of_letters(*operands: str) -> tuple[tuple[tuple[int, ...], ...], dict[str, int]]:
    """The labels of operands given in letters, and the label of every letter."""
    numbers: dict[str, int] = {}
    labels = (
        tuple(-1 if letter == "_" else numbers.setdefault(letter, len(numbers)) for letter in letters)
        for letters in operands
    )
    return tuple(labels), numbers


def gather(table: Shape, dim: int, index: Shape) -> Labelled:
    """Labels of a lookup of rows of ``table`` along ``dim`` by ``index``: the output has the index's dims in place of
    ``dim`` (an embedding has dim 0). Splitting the looked-up dim leaves a partial sum."""
    rows = tuple(range(len(table)))
    places = tuple(range(len(table), len(table) + len(index)))
    return Labelled((rows, places, (*rows[:dim], *places, *rows[dim + 1 :])), ((dim, "index"),))


def take_along(table: Shape, dim: int, index: Shape) -> Labelled:
    """Labels of `torch.gather` and `take_along_axis`: as many dims as the table, with the index in place of ``dim``."""
    rows = tuple(range(len(table)))
    new = len(table)
    places = tuple(new if d == dim else (d if index[d] == table[d] else -1) for d in rows)
    return Labelled((rows, places, places), ((dim, "index"),))


def parts(whole: Shape, dim: int, pieces: Sequence[Shape], offsets: Sequence[int]) -> Labelled:
    """Labels of a slice (whole → pieces) along ``dim``; `concatenation` is the reverse."""
    if len(pieces) != len(offsets):
        raise CaptureError(f"{len(pieces)} parts need as many offsets: given {len(offsets)}")
    labels = tuple(range(len(whole)))
    return Labelled((labels, *([labels] * len(pieces))), (), tuple(offsets))


def concatenation(pieces: Sequence[Shape], dim: int) -> Labelled:
    """Labels of a concatenation of pieces along ``dim``."""
    labels = tuple(range(len(pieces[0])))
    offsets: list[int] = []
    start = 0
    for piece in pieces:
        offsets.append(start)
        start += piece[dim]
    return Labelled((*([labels] * len(pieces)), labels), (), tuple(offsets))


def attention(
    query: str, key: str, value: str, out: str, masks: Sequence[Shape] = (), *, causal: bool = False
) -> Labelled:
    """Labels of an attention in letters, e.g. ``("bhsd", "bhtd", "bhtv", "bhsv")``. ``d`` (width of queries and keys)
    and ``t`` (keys) are whole, and so is ``s`` when ``causal``, because a shard of the queries does not know where it
    starts; ``v`` (width of values) may be split. A mask's dims are aligned with batch, head, query and key, and are
    only split with these. ``_`` is a dim that is never split. Grouped key heads carry the label of the query heads: a
    contiguous shard of one goes with the same shard of the other."""
    (*labelled, result), numbers = _of_letters(query, key, value, out)
    order = (*query[:-1], "t")  # a mask is [batch, head, query, key], its size-1 dims stretch
    mask_labels = tuple(
        tuple(numbers.get(letter, -1) if size != 1 else -1 for letter, size in zip(order[-len(m) :], m, strict=True))
        for m in masks
    )
    whole = [letter for letter in numbers if letter not in out or letter == "d" or (causal and letter == "s")]
    special: list[tuple[int, LabelRole]] = [(numbers[letter], "whole") for letter in whole]
    return Labelled((*labelled, *mask_labels, result), tuple(special))


def matmul(left: Shape, right: Shape) -> Labelled:
    """Labels of `torch.matmul` and `jnp.matmul`: the last dim of left with the second to last of right; leading dims
    broadcast."""
    if not left or not right:
        raise CaptureError(f"a matrix product takes operands of one dim or more: given {tuple(left)}, {tuple(right)}")
    row, column, summed = 0, 1, 2
    a, b = ([row] if len(left) > 1 else []), ([column] if len(right) > 1 else [])
    lead_a, lead_b = left[:-2], right[:-2]
    rank = max(len(lead_a), len(lead_b))
    lead = [max((s[i - rank] for s in (lead_a, lead_b) if len(s) >= rank - i), default=1) for i in range(rank)]

    def of(shape: Shape) -> tuple[int, ...]:
        first = rank - len(shape)
        return tuple(3 + first + i if size == lead[first + i] else -1 for i, size in enumerate(shape))

    return Labelled(((*of(lead_a), *a, summed), (*of(lead_b), summed, *b), (*range(3, 3 + rank), *a, *b)))


def convolution(source: Shape, kernel: Shape, out: Shape, *, groups: int = 1, transposed: bool = False) -> Labelled:
    """Labels of a convolution of [batch, channels, …]. The kernel is [out, in / groups, …], or [in, out / groups, …]
    when transposed. Channels and batch may be split; positions are never split (they would need their neighbours). The
    label sizes multiply to the multiply-adds."""
    spatial = len(source) - 2
    batch, produced, consumed = 0, 1, 2
    places = tuple(range(3, 3 + spatial))
    window = tuple(range(3 + spatial, 3 + 2 * spatial))
    special: list[tuple[int, LabelRole]] = [(label, "whole") for label in (*places, *window)]
    unsplit = (-1,) * spatial
    if transposed:
        if groups == 1:
            labels = ((batch, consumed, *places), (consumed, produced, *window), (batch, produced, *unsplit))
        else:
            labels = ((batch, consumed, *places), (consumed, produced, *window), (batch, -1, *unsplit))
            special += [(produced, "whole"), (consumed, "whole")]
        return Labelled(labels, tuple(special))
    if groups == 1:
        return Labelled(
            ((batch, consumed, *unsplit), (produced, consumed, *window), (batch, produced, *places)), tuple(special)
        )
    # A channel of a depthwise convolution needs only itself; in wider groups channels are not split.
    depthwise = groups == source[1] == out[1]
    special += [(consumed, "whole")] if depthwise else [(consumed, "whole"), (produced, "whole")]
    channels = produced if depthwise else -1
    return Labelled(
        ((batch, channels, *unsplit), (produced, consumed, *window), (batch, produced, *places)), tuple(special)
    )


def unbound(whole: Shape, dim: int, pieces: int = 1) -> Labelled:
    """Labels of `select` and `unbind`: one index of ``dim`` for each output, without the dim, which is never split."""
    labels = tuple(range(len(whole)))
    piece = (*labels[:dim], *labels[dim + 1 :])
    return Labelled((labels, *([piece] * pieces)), ((dim, "whole"),))


def stack(piece: Shape, dim: int, pieces: int) -> Labelled:
    """Labels of pieces joined along a new ``dim`` of the output, which is never split."""
    labels = tuple(range(len(piece)))
    return Labelled((*([labels] * pieces), (*labels[:dim], -1, *labels[dim:])))


def same_sizes(before: Shape, after: Shape, *, changed: Sequence[int] = ()) -> Labelled:
    """Labels of an op that keeps the rank and works within some dims (pad, roll, pool, resize): a dim keeps its label
    when it is not named in ``changed`` and has the same size on both sides."""
    dims = {d % len(before) for d in changed}
    labels = tuple(i if i not in dims and before[i] == after[i] else -1 for i in range(len(before)))
    return Labelled((labels, labels))


def strided(before: Shape, dim: int, start: int, step: int, after: Shape) -> Labelled:
    """Labels of every ``step``-th entry of a dim. From the first to the last, a shard of whole steps gives a shard."""
    labels = tuple(range(len(before)))
    if start == 0 and before[dim] == step * after[dim]:
        return Labelled((labels, labels))
    return same_sizes(before, after, changed=(dim,))


def padded(labelled: Labelled, in_front: Sequence[int]) -> Labelled:
    """The labels of a pad by a constant, with the entries in front of every dim, where none is cut off there."""
    return labelled if min(in_front, default=0) < 0 else replace(labelled, offsets=tuple(in_front))


def windowed(labelled: Labelled, padding: int, span: int, stride: int) -> Labelled:
    """The labels of a convolution over one dim, with the padding at both its ends, the entries from the first to the
    last that a window reads, and the entries from one window to the next."""
    return replace(labelled, offsets=(padding, span, stride))


def windows(before: Shape, after: Shape, window: Sequence[int], *, adjoining: bool) -> Labelled:
    """Labels of an op over windows of the last dims, one for each window size. Those dims may be split when the windows
    adjoin (stride equal to the window, no padding) and fill them."""
    first = len(before) - len(window)
    kept = tuple(
        d if d < first or (adjoining and before[d] == after[d] * window[d - first]) else -1 for d in range(len(before))
    )
    return Labelled((kept, kept))


def repeat_within(shape: Shape, dim: int) -> Labelled:
    """Labels of an op that repeats every entry of ``dim`` in place, equally often: contiguous shards stay so."""
    labels = tuple(range(len(shape)))
    return Labelled((labels, labels if shape[dim] != 1 else (*labels[:dim], -1, *labels[dim + 1 :])))


def meet(first: Labelled, second: Labelled) -> Labelled:
    """Labels that hold in two captures of one op: dims belong together when they do in both, and a label's role is the
    more restrictive of the two. Offsets that differ leave all labels unsplit."""
    if first == second:
        return first
    numbers: dict[tuple[int, int], int] = {}
    labels = tuple(
        tuple(-1 if -1 in pair else numbers.setdefault(pair, len(numbers)) for pair in zip(a, b, strict=True))
        for a, b in zip(first.labels, second.labels, strict=True)
    )
    order: tuple[LabelRole, ...] = ("map", "sum", "statistic", "index", "whole")
    special: list[tuple[int, LabelRole]] = []
    for (a, b), label in numbers.items():
        roles: list[LabelRole] = [r for n, r in first.special if n == a] + [r for n, r in second.special if n == b]
        if roles:
            special.append((label, max(roles, key=order.index)))
    if first.offsets != second.offsets:
        return Labelled(labels, tuple((label, "whole") for label in numbers.values()))
    return Labelled(labels, tuple(special), first.offsets)
