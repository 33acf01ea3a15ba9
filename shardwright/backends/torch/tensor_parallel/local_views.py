"""Views, copies, slices and values made of nothing, on shards: only the sizes among the arguments change."""

import torch

from shardwright.backends.torch.tensor_parallel import random_ops
from shardwright.backends.torch.tensor_parallel.local_ops import as_recorded, rule
from shardwright.backends.torch.tensor_parallel.unit_call import Call


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "_reshape_alias")
def reshape(call: Call) -> bool:
    op, layout = call.pieces[0]
    if call.lowering.dtype(op.inputs[0]) != call.lowering.dtype(op.outputs[0]):
        return call.is_replicated and as_recorded(call)
    shape = call.lowering.local(op.outputs[0], layout.signature.outputs[0])
    (given,) = call.inputs(0)
    call.give(0, 0, call.lowering.source.call(torch.reshape, given, list(shape)))
    return True


@rule("expand", "broadcast_to")
def expand(call: Call) -> bool:
    op, layout = call.pieces[0]
    shape = call.lowering.local(op.outputs[0], layout.signature.outputs[0])
    call.give(0, 0, call.lowering.source.call(torch.broadcast_to, call.inputs(0)[0], list(shape)))
    return True


@rule("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "tensor_split")
def split(call: Call) -> bool:
    op, layout = call.pieces[0]
    dim = call.argument("dim", 0) % len(op.labels[0])
    sizes = [call.lowering.local(t, place)[dim] for t, place in zip(op.outputs, layout.signature.outputs, strict=True)]
    result = call.lowering.source.call(torch.split, call.inputs(0)[0], sizes, dim)
    call.give_all(result)
    return True


@rule("slice", "narrow")
def cut(call: Call) -> bool:
    op, layout = call.pieces[0]
    dim = call.argument("dim", 0) % len(op.labels[0])
    place = call.split_of(0, 0)
    if place is None or place.dim != dim:
        return as_recorded(call)
    step = call.argument("step", 1)
    if step != 1:
        result = call.lowering.source.call(torch.ops.aten.slice.Tensor, call.inputs(0)[0], dim, 0, None, step)
    else:
        size = call.lowering.local(op.outputs[0], layout.signature.outputs[0])[dim]
        start = op.offsets[0] // call.lowering.axis.size
        result = call.lowering.source.call(torch.narrow, call.inputs(0)[0], dim, start, size)
    call.give(0, 0, result)
    return True


rule("select", "unbind")(as_recorded)  # the dim that they select along is never split


@rule("cat", "concat", "concatenate")
def concatenate(call: Call) -> bool:
    """A concatenation. Empty vectors, which torch lets join anything, are left out of the graph."""
    dim = call.argument("dim", 0) % len(call.pieces[0][0].labels[-1])
    call.give(0, 0, call.lowering.source.call(torch.cat, call.inputs(0), dim))
    return True


@rule("copy")
def copy(call: Call) -> bool:
    """The result of ``copy_``: its second operand, in the shape and dtype of the first."""
    op, layout = call.pieces[0]
    shape = call.lowering.local(op.outputs[0], layout.signature.outputs[0])
    source = call.lowering.source
    cast = source.call(torch.Tensor.to, call.inputs(0)[0], call.lowering.dtype(op.outputs[0]))
    call.give(0, 0, source.call(torch.broadcast_to, cast, list(shape)))
    return True


@rule("repeat_interleave", whole=as_recorded)
def repeat_interleave(call: Call) -> bool:
    if len(call.pieces[0][0].inputs) != 1:
        return False
    repeats, dim = call.argument("repeats"), call.argument("dim")
    call.give(0, 0, call.lowering.source.call(torch.repeat_interleave, call.inputs(0)[0], repeats, dim))
    return True


FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero": 0, "_efficientzerotensor": 0, "ones": 1, "ones_like": 1,
         "new_ones": 1, "empty": 0, "empty_like": 0, "new_empty": 0, "empty_strided": 0, "new_empty_strided": 0,
         "empty_permuted": 0}  # fmt: skip


@rule(*FILLS, "full", "full_like", "new_full", "fill", "scalar_tensor")
def filled(call: Call) -> bool:
    op, layout = call.pieces[0]
    name = call.site.name
    value = FILLS.get(name, call.argument("fill_value", call.argument("value", call.argument("s"))))
    if not isinstance(value, (bool, int, float)):
        return call.is_replicated and as_recorded(call)
    shape = call.lowering.local(op.outputs[0], layout.signature.outputs[0])
    made = call.lowering.source.call(
        torch.full, list(shape), value, dtype=call.lowering.dtype(op.outputs[0]), device=call.lowering.device
    )
    call.give(0, 0, made)
    return True


@rule("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "uniform", "normal",
      "exponential", "random", "cauchy", "geometric", "log_normal", whole=as_recorded)  # fmt: skip
def drawn(call: Call) -> bool:
    place = call.split_of(0, 0, output=True)
    if place is None or call.pieces[0][0].inputs or call.site.template.inputs:
        return False
    call.lowering.seeded(call.site)
    args, kwargs = call.arguments({})
    made = call.lowering.source.call(
        random_ops.piece_of_whole, call.site.function, place, call.lowering.axis, *args, is_kept=True, **kwargs
    )
    call.give(0, 0, made)
    return True
