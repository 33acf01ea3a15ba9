"""The rules of equations that know the order of a dim, for operands with dims of blocks in held order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from shardwright.backends.jax.capture.inner_programs import aval, bound
from shardwright.backends.jax.tensor_parallel.blocks import (
    Tags,
    blocks_between,
    concatenate_held,
    hold,
    reshape_held,
    restore,
    slice_held,
)

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})


@dataclass(slots=True, eq=False)
class Value:
    """An array, and the dims of it that are held by blocks."""

    array: Any
    tags: Tags = field(default_factory=dict)
    is_copies: bool = False
    """Whether the array has a first dim of one copy for each rank of the axis."""
    is_terms: bool = False
    """Whether the array has a first dim of one term for each rank of the axis: the value is their sum."""


def bind(equation: JaxprEqn, arrays: Sequence[Any]) -> list[Value]:
    with equation.ctx.manager:
        return [Value(array) for array in bound(equation.primitive, equation.params, arrays)]


def rank_of(array: Any) -> int:
    return len(getattr(array, "shape", ()))


def as_tagged(value: Value, tags: Tags, ways: int) -> Any:
    """The array of a value, held by these dims of blocks."""
    if value.tags == tags:
        return value.array
    return hold(restore(value.array, value.tags, ways), tags, ways)


Rule = Callable[[int, JaxprEqn, Sequence[Value], Sequence[Tags]], list[Value] | None]
"""A function that takes the ranks of the tensor axis, an equation, its operands, and the wanted dims of blocks of its
results. None: the rule does not know how, and the operands are given in their original order."""


def dot_general(
    ways: int, equation: JaxprEqn, given: Sequence[Value], multiply: Callable[[Any, Any], jax.Array]
) -> list[Value]:
    """The product of operands with dims of blocks, as ``multiply`` makes it of their arrays."""
    left, right = given
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    pairs = [*zip(left_sum, right_sum, strict=True), *zip(left_batch, right_batch, strict=True)]
    tags = [dict(left.tags), dict(right.tags)]
    for i, j in pairs:  # summed or matched entries must be in one order
        blocks = tags[0].get(i) or tags[1].get(j)
        if blocks is not None:
            tags[0][i] = tags[1][j] = blocks
    with equation.ctx.manager:
        made = multiply(*(as_tagged(v, t, ways) for v, t in zip(given, tags, strict=True)))
    order = free_dims(equation.params["dimension_numbers"], [rank_of(value.array) for value in given])
    found = {out: tags[side][d] for out, (side, d) in enumerate(order) if d in tags[side]}
    return [Value(made, found)]


def _dot_general(ways: int, equation: JaxprEqn, given: Sequence[Value], wanted: Sequence[Tags]) -> list[Value]:
    return dot_general(ways, equation, given, partial(equation.primitive.bind, **equation.params))


def free_dims(numbers: Any, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The (operand, dim) of every dim of a product."""
    summed, batch = numbers
    order = [(0, dim) for dim in batch[0]]
    for side, rank in enumerate(ranks):
        order += [(side, dim) for dim in range(rank) if dim not in (*summed[side], *batch[side])]
    return order


def _transpose(ways: int, equation: JaxprEqn, given: Sequence[Value], wanted: Sequence[Tags]) -> list[Value]:
    places = list(equation.params["permutation"])
    tags = {places.index(dim): blocks for dim, blocks in given[0].tags.items()}
    return [Value(bind(equation, [given[0].array])[0].array, tags)]


def _broadcast(ways: int, equation: JaxprEqn, given: Sequence[Value], wanted: Sequence[Tags]) -> list[Value]:
    dims = equation.params["broadcast_dimensions"]
    tags = {dims[dim]: blocks for dim, blocks in given[0].tags.items()}
    return [Value(bind(equation, [value.array for value in given])[0].array, tags)]


def _reduction(ways: int, equation: JaxprEqn, given: Sequence[Value], wanted: Sequence[Tags]) -> list[Value]:
    axes = set(equation.params["axes"])
    left = [dim for dim in range(rank_of(given[0].array)) if dim not in axes]
    tags = {left.index(dim): blocks for dim, blocks in given[0].tags.items() if dim in left}
    return [Value(value.array, tags) for value in bind(equation, [given[0].array])]


def _reshape(ways: int, equation: JaxprEqn, given: Sequence[Value], wanted: Sequence[Tags]) -> list[Value] | None:
    array, tags = reshape_held(given[0].array, given[0].tags, aval(equation.outvars[0]).shape, wanted[0], ways)
    return [Value(array, dict(tags))]


def _slice(ways: int, equation: JaxprEqn, given: Sequence[Value], wanted: Sequence[Tags]) -> list[Value] | None:
    params, (value,) = equation.params, given
    starts, ends = params["start_indices"], params["limit_indices"]
    cut = [d for d in value.tags if ends[d] - starts[d] != value.array.shape[d]]
    if not cut:
        return [Value(bind(equation, [value.array])[0].array, value.tags)]
    (dim,), strides = cut[:1], params["strides"]
    piece = _part(value, dim, ways, starts[dim], ends[dim])
    if len(cut) > 1 or piece is None or (strides and strides[dim] != 1):
        return None
    rest = [(0, n) if d == dim else (starts[d], ends[d]) for d, n in enumerate(piece.array.shape)]
    made = jax.lax.slice(piece.array, [a for a, _ in rest], [b for _, b in rest], strides)
    return [Value(made, piece.tags)]


def _split(ways: int, equation: JaxprEqn, given: Sequence[Value], wanted: Sequence[Tags]) -> list[Value] | None:
    (value,), dim = given, equation.params["axis"]
    if dim not in value.tags:
        return [Value(made.array, value.tags) for made in bind(equation, [value.array])]
    ends = pairwise(accumulate(equation.params["sizes"], initial=0))
    parts = [_part(value, dim, ways, start, end) for start, end in ends]
    found = [part for part in parts if part is not None]
    return found if len(found) == len(parts) else None


def _concatenate(ways: int, equation: JaxprEqn, given: Sequence[Value], wanted: Sequence[Tags]) -> list[Value] | None:
    dim = equation.params["dimension"]
    blocks = wanted[0].get(dim, ())
    if any(set(value.tags) - {dim} for value in given) or not blocks:
        return None
    pieces, start = [], 0
    for value in given:
        size = value.array.shape[dim]
        inside = blocks_between(blocks, start, start + size)
        if inside is None:
            return None
        pieces.append(as_tagged(value, {dim: inside} if inside else {}, ways))
        start += size
    return [Value(concatenate_held(pieces, dim, ways), {dim: blocks})]


def _part(value: Value, dim: int, ways: int, start: int, end: int) -> Value | None:
    """A part of a dim of blocks; None where it cuts a block."""
    inside = blocks_between(value.tags[dim], start, end)
    if inside is None:
        return None
    others = {d: blocks for d, blocks in value.tags.items() if d != dim}
    return Value(slice_held(value.array, dim, ways, start, end), {**others, dim: inside} if inside else others)


RULES: dict[str, Rule] = {
    "dot_general": _dot_general,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
}
