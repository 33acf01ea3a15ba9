"""The rules by which each kind of op runs on shards: with local sizes among its arguments, or in a sharded form where a
split dim has a role.

An op without a rule here runs whole on every rank, between conversions: always right, and reported.
"""

from collections.abc import Callable
from typing import Any

import torch

from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError
from shardwright.backends.torch.tensor_parallel.unit_call import Call
from shardwright.backends.torch.tensor_parallel.unit_layouts import Hop
from shardwright.core.layout.placements import Replicate

Rule = Callable[[Call], bool]
"""A function that lowers a call; False when it has no form for this layout."""
RULES: dict[str, Rule] = {}
R = Replicate()


def rule(*names: str, whole: Rule | None = None) -> Callable[[Rule], Rule]:
    """Register a rule for aten ops by name; ``whole`` is that of calls that every rank makes on whole tensors."""

    def register(function: Rule) -> Rule:
        def lowered(call: Call) -> bool:
            return (whole if whole is not None and call.is_replicated else function)(call)

        RULES.update(dict.fromkeys(names, lowered))
        return function

    return register


def lower(call: Call) -> bool:
    """Lower a call on shards. False when no sharded form is known."""
    if call.site.is_write:
        return False
    found = RULES.get(call.site.name)
    if found is not None:
        return found(call)
    if call.is_replicated:
        return as_recorded(call)
    if len(call.pieces) != 1 or call.pieces[0][1].signature.need or call.site.draws:
        return False
    return _by_kind(call)


AS_RECORDED = frozenset({"elementwise", "softmax", "normalization", "concat", "gather", "scatter", "sort", "reduction",
                         "contraction", "attention", "view", "copy"})  # fmt: skip
SIZED = frozenset({"as_strided", "unfold", "diagonal", "repeat", "tile", "pixel_shuffle", "im2col", "col2im"})
"""Views and copies whose arguments are sizes of their inputs: not run on shards."""


def _by_kind(call: Call) -> bool:
    if call.pieces[0][0].kind not in AS_RECORDED or call.site.name in SIZED:
        return False
    return as_recorded(call)


def as_recorded(call: Call) -> bool:
    """Lower the call as it is, on the tensors that this rank holds: a rule that always has a form."""
    if call.site.draws:
        call.lowering.seeded(call.site)
    args, kwargs = call.arguments(call.slots())
    result = call.lowering.source.call(call.site.function, *args, is_kept=call.site.draws, **kwargs)
    call.give_all(result)
    return True


def run_whole(call: Call) -> None:
    """Lower the call on whole tensors, on every rank; its results are cut as the layout says."""
    source = call.lowering.source
    if call.site.is_write:
        _write_back(call)
        return
    if call.is_flat_product:
        raise NotReplayableError(f"{call.site.name} over flattened dims has no form for its layout")
    if call.converts_between:
        _without_between(call)
    if call.site.draws:
        call.lowering.seeded(call.site)
    args, kwargs = call.arguments(call.slots(whole=True))
    result = source.call(call.site.function, *args, is_kept=call.site.draws, **kwargs)
    call.give_all(result, whole=True)


def _without_between(call: Call) -> None:
    """Raise NotReplayableError where an op outside the call reads a value between its pieces: there is none when the
    call runs as one."""
    inside = {id(op) for op, _ in call.pieces}
    for op in call.lowering.traced.graph.ops:
        if id(op) not in inside and set(op.inputs) & call.between:
            raise NotReplayableError(f"a value inside {call.site.name} is read elsewhere")


def _write_back(call: Call) -> None:
    """Lower a write to a view: the part goes back into the whole that it is a view of."""
    op, layout = call.pieces[0]
    lowering = call.lowering
    given = []
    for position, var in enumerate(call.inputs(0)):
        hop = layout.inputs[position]
        place = layout.signature.inputs[position]
        gradient = None if hop.gradient is None else (R, hop.gradient[0])
        given.append(lowering.hop(var, Hop((place, R), gradient)))
    if len(given) == 1:
        shape, dtype = lowering.shape(op.outputs[0]), lowering.dtype(op.outputs[0])
        old = lowering.source.call(_empty, list(shape), dtype, lowering.device)
    else:
        old = given[0]
    args, kwargs = call.arguments({0: old})
    made = lowering.source.call(_written, call.site.function, args[1:], _Keywords(kwargs), old, given[-1])
    call.give(0, 0, made, whole=True)


class _Keywords:
    """Keyword arguments as one plain argument."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


def _empty(shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _written(
    view: Callable[..., torch.Tensor], args: list[Any], keywords: _Keywords, old: torch.Tensor, new: torch.Tensor
) -> torch.Tensor:
    made = old.clone()
    view(made, *args, **keywords.values).copy_(new)
    return made
