"""How an op of a program carries the dims of its operands to those of its results, and how its parameters change with
their sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.backends.jax.program.equations import Equation, FlatProgram, aval_of
from shardwright.backends.jax.slices.axes import MixingError
from shardwright.backends.jax.slices.hidden import source_dims

ELEMENTWISE = frozenset(
    {"abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil"}
    | {"clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv"}
    | {"erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p"}
    | {"logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "or", "population_count", "pow"}
    | {"reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic"}
    | {"shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"}
    | {"sharding_constraint", "optimization_barrier"}
)
REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
)
ALONG = {"cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis",
         "sort": "dimension", "rev": "dimensions", "split": "axis", "concatenate": "dimension"}  # fmt: skip
"""The ops that keep all dims, and the parameter that says along which ones they work."""
Dims = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class OpDims:
    """What an op does with the dims of its operands.

    Attributes:
        carried: for each operand, its dims → those of every result.
        used: for each operand, the dims along which the op works, and why no slice can do that by itself.
    """

    carried: tuple[Dims, ...]
    used: tuple[Mapping[int, str], ...]


def op_dims(flat: FlatProgram, equation: Equation) -> OpDims:
    """The dims of an op whose operands have a sequence. Raises MixingError for an op that is not known."""
    name, params = equation.primitive.name, equation.params
    shapes = [tuple(aval_of(flat, atom).shape) for atom in equation.inputs]
    made = tuple(flat.avals[equation.outputs[0]].shape)
    if name == "optimization_barrier" and len(shapes) > 1:
        raise MixingError("holds values back until others are there")
    if name in ELEMENTWISE:
        return _plain([{d: d for d in range(len(s)) if s[d] == made[d]} if len(s) == len(made) else {} for s in shapes])
    if name in ("broadcast_in_dim", "transpose", "squeeze", "reshape"):
        dims = source_dims(flat, equation)
        carried = {dim: out for out, dim in dims.items()}
        lost = {d: "regroups the dims of the sequence" for d in range(len(shapes[0])) if d not in carried}
        return OpDims((carried, *({} for _ in shapes[1:])), (lost, *({} for _ in shapes[1:])))
    if name in REDUCTIONS:
        gone = {int(d) for d in params["axes"]}
        kept = [d for d in range(len(shapes[0])) if d not in gone]
        why = "adds up over the sequence" if name == "reduce_sum" else f"takes a {name} over the sequence"
        return OpDims(({d: out for out, d in enumerate(kept)},), (dict.fromkeys(gone, why),))
    if name in ALONG:
        along = params[ALONG[name]]
        gone = {int(d) for d in (along if isinstance(along, tuple) else (along,))}
        said = "adds to the sequence" if name == "concatenate" else f"works along the sequence ({name})"
        return OpDims(
            tuple({d: d for d in range(len(s)) if d not in gone} for s in shapes),
            tuple(dict.fromkeys(gone, said) for _ in shapes),
        )
    if name == "top_k":
        last = len(shapes[0]) - 1
        return OpDims(({d: d for d in range(last)},), ({last: "works along the sequence (top_k)"},))
    if name == "dot_general":
        return _product(params["dimension_numbers"], shapes)
    if name == "slice":
        strides = params["strides"] or (1,) * len(made)
        whole = {d for d in range(len(made)) if made[d] == shapes[0][d] and strides[d] == 1}
        return _parts(shapes, whole)
    if name in ("dynamic_slice", "pad"):
        whole = {d for d in range(len(made)) if made[d] == shapes[0][d]}
        if name == "pad":
            whole = {d for d in whole if tuple(params["padding_config"][d]) == (0, 0, 0)}
        return _parts(shapes, whole)
    if name == "gather":
        return _gather(params, shapes)
    raise MixingError(f"is not known slice by slice ({name})")


def sized(
    flat: FlatProgram, equation: Equation, made: Sequence[tuple[int, ...]], given: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """The parameters of an op at other sizes: those of its results and of its operands."""
    name, params = equation.primitive.name, dict(equation.params)
    if name == "broadcast_in_dim":
        params["shape"] = made[0]
    elif name == "reshape":
        params["new_sizes"] = made[0]
    elif name == "slice":
        old = aval_of(flat, equation.inputs[0]).shape
        params["limit_indices"] = tuple(
            limit if was == now else now for limit, was, now in zip(params["limit_indices"], old, given[0], strict=True)
        )
    elif name == "dynamic_slice":
        params["slice_sizes"] = made[0]
    elif name == "gather":
        old = aval_of(flat, equation.inputs[0]).shape
        params["slice_sizes"] = tuple(
            size if was == now else now for size, was, now in zip(params["slice_sizes"], old, given[0], strict=True)
        )
    return params


def _plain(carried: Sequence[Dims]) -> OpDims:
    return OpDims(tuple(carried), tuple({} for _ in carried))


def _parts(shapes: Sequence[tuple[int, ...]], whole: set[int]) -> OpDims:
    used = {d: "takes a part of the sequence" for d in range(len(shapes[0])) if d not in whole}
    rest = len(shapes) - 1
    return OpDims(({d: d for d in whole}, *({} for _ in range(rest))), (used, *({} for _ in range(rest))))


def _product(numbers: Any, shapes: Sequence[tuple[int, ...]]) -> OpDims:
    (left, right), (left_batch, right_batch) = numbers
    carried: list[dict[int, int]] = []
    free = len(left_batch)
    for shape, contracted, batch in zip(shapes, (left, right), (left_batch, right_batch), strict=True):
        own = {int(d): out for out, d in enumerate(batch)}
        for d in range(len(shape)):
            if d not in own and d not in contracted:
                own[d] = free
                free += 1
        carried.append(own)
    why = "adds up over the sequence"
    return OpDims(tuple(carried), (dict.fromkeys(map(int, left), why), dict.fromkeys(map(int, right), why)))


def _gather(params: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> OpDims:
    numbers = params["dimension_numbers"]
    operand, indices = shapes[0], shapes[1]
    rank = len(numbers.offset_dims) + len(indices) - 1
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    of_operand = dict(zip((d for d in range(len(operand)) if d not in gone), numbers.offset_dims, strict=True))
    carried = {d: out for d, out in of_operand.items() if params["slice_sizes"][d] == operand[d]}
    used = {d: "looks up along the sequence" for d in range(len(operand)) if d not in carried}
    batch = [out for out in range(rank) if out not in numbers.offset_dims]
    last = {len(indices) - 1: "looks up by the sequence"}
    if numbers.operand_batching_dims:
        last |= dict.fromkeys(numbers.start_indices_batching_dims, "looks up along the sequence")
    return OpDims((carried, dict(enumerate(batch))), (used, last))
