"""The effect of both frameworks' elementwise ops and reductions on partial values, by the op's own name.

An entrywise op is linear in an operand (it passes sums and means on), or monotone in it (it passes maxima and minima
on, swapped where it decreases), or neither. Names are those of aten and JAX without overload, namespace or in-place
underscore.
"""

from typing import Literal

from shardwright.core.layout.placements import Reduction

Direction = Literal["up", "down", ""]


RESCALING = frozenset(
    [
        "cast",
        "convert_element_type",
        "clone",
        "copy",
        "to",
        "_to_copy",
        "contiguous",
        "reduce_precision",
        "_autocast_to_reduced_precision",
        "_autocast_to_full_precision",
        "deg2rad",
        "rad2deg",
    ]
)
"""Entrywise ops of one operand that keep it, or scale it up or down: both linear and never decreasing."""

LINEAR_UNARY = RESCALING | frozenset(
    [
        "neg",
        "negative",
        "real",
        "imag",
        "conj",
        "conj_physical",
        "mul",
        "multiply",
    ]
)
"""Entrywise ops of one operand that pass sums on. A product with one operand is a product with a constant."""

AFFINE_UNARY = frozenset(["add", "sub", "subtract", "rsub"])
"""Ops that add a constant when they have one operand: means pass, sums do not."""

UP = RESCALING | frozenset(
    [
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "log2",
        "log10",
        "sqrt",
        "cbrt",
        "relu",
        "relu6",
        "leaky_relu",
        "elu",
        "selu",
        "celu",
        "tanh",
        "sigmoid",
        "logistic",
        "log_sigmoid",
        "softplus",
        "softsign",
        "softshrink",
        "hardshrink",
        "tanhshrink",
        "hardtanh",
        "hardsigmoid",
        "clamp",
        "clamp_min",
        "clamp_max",
        "clip",
        "erf",
        "erfinv",
        "erf_inv",
        "logit",
        "sinh",
        "asinh",
        "asin",
        "atan",
        "atanh",
        "acosh",
        "floor",
        "ceil",
        "round",
        "trunc",
        "sign",
        "sgn",
        "nan_to_num",
    ]
)
"""Entrywise ops of one operand that never decrease."""

DOWN = frozenset(["neg", "negative", "erfc", "acos", "rsqrt", "logical_not"])

BOTH: dict[str, tuple[Direction, Direction]] = {
    **dict.fromkeys(("add", "add_any", "maximum", "minimum", "max", "min", "fmax", "fmin"), ("up", "up")),
    **dict.fromkeys(("logaddexp", "logaddexp2", "logical_and", "logical_or"), ("up", "up")),
    **dict.fromkeys(("sub", "subtract"), ("up", "down")),
    "rsub": ("down", "up"),
    **dict.fromkeys(("gt", "ge", "greater", "greater_equal"), ("up", "down")),
    **dict.fromkeys(("lt", "le", "less", "less_equal"), ("down", "up")),
}
"""Entrywise ops of two operands, with the direction in which each moves the result while the other is replicated."""

ADDITIVE = frozenset(["add", "add_any", "sub", "subtract", "rsub"])
"""Ops that make a partial sum (or mean) of two partial sums (or means)."""

BILINEAR = frozenset(["mul", "multiply"])
"""Ops that are linear in either operand while the other is replicated."""

QUOTIENT = frozenset(["div", "divide", "true_divide"])
"""Ops that are linear in the first operand."""

LATTICE: dict[str, Reduction] = {
    "maximum": "max", "max": "max", "fmax": "max", "logical_or": "max",
    "minimum": "min", "min": "min", "fmin": "min", "logical_and": "min",
}  # fmt: skip
"""Ops whose result is partial by this reduction when both operands are."""

CHOICE = {"where": (1, 2), "select_n": (1, 2)}
"""Ops in which one operand chooses between the others: any reduction passes when all that are chosen from hold it."""

FILLED = frozenset(["masked_fill", "where", "select_n"])
"""Ops whose chosen constant is not an operand: idempotent reductions pass."""

TRIANGLES = frozenset(["tril", "triu"])
"""Ops that give zero or the entry itself: any reduction passes, because zeros reduce to zero."""

CUMULATIVE_LINEAR = frozenset({"cumsum"})
CUMULATIVE: dict[str, Reduction] = {"cummax": "max", "cummin": "min"}

REDUCED: dict[str, Reduction] = {
    "sum": "sum", "reduce_sum": "sum", "nansum": "sum", "count_nonzero": "sum", "mean": "mean",
    "amax": "max", "max": "max", "reduce_max": "max", "any": "max", "reduce_or": "max",
    "amin": "min", "min": "min", "reduce_min": "min", "all": "min", "reduce_and": "min",
}  # fmt: skip
"""The reduction that a reducing op leaves along a dim that is split."""

REDUCED_BY_SUFFIX: dict[str, Reduction] = {"/mean": "mean", "/sum": "sum", "/total_weight": "sum"}
"""The reduction of the ops that are parts of a loss, by their suffix."""

PASSES_SUMS = frozenset(
    [
        "sum",
        "reduce_sum",
        "mean",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d",
        "reduce_window_sum",
        "trace",
    ]
)
PASSES_MAX = frozenset(
    ["amax", "max", "reduce_max", "max_pool1d", "max_pool2d", "max_pool3d", "reduce_window_max", "any", "reduce_or"]
)
PASSES_MIN = frozenset(["amin", "min", "reduce_min", "reduce_window_min", "all", "reduce_and"])

INTERPOLATING = frozenset(
    [
        "upsample_linear1d",
        "upsample_bilinear2d",
        "upsample_trilinear3d",
        "upsample_bicubic2d",
        "grid_sampler",
        "grid_sampler_2d",
        "im2col",
        "col2im",
    ]
)
"""Copies whose entries are weighted sums: they are linear, but do not only move entries."""

PADDING = frozenset(["pad", "constant_pad_nd"])
"""Copies that bring in a constant: idempotent reductions pass, sums do not (the constant would be added up)."""

ADDING_SCATTERS = frozenset(["scatter_add", "scatter-add", "index_add"])
SETTING_SCATTERS = frozenset(["scatter", "slice_scatter", "select_scatter", "index_copy", "dynamic_update_slice"])
