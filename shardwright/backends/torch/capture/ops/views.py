"""Views, slices, concatenations, and copies that rearrange."""

from itertools import accumulate

from shardwright.backends.torch.capture.ops.template import OpCall, Ref, rule, shapes
from shardwright.core.model.graph import OpKind
from shardwright.core.rules import op_rules as labels
from shardwright.core.rules.op_rules import Labelled


def _view(call: OpCall, labelled: Labelled) -> None:
    kind: OpKind = "view" if call.shares_memory or call.name == "_unsafe_view" else "copy"
    call.add(kind, call.inputs[:1], [call.out], labelled)


@rule("view", "view", "reshape", "_unsafe_view", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze",
      "_reshape_alias")  # fmt: skip
def reshape(call: OpCall) -> None:
    source = call.inputs[0]
    if source.dtype != call.out.dtype:  # a view of the bits as another dtype
        _view(call, labels.same_sizes(source.shape, call.out.shape) if len(source.shape) == len(call.out.shape)
              else labels.opaque([source.shape], [call.out.shape]))  # fmt: skip
        return
    _view(call, labels.reshape(source.shape, call.out.shape))


@rule("view", "transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT", "adjoint", "matrix_H")
def transpose(call: OpCall) -> None:
    rank = len(call.inputs[0].shape)
    order = list(range(rank))
    if call.name == "numpy_T":
        order.reverse()
    elif rank > 1:
        a, b = (call.get("dim0", call.get("axis0", -2)), call.get("dim1", call.get("axis1", -1)))
        order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    _view(call, labels.transpose(order))


@rule("view", "movedim", "moveaxis")
def move_dims(call: OpCall) -> None:
    rank = len(call.inputs[0].shape)
    moved, to = (
        [dim % rank for dim in (given if isinstance(given, list | tuple) else [given])]
        for given in (call["source"], call["destination"])
    )
    order = [dim for dim in range(rank) if dim not in moved]
    for position, dim in sorted(zip(to, moved, strict=True)):
        order.insert(position, dim)
    _view(call, labels.transpose(order))


@rule("view", "permute")
def permute(call: OpCall) -> None:
    rank = len(call.inputs[0].shape)
    _view(call, labels.transpose([d % rank for d in call["dims"]]))


@rule("view", "expand", "broadcast_to")
def expand(call: OpCall) -> None:
    before, after = call.inputs[0].shape, call.out.shape
    first = len(after) - len(before)
    _view(call, labels.broadcast(before, after, range(first, len(after))))


@rule("view", "real", "imag", "view_as_real", "view_as_complex", "_conj", "conj", "resolve_conj", "resolve_neg",
      "_neg_view")  # fmt: skip
def complex_view(call: OpCall) -> None:
    """A view of complex numbers as real ones, or back. The last dim of two is never split."""
    before, after = call.inputs[0].shape, call.out.shape
    shared = tuple(range(min(len(before), len(after))))
    _view(
        call,
        Labelled(((*shared, *(-1,) * (len(before) - len(shared))), (*shared, *(-1,) * (len(after) - len(shared))))),
    )


@rule("view", "as_strided", "unfold", "diagonal", "diag_embed")
def irregular(call: OpCall) -> None:
    _view(call, labels.opaque([call.inputs[0].shape], [call.out.shape]))


@rule("slice", "slice", "narrow")
def cut(call: OpCall) -> None:
    source, out = call.inputs[0], call.out
    dim = call.get("dim", 0) % len(source.shape)
    step = call.get("step", 1)
    if step != 1:
        call.add("slice", [source], [out], labels.strided(source.shape, dim, call.get("start") or 0, step, out.shape))
        return
    start = call.get("start") or 0
    size = source.shape[dim]
    start = min(max(start + size if start < 0 else start, 0), size)
    call.add("slice", [source], [out], labels.parts(source.shape, dim, [out.shape], [start]))


@rule("slice", "split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk",
      "tensor_split")  # fmt: skip
def split(call: OpCall) -> None:
    source = call.inputs[0]
    dim = call.get("dim", 0) % len(source.shape)
    starts = list(accumulate((out.shape[dim] for out in call.outputs), initial=0))[:-1]
    call.add("slice", [source], call.outputs, labels.parts(source.shape, dim, shapes(call.outputs), starts))


@rule("slice", "select", "unbind")
def select(call: OpCall) -> None:
    source = call.inputs[0]
    dim = call.get("dim", 0) % len(source.shape)
    call.add("slice", [source], call.outputs, labels.unbound(source.shape, dim, len(call.outputs)))


@rule("concat", "cat", "concat", "concatenate")
def concatenate(call: OpCall) -> None:
    """A concatenation. Torch lets empty 1-D tensors join anything; they hold nothing, so they are left out."""
    rank = len(call.out.shape)
    held = [r for r in call.inputs if len(r.shape) == rank and not (0 in r.shape and 0 not in call.out.shape)]
    if not held:
        held = [r for r in call.inputs if len(r.shape) == rank]
    dim = call.get("dim", 0) % rank
    if len(held) == 1:
        call.add("copy", held, [call.out], labels.elementwise(shapes(held), [call.out.shape]))
        return
    call.add("concat", held, [call.out], labels.concatenation(shapes(held), dim))


@rule("concat", "stack")
def stack(call: OpCall) -> None:
    dim = call.get("dim", 0) % len(call.out.shape)
    call.add("concat", call.inputs, [call.out], labels.stack(call.inputs[0].shape, dim, len(call.inputs)))


@rule("copy", "pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
      "replication_pad1d", "replication_pad2d", "replication_pad3d")  # fmt: skip
def pad(call: OpCall) -> None:
    source, given = call.inputs[0], call.get("pad", call.get("padding"))
    ends = list(zip(given[-2::-2], given[-1::-2], strict=True))  # of the last dims, in order
    ends = [(0, 0)] * (len(source.shape) - len(ends)) + ends
    changed = [dim for dim, end in enumerate(ends) if any(end)]  # a shift moves entries, and keeps the size
    labelled = labels.same_sizes(source.shape, call.out.shape, changed=changed)
    if call.name == "constant_pad_nd" or (call.name == "pad" and call.get("mode", "constant") == "constant"):
        labelled = labels.padded(labelled, [front for front, _ in ends])
    call.add("copy", [source], [call.out], labelled)


@rule("copy", "roll", "flip", "rot90")
def rearrange(call: OpCall) -> None:
    source = call.inputs[0]
    rank = len(source.shape)
    dims = call.get("dims") or range(rank)
    call.add("copy", [source], [call.out], labels.same_sizes(source.shape, call.out.shape, changed=list(dims)))


@rule("copy", "repeat", "tile")
def repeat(call: OpCall) -> None:
    """A repetition of whole copies, one after the other. A dim that is repeated is never split."""
    before, after = call.inputs[0].shape, call.out.shape
    first = len(after) - len(before)
    kept = tuple(i if before[i] == after[first + i] else -1 for i in range(len(before)))
    call.add("copy", call.inputs[:1], [call.out], Labelled((kept, (*(-1,) * first, *kept))))


@rule("copy", "repeat_interleave")
def repeat_interleave(call: OpCall) -> None:
    source, out = call.inputs[0], call.out
    dim = call.get("dim")
    if dim is None or isinstance(call.get("repeats"), Ref) or len(source.shape) != len(out.shape):
        call.add("copy", call.inputs, [out], labels.opaque(shapes(call.inputs), [out.shape]))
        return
    call.add("copy", [source], [out], labels.repeat_within(source.shape, dim % len(source.shape)))


@rule("copy", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
      "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "pixel_shuffle", "pixel_unshuffle",
      "channel_shuffle", "im2col", "col2im", "grid_sampler", "grid_sampler_2d")  # fmt: skip
def resample(call: OpCall) -> None:
    """A change of positions. The batch stays split; channels too, where their number does not change."""
    source, out = call.inputs[0], call.out
    if len(source.shape) != len(out.shape):
        call.add("copy", call.inputs, [out], labels.opaque(shapes(call.inputs), [out.shape]))
        return
    spatial = range(2, len(source.shape))
    call.add("copy", [source], [out], labels.same_sizes(source.shape, out.shape, changed=list(spatial)))
