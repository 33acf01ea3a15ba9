"""Reductions, softmax, normalisation, losses, sorting and pooling."""

from collections.abc import Sequence

from shardwright.backends.torch.capture.ops.template import OpCall, Ref, dims_of, rule, shapes
from shardwright.core.model.graph import LabelRole
from shardwright.core.rules import op_rules as labels
from shardwright.core.rules.op_rules import Labelled


def _reduce(call: OpCall, source: Ref, dims: Sequence[int], *, linear: bool, suffix: str = "") -> None:
    """Reduce ``source`` to the outputs. A reduction that is not linear (max, norm …) leaves no partial sums: its dims
    are whole."""
    keep = len(call.out.shape) == len(source.shape)
    labelled = labels.reduction(source.shape, dims, keep_dims=keep, outputs=len(call.outputs))
    if not linear:
        special: tuple[tuple[int, LabelRole], ...] = tuple((d % len(source.shape), "whole") for d in dims)
        labelled = Labelled(labelled.labels, special)
    call.add("reduction", [source], call.outputs, labelled, suffix)


@rule("reduction", "sum", "mean", "nansum")
def linear_reduction(call: OpCall) -> None:
    source = call.inputs[0]
    _reduce(call, source, dims_of(call.get("dim"), len(source.shape)), linear=True)


@rule("reduction", "amax", "amin", "max", "min", "aminmax", "argmax", "argmin", "all", "any", "prod", "var", "std",
      "var_mean", "std_mean", "logsumexp", "norm", "linalg_vector_norm", "count_nonzero", "median", "mode",
      "nanmean", "equal")  # fmt: skip
def other_reduction(call: OpCall) -> None:
    source = call.inputs[0]
    if len(call.inputs) == 2 and call.name in ("max", "min"):  # the elementwise overloads
        call.add("elementwise", call.inputs, call.outputs, labels.elementwise(shapes(call.inputs), [call.out.shape]))
        return
    _reduce(call, source, dims_of(call.get("dim"), len(source.shape)), linear=False)


@rule("reduction", "trace")
def trace(call: OpCall) -> None:
    """The trace of a matrix: the diagonal of a shard is not a shard of the diagonal."""
    call.add("reduction", call.inputs, [call.out], labels.opaque(shapes(call.inputs), [call.out.shape]))


@rule("softmax", "softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax")
def softmax(call: OpCall) -> None:
    source = call.inputs[0]
    dims = dims_of(call["dim"], len(source.shape))
    call.add("softmax", [source], [call.out], labels.over_dims(source.shape, dims, "statistic"))


def _normalize(call: OpCall, dims: Sequence[int], scale: Ref | None, bias: Ref | None, at: Sequence[int]) -> None:
    """A normalisation, (x - mean) / deviation over ``dims``, then · scale + bias, whose dims are the dims ``at`` of
    x."""
    source = call.inputs[0]
    rank = len(source.shape)
    where, all_dims = tuple(d % rank for d in at), tuple(range(rank))
    affine = [(name, value) for name, value in (("/weight", scale), ("/bias", bias)) if value is not None]
    value = call.between(call.out.shape, call.out.dtype) if affine else call.out
    call.add("normalization", [source], [value], labels.over_dims(source.shape, dims, "statistic"))
    for i, (suffix, operand) in enumerate(affine):
        result = call.out if i == len(affine) - 1 else call.between(call.out.shape, call.out.dtype)
        call.add("elementwise", [value, operand], [result], Labelled((all_dims, where, all_dims)), suffix)
        value = result


def _statistics(call: OpCall, dims: Sequence[int]) -> None:
    """The mean and deviation that native kernels hand back for the backward pass."""
    source = call.inputs[0]
    for i, out in enumerate(call.outputs[1:]):
        if 0 in out.shape:
            call.add("create", (), [out], Labelled(((-1,) * len(out.shape),)), f"/statistic{i}")
            continue
        keep = len(out.shape) == len(source.shape)
        labelled = labels.reduction(source.shape, dims, keep_dims=keep)
        if len(labelled.labels[1]) != len(out.shape):
            labelled = labels.opaque([source.shape], [out.shape])
        call.add("reduction", [source], [out], labelled, f"/statistic{i}")


@rule("normalization", "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(call: OpCall) -> None:
    count = len(call["normalized_shape"])
    dims = range(-count, 0)
    _normalize(call, dims, call.get("weight"), call.get("bias"), dims)
    _statistics(call, dims)


@rule("normalization", "group_norm", "native_group_norm")
def group_norm(call: OpCall) -> None:
    """Group norm. Its statistics are over the channels of a group and all positions: the channel dim is a statistic
    one."""
    source = call.inputs[0]
    _normalize(call, range(1, len(source.shape)), call.get("weight"), call.get("bias"), (1,))
    for i, out in enumerate(call.outputs[1:]):
        labelled = labels.opaque([source.shape], [out.shape])
        call.add("reduction", [source], [out], labelled, f"/statistic{i}")


@rule("normalization", "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
      "_batch_norm_with_update", "_native_batch_norm_legit_no_training")  # fmt: skip
def batch_norm(call: OpCall) -> None:
    """Batch norm. With running statistics it is elementwise; with those of the batch, batch and positions are statistic
    dims."""
    source = call.inputs[0]
    rank = len(source.shape)
    mean, variance = call.get("running_mean"), call.get("running_var")
    training = call.get("training", call.get("train", mean is None)) or mean is None
    if training:
        _normalize(call, [d for d in range(rank) if d != 1], call.get("weight"), call.get("bias"), (1,))
    else:
        held = [r for r in (mean, variance, call.get("weight"), call.get("bias")) if r is not None]
        all_dims = tuple(range(rank))
        call.add("elementwise", [source, *held], [call.out], Labelled((all_dims, *([(1,)] * len(held)), all_dims)))
    _statistics(call, [d for d in range(rank) if d != 1])


@rule("gather", "nll_loss_forward", "nll_loss2d_forward")
def negative_log_likelihood(call: OpCall) -> None:
    """The negative log-likelihood: the log-probability of each target is looked up, then averaged."""
    source, target = call["self"], call["target"]
    class_dim = 1 if len(source.shape) > 1 else 0
    rows = tuple(range(len(source.shape)))
    places = tuple(d for d in rows if d != class_dim)
    looked_up = Labelled((rows, places, places), ((class_dim, "index"),))
    whole = call["reduction"] == 0
    picked = call.out if whole else call.between(target.shape, source.dtype)
    call.add("gather", [source, target], [picked], looked_up)
    if not whole:
        flat = tuple(range(len(target.shape)))
        suffix = "/mean" if call["reduction"] == 1 else "/sum"
        call.add("reduction", [picked, target], [call.out], Labelled((flat, flat, ())), suffix)
    for out in call.outputs[1:]:
        flat = tuple(range(len(target.shape)))
        call.add("reduction", [target], [out], Labelled((flat, ())), "/total_weight")


@rule("elementwise", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
      "binary_cross_entropy_with_logits", "soft_margin_loss", "kl_div", "poisson_nll_loss")  # fmt: skip
def pointwise_loss(call: OpCall) -> None:
    """A loss per entry, then its mean or sum unless ``reduction`` is none (0)."""
    operands = list(call.inputs)
    if call.get("reduction", 1) == 0:
        call.add("elementwise", operands, [call.out], labels.elementwise(shapes(operands), [call.out.shape]))
        return
    rank = max(len(r.shape) for r in operands)
    full = tuple(max((r.shape[i - rank] for r in operands if len(r.shape) >= rank - i), default=1) for i in range(rank))
    each = call.between(full, call.out.dtype)
    call.add("elementwise", operands, [each], labels.elementwise(shapes(operands), [full]))
    suffix = "/mean" if call.get("reduction", 1) == 1 else "/sum"
    _reduce(call, each, range(rank), linear=True, suffix=suffix)


@rule("sort", "sort", "argsort", "topk", "kthvalue", "msort")
def sort(call: OpCall) -> None:
    source = call.inputs[0]
    dim = call.get("dim", -1) % len(source.shape) if source.shape else 0
    pieces = [labels.same_sizes(source.shape, o.shape, changed=(dim,)).labels[1]
              if len(o.shape) == len(source.shape) else (-1,) * len(o.shape) for o in call.outputs]  # fmt: skip
    kept = tuple(-1 if d == dim else d for d in range(len(source.shape)))
    call.add("sort", [source], call.outputs, Labelled((kept, *pieces)))


@rule("reduction", "max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
      "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
      "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
      "adaptive_max_pool3d", "max_pool1d_with_indices")  # fmt: skip
def pool(call: OpCall) -> None:
    """Pooling by windows over positions. Where windows adjoin, positions may be split; batch and channels always
    may."""
    source = call.inputs[0]
    rank = len(source.shape)
    spatial = next((int(c) for c in call.name if c in "123"), 2)

    def sizes(name: str, default: int) -> tuple[int, ...]:
        given = call.get(name)
        given = given if isinstance(given, (list, tuple)) else [default if given is None else given]
        return tuple(given) * (spatial if len(given) == 1 else 1)

    window = sizes("kernel_size", 0)
    adjoining = (
        "adaptive" not in call.name
        and (sizes("stride", 0) == window or not call.get("stride"))
        and not any(sizes("padding", 0))
        and all(n == 1 for n in sizes("dilation", 1))
        and "indices" not in call.name
    )
    window = window if len(window) == spatial else (0,) * spatial
    labelled = labels.windows(source.shape, call.out.shape, window, adjoining=adjoining and rank >= spatial)
    kept, result = labelled.labels
    call.add("reduction", [source], call.outputs, Labelled((kept, *([result] * len(call.outputs)))))
