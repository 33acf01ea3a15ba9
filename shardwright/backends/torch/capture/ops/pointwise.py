"""Elementwise ops, dropout, casts, and values made of nothing."""

from shardwright.backends.torch.capture.ops.template import OpCall, rule, shapes
from shardwright.core.model.graph import OpKind
from shardwright.core.rules import op_rules as labels
from shardwright.core.rules.op_rules import Labelled


@rule(
    "elementwise",
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "float_power", "neg",
    "abs", "sign", "sgn", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal",
    "square", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh",
    "erf", "erfc", "erfinv", "sigmoid", "logit", "log_sigmoid", "softplus", "relu", "relu6", "leaky_relu", "prelu",
    "elu", "selu", "celu", "gelu", "silu", "mish", "hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink",
    "threshold", "softsign", "tanhshrink", "clamp", "clamp_min", "clamp_max", "clip", "minimum", "maximum", "fmin",
    "fmax", "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_and",
    "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "__and__",
    "__or__", "__xor__", "__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift", "floor", "ceil",
    "round", "trunc", "frac", "lerp", "addcmul", "addcdiv", "xlogy", "special_xlogy", "logaddexp", "logaddexp2",
    "copysign", "nan_to_num", "sinc", "polar", "complex", "conj_physical", "hypot", "lgamma", "digamma", "greater",
    "less", "greater_equal", "less_equal", "not_equal", "multiply", "divide", "subtract", "negative", "absolute",
    "heaviside", "signbit", "deg2rad", "rad2deg", "i0", "gcd", "lcm", "bucketize",
)  # fmt: skip
def elementwise(call: OpCall) -> None:
    inputs = call.inputs[:1] if call.name == "bucketize" else call.inputs
    call.add("elementwise", inputs, call.outputs, labels.elementwise(shapes(inputs), shapes(call.outputs)))


@rule("elementwise", "to", "_to_copy", "_autocast_to_reduced_precision", "_autocast_to_full_precision")
def cast(call: OpCall) -> None:
    source = call.inputs[0]
    kind: OpKind = "copy" if source.dtype == call.out.dtype else "elementwise"
    call.add(kind, [source], [call.out], labels.elementwise([source.shape], [call.out.shape]))


@rule("elementwise", "tril", "triu")
def triangle(call: OpCall) -> None:
    source = call.inputs[0]
    call.add("elementwise", [source], [call.out], labels.over_dims(source.shape, (-2, -1), "whole"))


@rule("elementwise", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "diff_cumulative")
def cumulative(call: OpCall) -> None:
    source = call.inputs[0]
    if not source.shape:
        call.add("elementwise", [source], call.outputs, labels.elementwise([()], shapes(call.outputs)))
        return
    labelled = labels.over_dims(source.shape, (call["dim"],), "whole", outputs=len(call.outputs))
    call.add("elementwise", [source], call.outputs, labelled)


@rule("elementwise", "glu")
def gated_linear_unit(call: OpCall) -> None:
    """A gated linear unit: halves of one dim multiply each other, so that dim is never split."""
    source = call.inputs[0]
    dim = call["dim"] % len(source.shape)
    call.add("elementwise", [source], [call.out], labels.same_sizes(source.shape, call.out.shape, changed=(dim,)))


@rule("dropout", "dropout", "native_dropout", "alpha_dropout")
def dropout(call: OpCall) -> None:
    """Dropout. It is a view of its input where nothing is dropped."""
    source = call.inputs[0]
    drops = call.get("p", 0.5) > 0 and call.get("train", True) is not False
    labelled = labels.elementwise([source.shape], shapes(call.outputs))
    call.add("dropout" if drops or len(call.outputs) > 1 else "view", [source], call.outputs, labelled)


@rule("copy", "clone", "contiguous", "copy_", "_reshape_copy", "_conj_copy")
def copy(call: OpCall) -> None:
    """A copy. ``copy_`` writes its second operand over the first, whose old value does not matter."""
    source = call["src"] if call.name == "copy_" else call.inputs[0]
    kind: OpKind = "view" if call.shares_memory else ("elementwise" if source.dtype != call.out.dtype else "copy")
    call.add(kind, [source], [call.out], labels.elementwise([source.shape], [call.out.shape]))


@rule(
    "create",
    "zeros", "ones", "full", "empty", "empty_strided", "empty_permuted", "zeros_like", "ones_like", "full_like",
    "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "scalar_tensor", "zero_",
    "fill_", "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
    "uniform_", "normal", "normal_", "exponential_", "random_", "cauchy_", "geometric_", "log_normal_",
    "_efficientzerotensor",
)  # fmt: skip
def uniform(call: OpCall) -> None:
    """Equal values, or independent draws, everywhere: any shard can be made alone."""
    inputs = call.inputs if call.name == "bernoulli" else ()
    call.add("create", inputs, call.outputs, labels.elementwise(shapes(inputs), shapes(call.outputs)))


@rule("create", "arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "randperm", "range",
      "hann_window", "hamming_window")  # fmt: skip
def positional(call: OpCall) -> None:
    """Values that depend on the position. They are made whole."""
    call.add("create", (), call.outputs, Labelled(tuple((-1,) * len(out.shape) for out in call.outputs)))
