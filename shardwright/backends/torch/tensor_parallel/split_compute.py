"""Products, attention, statistics, look-ups, dropout and losses on shards."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from shardwright.backends.torch.tensor_parallel import columns, fp8_shards, lookups, random_ops, statistics
from shardwright.backends.torch.tensor_parallel.generated_source import Var
from shardwright.backends.torch.tensor_parallel.local_ops import as_recorded, rule
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError
from shardwright.backends.torch.tensor_parallel.unit_call import Call
from shardwright.core.layout.placements import Partial, Replicate, Split

R = Replicate()


@rule("dropout")
def dropout(call: Call) -> bool:
    op = call.pieces[0][0]
    if not call.argument("train", True) or not call.argument("p"):
        call.give(0, 0, call.inputs(0)[0])
        return True
    place = call.split_of(0, 0)
    call.lowering.seeded(call.site)
    shape = list(call.lowering.shape(op.inputs[0]))
    made = call.lowering.source.call(
        random_ops.dropout, call.inputs(0)[0], call.argument("p"), place, shape, call.site.order, call.lowering.axis,
        is_kept=True,
    )  # fmt: skip
    call.give(0, 0, made)
    return True


# -- products ---------------------------------------------------------------------------------------------------------


@rule("linear")
def linear(call: Call) -> bool:
    return _product(call, columns.linear)


@rule("addmm", "baddbmm", "addmv", "mm")
def product_and_sum(call: Call) -> bool:
    in_fp8 = _is_in_fp8(call)
    if call.argument("alpha", 1) != 1 or call.argument("beta", 1) != 1:
        if in_fp8:
            raise NotReplayableError(f"{call.site.name} with factors in fp8")
        if call.is_flat_product:
            raise NotReplayableError(f"{call.site.name} with factors over flattened dims")
        return call.is_replicated and as_recorded(call)
    if call.is_replicated and not call.is_flat_product and not in_fp8:
        return as_recorded(call)
    return _product(call, columns.flat_product if call.is_flat_product else torch.matmul)


def _product(call: Call, product: Callable[..., Any]) -> bool:
    """Lower a product and its bias; in one kernel when nothing is converted in between."""
    source = call.lowering.source
    if _is_in_fp8(call):
        return _product_in_fp8(call, is_turned=product is not columns.linear)
    if _columns(call, product):
        return True
    left, right = call.inputs(0)
    if len(call.pieces) == 1:
        call.give(0, 0, source.call(product, left, right))
        return True
    is_term = isinstance(call.pieces[0][1].signature.outputs[0], Partial)
    in_one = product in (columns.linear, columns.flat_product) and not call.converts_between and not is_term
    if in_one and not _read_elsewhere(call):
        bias = call.lowering.operand(call.pieces[1][0].inputs[1], call.pieces[1][1].inputs[1])
        call.give(1, 0, source.call(product, left, right, bias))
        return True
    call.give(0, 0, source.call(product, left, right))
    out, bias = call.inputs(1)
    call.give(1, 0, source.call(torch.add, out, bias))
    return True


def _is_in_fp8(call: Call) -> bool:
    return call.pieces[0][0].inputs[1] in call.lowering.fp8


def _product_in_fp8(call: Call, *, is_turned: bool) -> bool:
    """Lower a product in fp8, and the sum with its bias."""
    source, signature = call.lowering.source, call.pieces[0][1].signature
    left, right = call.inputs(0)
    made = source.call(
        fp8_shards.product, left, right, is_turned, any(isinstance(p, Split) for p in signature.inputs),
        isinstance(signature.outputs[0], Split), call.lowering.axis, call.lowering.name, is_kept=True,
    )  # fmt: skip
    call.give(0, 0, made)
    if len(call.pieces) > 1:
        out, bias = call.inputs(1)
        call.give(1, 0, source.call(torch.add, out, bias))
    return True


def _columns(call: Call, product: Callable[..., Any]) -> bool:
    """Lower a product of a whole value, which nothing else reads here, and a weight in columns, as `columns.product`.
    False where it is none."""
    op, layout = call.pieces[0]
    lowering = call.lowering
    (value, weight), hop = op.inputs, layout.inputs[0]
    held = lowering.layout.parameters
    if product not in (columns.linear, columns.flat_product) or value in held or weight not in held:
        return False
    if hop.value != (R, R) or hop.gradient != (Partial("sum"), R) or not layout.inputs[1].is_idle:
        return False
    if weight in lowering.summed or any(call.site.detached):
        return False
    bias = None
    if len(call.pieces) > 1:
        if call.converts_between or _read_elsewhere(call):
            return False
        bias = lowering.operand(call.pieces[1][0].inputs[1], call.pieces[1][1].inputs[1])
    made = lowering.source.call(
        columns.product, lowering.at[value], lowering.at[weight], bias, product is columns.flat_product, lowering.axis,
        lowering.name,
    )  # fmt: skip
    call.give(len(call.pieces) - 1, 0, made)
    return True


def _read_elsewhere(call: Call) -> bool:
    """Whether anything but the next piece reads the value between the two."""
    tensor = call.pieces[0][0].outputs[0]
    return tensor in call.lowering.layout.leaves or tensor in call.lowering.layout.shared


@rule("conv1d", "conv2d", "conv3d", whole=as_recorded)
def convolution(call: Call) -> bool:
    groups = call.argument("groups", 1)
    kernel = call.split_of(0, 1)
    if groups != 1 and kernel is not None:
        groups //= call.lowering.axis.size
    source = call.lowering.source
    stride, padding, dilation = (call.argument(n) for n in ("stride", "padding", "dilation"))
    left, right = call.inputs(0)
    call.give(0, 0, source.call(call.site.function, left, right, None, stride, padding, dilation, groups))
    if len(call.pieces) > 1:
        out, bias = call.inputs(1)
        spatial = len(call.pieces[0][0].labels[1]) - 2
        aligned = source.call(torch.Tensor.reshape, bias, [-1] + [1] * spatial)
        call.give(1, 0, source.call(torch.add, out, aligned))
    return True


rule("_grouped_mm")(as_recorded)


@rule("scaled_dot_product_attention")
def attention(call: Call) -> bool:
    signature = call.pieces[0][1].signature
    probability = call.argument("dropout_p", 0.0)
    op = call.pieces[0][0]
    split = call.split_of(0, 0)
    if not probability or split is None or any(isinstance(p, Partial) for p in signature.inputs):
        return as_recorded(call)
    slots = call.slots()
    mask = slots[3] if len(op.inputs) > 3 else None
    query, key = call.lowering.shape(op.inputs[0]), call.lowering.shape(op.inputs[1])
    call.lowering.seeded(call.site)
    made = call.lowering.source.call(
        random_ops.attention, slots[0], slots[1], slots[2], mask, probability, call.argument("is_causal", False),
        call.argument("scale"), call.argument("enable_gqa", False), split, [*query[:-1], key[-2]],
        call.lowering.axis, is_kept=True,
    )  # fmt: skip
    call.give(0, 0, made)
    return True


# -- statistics and look-ups ------------------------------------------------------------------------------------------


@rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(call: Call) -> bool:
    layout = call.pieces[0][1]
    if layout.signature.need != "combine":
        return as_recorded(call)
    source, lowering = call.lowering.source, call.lowering
    op = call.pieces[0][0]
    (given,) = call.inputs(0)
    wanted = lowering.dtype(op.outputs[0])
    if wanted != lowering.dtype(op.inputs[0]):
        given = source.call(torch.Tensor.to, given, wanted)
    dim = call.argument("dim") % len(op.labels[0])
    made = source.call(statistics.softmax, given, dim, "log" in call.site.name, lowering.axis, lowering.name)
    call.give(0, 0, made)
    return True


@rule("layer_norm", "rms_norm", "native_layer_norm", whole=as_recorded)
def normalization(call: Call) -> bool:
    if call.site.name == "native_layer_norm":
        return False
    layout = call.pieces[0][1]
    splits_statistic = layout.signature.need == "combine"
    if not splits_statistic and not call.converts_between and len(call.site.ops) == len(call.pieces):
        return as_recorded(call)
    source, lowering = call.lowering.source, call.lowering
    op = call.pieces[0][0]
    rank = len(op.labels[0])
    shape = call.argument("normalized_shape")
    dims = list(range(rank - len(shape), rank))
    centered = call.site.name == "layer_norm"
    eps = call.argument("eps")
    if eps is None:
        eps = torch.finfo(lowering.dtype(op.inputs[0])).eps
    (given,) = call.inputs(0)
    if splits_statistic:
        made = source.call(statistics.normalize, given, dims, eps, centered, lowering.axis, lowering.name)
    elif centered:
        made = source.call(F.layer_norm, given, shape, None, None, eps)
    else:
        made = source.call(F.rms_norm, given, shape, None, eps)
    call.give(0, 0, made)
    for which in range(1, len(call.pieces)):
        left, right = call.inputs(which)
        is_scale = call.pieces[which][0].name.endswith("/weight")
        call.give(which, 0, source.call(torch.mul if is_scale else torch.add, left, right))
    return True


@rule("batch_norm", whole=as_recorded)
def batch_norm(call: Call) -> bool:
    """Batch norm. Where the channels are split, each rank norms its own: the statistics are taken over all other
    dims."""
    layout = call.pieces[0][1]
    place = call.split_of(0, 0)
    if layout.signature.need or call.converts_between or len(call.site.ops) != len(call.pieces):
        return False
    if len(call.pieces) == 1 and call.pieces[0][0].kind == "elementwise":  # by the running statistics
        return as_recorded(call)
    if place is None or place.dim != 1:
        return False
    if call.argument("running_mean") is None or not call.argument("training"):
        return as_recorded(call)
    slots = call.slots()
    args, _ = call.arguments(slots)
    given, weight, bias, mean, variance, _training, momentum, eps, _cudnn = args
    made = call.lowering.source.call(
        statistics.batch_norm, given, weight, bias, mean, variance, momentum, eps, place, call.lowering.axis
    )
    call.give(len(call.pieces) - 1, 0, made)
    return True


@rule("embedding")
def embedding(call: Call) -> bool:
    layout = call.pieces[0][1]
    if layout.signature.need != "offset":
        if call.site.function is not F.embedding:
            return as_recorded(call)
        args, kwargs = call.arguments(call.slots())
        call.give_all(call.lowering.source.call(columns.embedding, *args, **kwargs))
        return True
    weight, index = call.inputs(0)
    padding = call.argument("padding_idx", -1)
    by_frequency = bool(call.argument("scale_grad_by_freq", False))
    made = call.lowering.source.call(lookups.embedding, weight, index, padding, by_frequency, call.lowering.axis)
    call.give(0, 0, made)
    return True


@rule("index_select", "gather")
def take(call: Call) -> bool:
    op, layout = call.pieces[0]
    if layout.signature.need != "offset":
        return as_recorded(call)
    given, index = call.inputs(0)
    dim = call.argument("dim") % len(op.labels[0])
    function = lookups.select if call.site.name == "index_select" else lookups.take_along
    call.give(0, 0, call.lowering.source.call(function, given, dim, index, call.lowering.axis))
    return True


@rule("nll_loss_forward", "nll_loss2d_forward", whole=as_recorded)
def negative_log_likelihood(call: Call) -> bool:
    """The negative log-likelihood: the log-probabilities of the targets, each from the rank that holds its class; then
    their mean or sum."""
    needs = [layout.signature.need for _, layout in call.pieces]
    if call.argument("weight") is not None or any(needs[1:]) or needs[0] not in ("offset", ""):
        return False
    lowering = call.lowering
    source = lowering.source
    ignored = call.argument("ignore_index", -100)
    given, target = call.inputs(0)
    axis = lowering.axis if needs[0] == "offset" else None
    call.give(0, 0, source.call(lookups.picked, given, target, ignored, axis))
    for which in range(1, len(call.pieces)):
        op = call.pieces[which][0]
        operands = call.inputs(which)
        if op.name.endswith("/mean"):
            made: Var = source.call(lookups.mean_of_targets, operands[0], operands[1], ignored)
        elif op.name.endswith("/sum"):
            made = source.call(torch.sum, operands[0])
        else:
            dtype = lowering.dtype(op.outputs[0])
            made = source.call(lookups.count_of_targets, operands[0], ignored, dtype)
        call.give(which, 0, made)
    return True
