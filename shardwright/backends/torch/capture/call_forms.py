"""Calls of ops without their values, and the core's ops that stand for them."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwright.backends.torch.compat import FakeTensor
from shardwright.core.cost.saved_activations import WITH_DROPOUT

SMALL_ENTRIES = 2**16
"""The most entries of a tensor of integers whose values are part of a call."""
SEEN_KINDS = frozenset({
    "elementwise", "reduction", "softmax", "normalization", "copy", "sort", "opaque", "gather", "scatter", "concat",
})  # fmt: skip
"""The kinds of op whose memory is what autograd holds for the call itself. Of the others it follows from the kind."""
FREE_KINDS = frozenset({"view", "slice", "create"})
ATTENTION = "aten.scaled_dot_product_attention"
RECURRENT = frozenset({"aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu"})


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    flows: bool
    """Whether a gradient flows through it."""
    first: int
    """The place of the same tensor among the inputs, the first time that it is given."""
    values: torch.Tensor | None
    """The values of a small tensor of integers, where it has any."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call of an op without values, and the core's ops that stand for it.

    Attributes:
        pieces: for each of these its inputs and outputs as the call numbers its tensors: the inputs, then the outputs,
            then the values between the pieces.
        inputs: of each piece the number of inputs.
        outer: the number of the call's own inputs and outputs.
        flowing: those through which gradients flow.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    pieces: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    outer: int
    flowing: frozenset[int]

    @property
    def is_product(self) -> bool:
        """Whether it is one of the products that `keeps_copies` names."""
        return self.func._schema.name in ("aten::linear", ATTENTION.replace(".", "::"))

    @property
    def head(self) -> int:
        """The piece that stands for the whole call: the first one through which a gradient flows."""
        return next(n for n, slots in enumerate(self.pieces) if not self.flowing.isdisjoint(slots[: self.inputs[n]]))

    def backward_pieces(self, operands: int) -> frozenset[int]:
        """The pieces of a call of so many ``operands`` at which what its backward holds is counted: where the gradients
        of results arrive, or, where such a piece reads no operand that has a gradient, as the mean of a loss, the last
        piece before it that does. That one is divided over ranks as the operand is."""
        reading = [n for n, slots in enumerate(self.pieces) if self.flowing.intersection(slots[: self.inputs[n]])]
        giving = [n for n, slots in enumerate(self.pieces) if any(operands <= slot < self.outer for slot in slots)]
        return frozenset(max((r for r in reading if r <= n), default=n) for n in giving)


def form_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flows: Callable[[torch.Tensor], bool],
    writes: Sequence[str],
    pieces: Sequence[tuple[Sequence[int], Sequence[int]]],
    outer: int,
) -> CallForm:
    """The form of a call. ``writes`` names the arguments that it writes, and that it is given by name alone;
    ``pieces`` gives the inputs and outputs of each."""
    places: dict[Any, int] = {}
    flowing: set[int] = set()

    def form(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided else ()
            place = places["count"] = places.get("count", -1) + 1
            first = places.setdefault(id(value), place)
            if flows(value):
                flowing.add(first)
            return Form(tuple(value.shape), strides, value.dtype, first in flowing, first, _values(value))
        if isinstance(value, (list, tuple)):
            return tuple(map(form, value)) if isinstance(value, tuple) else list(map(form, value))
        return value

    given = tuple((name, form(value)) for name, value in kwargs.items() if name not in writes)
    return CallForm(
        func,
        form(tuple(args)),
        given,
        tuple((*inputs, *outputs) for inputs, outputs in pieces),
        tuple(len(inputs) for inputs, _ in pieces),
        outer,
        frozenset(flowing),
    )


def typed_as(call: CallForm, other: CallForm) -> CallForm:
    """A call with the dtypes of another one of the same form."""

    def typed(value: Any, like: Any) -> Any:
        if isinstance(value, Form):
            return replace(value, dtype=like.dtype)
        if isinstance(value, (list, tuple)):
            made = [typed(*pair) for pair in zip(value, like, strict=True)]
            return tuple(made) if isinstance(value, tuple) else made
        return like if isinstance(value, torch.dtype) else value

    return replace(call, args=typed(call.args, other.args), kwargs=typed(call.kwargs, other.kwargs))


def is_seen_whole(name: str, kinds: Collection[str]) -> bool:
    """Whether the memory of a composite op, made of ops of these kinds, is that of the whole call."""
    return name in RECURRENT or (not SEEN_KINDS.isdisjoint(kinds) and SEEN_KINDS.union(FREE_KINDS).issuperset(kinds))


def keeps_copies(name: str, suffix: str, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a product may keep other tensors than its operands and results, so that its call is seen: a linear layer
    of what it has to copy into a matrix, and an attention with dropout, which not every device has a kernel for."""
    return (name == "aten.linear" and not _is_matrix(inputs[0])) or (name == ATTENTION and suffix == WITH_DROPOUT)


def _is_matrix(tensor: torch.Tensor) -> bool:
    """Whether the leading dims of a tensor lie as one, so that it is a matrix of rows without being copied."""
    if tensor.layout is not torch.strided:
        return True
    dims = [(size, stride) for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(dims))


def pieces_of(
    ops: Sequence[tuple[str, Sequence[int], Sequence[int]]],
    inputs: Sequence[int | None],
    outputs: Sequence[int | None],
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The inputs and outputs of the ops that a call is made of, each (kind, inputs, outputs), in the call's numbers.
    None where the call's own tensors are not among those of the ops."""
    slots: dict[int, int] = {}
    for slot, number in enumerate((*inputs, *outputs)):
        if number is not None:
            slots.setdefault(number, slot)
    for kind, given, made in reversed(ops):  # a result that is a view: the memory is that of what it is a view of
        if kind == "view" and made[0] in slots and slots[made[0]] >= len(inputs):
            slots.setdefault(given[0], slots[made[0]])
    between = itertools.count(len(inputs) + len(outputs))

    def numbered(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(slots[n] if n in slots else slots.setdefault(n, next(between)) for n in numbers)

    return [(numbered(given), numbered(made)) for _, given, made in ops]


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a small tensor of integers; None where it has none."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return None
    return tensor.detach().to("cpu", copy=True) if tensor.numel() <= SMALL_ENTRIES else None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
