"""The kinds of op and labels (see `core.model.graph.Op`) of JAX primitives."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any

from shardwright.backends.jax.capture.inner_programs import aval, equations_in
from shardwright.backends.jax.capture.steps import Program, Step
from shardwright.core.model.graph import LabelRole, OpKind
from shardwright.core.rules import op_rules as labels
from shardwright.core.rules.op_rules import Labelled

Shape = tuple[int, ...]
Translation = tuple[OpKind, Labelled]

_ELEMENTWISE = """
    add add_any sub mul div rem max min pow integer_pow exp exp2 log log1p expm1 tanh logistic sin cos tan asin
    acos atan sinh cosh asinh acosh atanh atan2 sqrt rsqrt cbrt square abs neg sign floor ceil round is_finite eq
    ne lt le gt ge eq_to lt_to le_to and or xor not select_n clamp shift_left shift_right_logical
    shift_right_arithmetic nextafter erf erfc erf_inv lgamma digamma igamma igammac bessel_i0e bessel_i1e
    population_count clz real imag complex conj convert_element_type reduce_precision bitcast_convert_type
    random_fold_in random_wrap random_unwrap gelu
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
PARTIAL_REDUCTIONS = frozenset({"reduce_sum"})
STATISTIC_REDUCTIONS = frozenset(
    {"reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"}
)
CUMULATIVE = frozenset({"cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod"})
RANDOM = frozenset({"random_bits", "random_seed", "random_clone", "random_split", "threefry2x32", "random_gamma"})


def translate(step: Step, program: Program) -> tuple[OpKind, tuple[int, ...], Labelled]:
    """The kind of op that a step is, the values it reads, and their labels. Unknown primitives are opaque."""
    inputs = tuple(value for value in step.inputs if value is not None)
    before = [program.shapes[value] for value in inputs]
    after = [program.shapes[value] for value in step.outputs]
    kind, labelled = _translate(step, before, after)
    return kind, inputs, labelled


def _translate(step: Step, before: list[Shape], after: list[Shape]) -> Translation:
    name, params = step.name, step.params
    if name in RULES and None not in step.inputs:
        return RULES[name](params, before, after)
    if name.startswith("random.") or name in RANDOM or not before:
        return "create", Labelled((*labels.opaque(before, []).labels, *labels.elementwise([], after).labels))
    if name in ELEMENTWISE and _broadcasts(before, after):
        return "elementwise", labels.elementwise(before, after)
    if name in LITERAL_RULES:
        return LITERAL_RULES[name](params, before, after)
    return "opaque", labels.opaque(before, after)


def _broadcasts(before: Sequence[Shape], after: Sequence[Shape]) -> bool:
    rank = len(after[0])
    return all(len(shape) in (0, rank) for shape in before) and len({len(shape) for shape in after}) == 1


# --- products


def _dot_general(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
    fresh = count()
    left = [-1] * len(before[0])
    right = [-1] * len(before[1])
    out: list[int] = []
    for i, j in zip(left_batch, right_batch, strict=True):
        left[i] = right[j] = next(fresh)
        out.append(left[i])
    for i, j in zip(left_sum, right_sum, strict=True):
        left[i] = right[j] = next(fresh)
    for side in (left, right):
        for dim, label in enumerate(side):
            if label < 0:
                side[dim] = next(fresh)
                out.append(side[dim])
    return "contraction", Labelled((tuple(left), tuple(right), tuple(out)))


def _convolution(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    """The labels of a convolution. FLOPs are 2 · (product of all label sizes), so the kernel's spatial dims are labels
    of the weight alone and the output's of the output alone. Neither can be split here (that would need halos)."""
    dims = params["dimension_numbers"]
    (batch, feature, *_), (out_feature, in_feature, *kernel), (out_batch, out_channel, *space) = (
        dims.lhs_spec,
        dims.rhs_spec,
        dims.out_spec,
    )
    grouped = params["feature_group_count"] > 1 or params["batch_group_count"] > 1
    fresh = count()
    source, weight, out = [-1] * len(before[0]), [-1] * len(before[1]), [-1] * len(after[0])
    whole: list[int] = []
    out[out_batch] = next(fresh)
    out[out_channel] = weight[out_feature] = next(fresh)
    weight[in_feature] = next(fresh)
    if params["batch_group_count"] == 1:
        source[batch] = out[out_batch]
    if grouped:
        whole += [out[out_channel], weight[in_feature]]
    else:
        source[feature] = weight[in_feature]
    for dim in kernel:
        weight[dim] = next(fresh)
        whole.append(weight[dim])
    for dim in space:
        out[dim] = next(fresh)
        whole.append(out[dim])
    special: list[tuple[int, LabelRole]] = [(label, "whole") for label in whole]
    return "contraction", Labelled((tuple(source), tuple(weight), tuple(out)), tuple(special))


def _attention(params: dict[str, Any], before: list[Shape], after: list[Shape], *, causal: bool = False) -> Translation:
    """The labels of attention. Operands are [batch …, query or key position, head, width], biases and masks [batch …,
    head, query, key]. Fewer key than query heads (grouped queries) share the heads' label: contiguous shards of both
    belong together."""
    query, key, value = before[:3]
    if len(query) < 3 or len(key) != len(query) or len(value) != len(query) or len(after) != 1:
        return "opaque", labels.opaque(before, after)
    lead = len(query) - 3
    batch = tuple(range(lead))
    s, h, t, d, e = range(lead, lead + 5)
    key_head = h if key[-2] > 1 or query[-2] == 1 else -1
    value_head = h if value[-2] > 1 or query[-2] == 1 else -1
    order = (*batch, h, s, t)
    sizes = (*query[:lead], query[-2], query[-3], key[-3])
    extras = tuple(
        tuple(
            label if size == full and size != 1 else -1
            for label, size, full in zip(order[len(order) - len(m) :], m, sizes[len(sizes) - len(m) :], strict=True)
        )
        if 0 < len(m) <= len(order)
        else (-1,) * len(m)
        for m in before[3:]
    )
    # The kernels want values as wide as queries, so a piece of the values' width cannot be given to one.
    special: list[tuple[int, LabelRole]] = [(t, "whole"), (d, "whole"), (e, "whole")]
    if causal:  # a piece of the queries does not know where it starts
        special.append((s, "whole"))
    return "attention", Labelled(
        (
            (*batch, s, h, d),
            (*batch, t, key_head, d),
            (*batch, t, value_head, e),
            *extras,
            (*batch, s, h, e),
        ),
        tuple(special),
    )


# --- statistics and reductions


def _reduction(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    return "reduction", labels.reduction(before[0], tuple(map(int, params["axes"])), outputs=len(after))


def _statistic(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    """A reduction to maxima, products or positions. It has no partial sums, so a split reduced dim needs a reduction
    inside the op."""
    axes = tuple(map(int, params["axes"]))
    plain = labels.reduction(before[0], axes, outputs=len(after))
    return "reduction", Labelled(plain.labels, tuple((axis % len(before[0]), "statistic") for axis in axes))


def _softmax(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    inner = params["jaxpr"].jaxpr
    axes = next((e.params["axes"] for e in equations_in(inner) if e.primitive.name == "reduce_max"), None)
    if axes is None:
        return "opaque", labels.opaque(before, after)
    return "softmax", labels.over_dims(
        before[0], tuple(map(int, axes)), "statistic", extra_inputs=before[1:], outputs=len(after)
    )


def _normalization(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    last = len(before[0]) - 1
    return "normalization", labels.over_dims(before[0], (last,), "statistic", extra_inputs=before[1:])


def _cumulative(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    return "elementwise", labels.over_dims(before[0], (params["axis"],), "whole", outputs=len(after))


def _sort(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    dim = params["dimension"]
    one = tuple(range(len(before[0])))
    return "sort", Labelled((one,) * (len(before) + len(after)), ((dim, "whole"),))


def _top_k(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    dim = params.get("axis", len(before[0]) - 1) % len(before[0])
    source = tuple(range(len(before[0])))
    result = tuple(-1 if d == dim else d for d in source)
    return "sort", Labelled((source, *([result] * len(after))), ((dim, "whole"),))


# --- look-ups


def _gather(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    return "gather", _gather_labels(numbers, sizes, before[0], before[1], after[0])


def _gather_labels(numbers: Any, sizes: Sequence[int], table: Shape, index: Shape, out: Shape) -> Labelled:
    """The labels of a lax gather whose index's last dim holds the coordinates."""
    fresh = count()
    looked_up = set(numbers.start_index_map)
    batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    rows = [-1] * len(table)
    special: list[tuple[int, LabelRole]] = []
    for dim, size in enumerate(table):
        if dim in looked_up:
            if dim not in numbers.collapsed_slice_dims:
                continue  # a window that moves over this dim
            rows[dim] = next(fresh)
            special.append((rows[dim], "index" if len(looked_up) == 1 else "whole"))
        elif sizes[dim] == size or dim in batching.values():
            rows[dim] = next(fresh)
    places = [rows[batching[k]] if k in batching else next(fresh) for k in range(len(index) - 1)]
    windows = [d for d in range(len(table)) if d not in numbers.collapsed_slice_dims and d not in batching.values()]
    window_labels, place_labels = iter(windows), iter(places)
    result = tuple(
        rows[next(window_labels)] if d in numbers.offset_dims else next(place_labels) for d in range(len(out))
    )
    return Labelled((tuple(rows), (*places, -1), result), tuple(special))


def _whole_gather(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    """The labels of `jnp.take` and `jnp.take_along_axis`: a gather by the second operand with a last dim added."""
    gathers = [e for e in equations_in(params["jaxpr"].jaxpr) if e.primitive.name == "gather"]
    if len(gathers) != 1 or len(before) != 2:
        return "opaque", labels.opaque(before, after)
    inner = gathers[0]
    table, index = (tuple(aval(v).shape) for v in inner.invars)
    if table != before[0] or index != (*before[1], 1) or tuple(aval(inner.outvars[0]).shape) != after[0]:
        return "opaque", labels.opaque(before, after)
    found = _gather_labels(inner.params["dimension_numbers"], inner.params["slice_sizes"], table, index, after[0])
    return "gather", Labelled((found.labels[0], found.labels[1][:-1], found.labels[2]), found.special)


def _scatter(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    """The labels of a scatter: target, index, update → target. Window dims of the update that cover a whole dim of the
    target go with it. Dims written to by position are whole."""
    numbers = params["dimension_numbers"]
    if len(before) != 3 or numbers.operand_batching_dims:
        return "scatter", labels.opaque(before, after)
    target, index, update = before
    inserted = set(numbers.inserted_window_dims)
    placed = set(numbers.scatter_dims_to_operand_dims)
    windows = [d for d in range(len(target)) if d not in inserted]
    kept = [-1] * len(target)
    written = [-1] * len(update)
    for dim, own in zip(windows, numbers.update_window_dims, strict=True):
        if target[dim] == update[own] and dim not in placed:
            kept[dim] = written[own] = dim
    return "scatter", Labelled((tuple(kept), (-1,) * len(index), tuple(written), tuple(kept)))


# --- moving and viewing


def _reshape(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    return "view", labels.reshape(before[0], after[0])


def _transpose(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    return "view", labels.transpose(tuple(map(int, params["permutation"])))


def _broadcast(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    dims = tuple(map(int, params["broadcast_dimensions"]))
    return "view", labels.broadcast(before[0], after[0], dims)


def _entry_by_entry(kind: OpKind) -> "Rule":
    return lambda params, before, after: (kind, labels.elementwise(before, after))


def _kept_dims(before: list[Shape], out: Shape, *, changed: Sequence[int] = ()) -> Labelled:
    """The labels of the first operand's dims that keep their size, apart from the ``changed`` ones. Nothing is known of
    the others."""
    kept, made = labels.same_sizes(before[0], out, changed=changed).labels
    return Labelled((kept, *labels.opaque(before[1:], []).labels, made))


def _pad(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    """The labels of a pad. A dim that is padded at one end and cut at the other keeps its size, and moves."""
    changed = [dim for dim, ends in enumerate(params["padding_config"]) if any(ends)]
    return "copy", _kept_dims(before, after[0], changed=changed)


def _reverse(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    return "copy", labels.same_sizes(before[0], after[0], changed=params["dimensions"])


def _slice(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    """The labels of a slice. A contiguous part of one dim is a part of the whole. A part with a stride has the labels
    of `core.rules.op_rules.strided`. Dims that are cut in other ways stand alone."""
    cut = [dim for dim, size in enumerate(before[0]) if size != after[0][dim]]
    strides = params["strides"] or (1,) * len(before[0])
    if len(cut) == 1 and strides[cut[0]] != 1:
        start = int(params["start_indices"][cut[0]])
        return "slice", labels.strided(before[0], cut[0], start, strides[cut[0]], after[0])
    part = cut[0] if len(cut) == 1 and strides[cut[0]] == 1 else None
    kept = tuple(-1 if dim in cut and dim != part else dim for dim in range(len(before[0])))
    start = int(params["start_indices"][part]) if part is not None else 0
    return "slice", Labelled((kept, kept), (), (start,))


def _dynamic_slice(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    found = _kept_dims(before, after[0])
    return "slice", Labelled(found.labels, (), (0,))


def _dynamic_update(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    update = before[1]
    kept = tuple(dim if size == update[dim] else -1 for dim, size in enumerate(before[0]))
    return "copy", Labelled((kept, kept, *labels.opaque(before[2:], []).labels, kept))


def _split(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    offsets = [0, *accumulate(map(int, params["sizes"]))]
    return "slice", labels.parts(before[0], params["axis"], after, offsets[:-1])


def _concatenate(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    return "concat", labels.concatenation(before, params["dimension"])


def _reduce_window(params: dict[str, Any], before: list[Shape], after: list[Shape]) -> Translation:
    window, strides = params["window_dimensions"], params["window_strides"]
    plain = all(pair == (0, 0) for pair in params["padding"]) and all(
        n == 1 for n in (*params["base_dilation"], *params["window_dilation"])
    )
    kept = tuple(
        dim
        if (window[dim] == 1 and size == after[0][dim])
        or (plain and window[dim] == strides[dim] and size == after[0][dim] * window[dim])
        else -1
        for dim, size in enumerate(before[0])
    )
    return "reduction", Labelled((kept, *labels.opaque(before[1:], []).labels, kept))


Rule = Callable[[dict[str, Any], list[Shape], list[Shape]], Translation]

RULES: dict[str, Rule] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "attention": _attention,
    "attention_causal": partial(_attention, causal=True),
    **dict.fromkeys(PARTIAL_REDUCTIONS, _reduction),
    **dict.fromkeys(STATISTIC_REDUCTIONS, _statistic),
    **dict.fromkeys(CUMULATIVE, _cumulative),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _reduce_window),
    "softmax": _softmax,
    "log_softmax": _softmax,
    "call:normalization": _normalization,
    "call:dropout": _entry_by_entry("dropout"),
    "sort": _sort,
    "top_k": _top_k,
    "gather": _gather,
    "_take": _whole_gather,
    "take_along_axis": _whole_gather,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(
        ("stop_gradient", "optimization_barrier", "device_put", "sharding_constraint"), _entry_by_entry("view")
    ),
    **dict.fromkeys(("copy", "copy_p"), _entry_by_entry("copy")),
    "rev": _reverse,
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
}

LITERAL_RULES: dict[str, Rule] = {
    "pad": _pad,  # the padding value is a literal
    "dynamic_slice": _dynamic_slice,  # and so may be the places
    "dynamic_update_slice": _dynamic_update,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter-mul"), _scatter),
}
"""The rules for steps some of whose operands may be literals. The first operand is never one."""
