"""Look-ups and writes by index."""

from shardwright.backends.torch.capture.ops.template import OpCall, Ref, rule, shapes
from shardwright.core.model.graph import LabelRole
from shardwright.core.rules import op_rules as labels
from shardwright.core.rules.op_rules import Labelled


@rule("gather", "embedding")
def embedding(call: OpCall) -> None:
    weight, index = call["weight"], call["indices"]
    call.add("gather", [weight, index], [call.out], labels.gather(weight.shape, 0, index.shape))


@rule("gather", "index_select")
def index_select(call: OpCall) -> None:
    source, index = call["self"], call["index"]
    if not index.shape:  # a single number selects one entry and keeps the dim
        call.add("gather", [source, index], [call.out], labels.opaque(shapes([source, index]), [call.out.shape]))
        return
    dim = call["dim"] % len(source.shape)
    call.add("gather", [source, index], [call.out], labels.gather(source.shape, dim, index.shape))


@rule("gather", "gather")
def gather(call: OpCall) -> None:
    """A gather along a dim. Dims of the index may be shorter than the source's: only dims of equal size go together."""
    source, index = call["self"], call["index"]
    dim = call["dim"] % len(source.shape)
    call.add("gather", [source, index], [call.out], labels.take_along(source.shape, dim, index.shape))


@rule("gather", "index", "_unsafe_index", "take")
def advanced_index(call: OpCall) -> None:
    """Indexing by tensors. One index tensor looks rows up along its dim; with several, the indexed dims are whole."""
    source = call["self"]
    given = call.get("indices") or []
    indexed = [(dim, ref) for dim, ref in enumerate(given) if isinstance(ref, Ref)]
    if len(indexed) == 1 and indexed[0][1].dtype not in ("bool", "uint8"):
        dim, index = indexed[0]
        call.add("gather", [source, index], [call.out], labels.gather(source.shape, dim, index.shape))
        return
    dims = [dim for dim, _ in indexed]
    refs = [ref for _, ref in indexed]
    plain = all(ref.dtype not in ("bool", "uint8") for ref in refs)
    if not indexed or not plain or dims != list(range(dims[0], dims[0] + len(dims))):
        call.add("gather", call.inputs, [call.out], labels.opaque(shapes(call.inputs), [call.out.shape]))
        return
    # Neighbouring index tensors broadcast together and stand where the first of them stood.
    rows = tuple(range(len(source.shape)))
    places = len(call.out.shape) - (len(rows) - len(dims))
    full = call.out.shape[dims[0] : dims[0] + places]
    first = len(rows)
    aligned = labels.elementwise([*shapes(refs), full], [full]).labels
    shift = [tuple(first + n if n >= 0 else -1 for n in label) for label in aligned]
    out = (*rows[: dims[0]], *shift[-1], *rows[dims[0] + len(dims) :])
    special: tuple[tuple[int, LabelRole], ...] = tuple((d, "whole") for d in dims)
    call.add("gather", [source, *refs], [call.out], Labelled((rows, *shift[: len(refs)], out), special))


@rule("scatter", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill", "index_put",
      "_index_put_impl", "masked_scatter", "put", "index_reduce", "_unsafe_index_put")  # fmt: skip
def scatter(call: OpCall) -> None:
    """A write into a copy of the first operand. Along ``dim`` nothing is split; for writes by position without a
    ``dim``, nothing at all."""
    target = call.inputs[0]
    rank = len(target.shape)
    dim = call.get("dim")
    if dim is None or not rank or call.name in ("index_fill",):
        call.add("scatter", call.inputs, [call.out], labels.opaque(shapes(call.inputs), [call.out.shape]))
        return
    dim %= rank
    kept = tuple(-1 if d == dim else d for d in range(rank))
    operands = tuple(
        tuple(k if n == target.shape[d] else -1 for d, (k, n) in enumerate(zip(kept, ref.shape, strict=True)))
        if len(ref.shape) == rank
        else (-1,) * len(ref.shape)
        for ref in call.inputs[1:]
    )
    call.add("scatter", call.inputs, [call.out], Labelled((kept, *operands, kept)))


@rule("scatter", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")
def slice_scatter(call: OpCall) -> None:
    """A write of a part into a copy of the whole."""
    whole, piece = call.inputs[:2]
    if call.name not in ("slice_scatter", "select_scatter"):
        call.add("scatter", [whole, piece], [call.out], labels.opaque(shapes([whole, piece]), [call.out.shape]))
        return
    dim = call.get("dim", 0) % len(whole.shape)
    kept = tuple(-1 if d == dim else d for d in range(len(whole.shape)))
    inner = kept if call.name == "slice_scatter" else (*kept[:dim], *kept[dim + 1 :])
    call.add("scatter", [whole, piece], [call.out], Labelled((kept, inner, kept)))
