"""The comparison of a step body's traces at several batch sizes: whether they did the same ops with the same
numbers."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from shardwright.backends.torch.loss.trace import LossTrace
from shardwright.core.model.loss import follows

CUT_BY_NUMBERS = frozenset({"slice", "narrow", "split", "unsafe_split", "repeat_interleave"})
"""Ops whose numbers give the places and sizes of their results."""


class DifferentRunsError(Exception):
    """A step does something else at another batch size; the message says what."""


def require_alike(small: LossTrace, large: LossTrace) -> None:
    """Raise DifferentRunsError unless both traces did the same ops on the same values."""
    for a, b in zip_longest(small.ops, large.ops):
        if a is None or b is None or (a.name, a.inputs, a.outputs) != (b.name, b.inputs, b.outputs):
            op, trace = (a, small) if a is not None else (b, large)
            assert op is not None
            where = trace.calls[op.call].path
            raise DifferentRunsError(f"{op.name}{f' in {where!r}' if where else ''} is done at one batch size alone")
    if len(small.values) != len(large.values) or small.inputs != large.inputs:
        raise DifferentRunsError("other tensors are used at another batch size")


def require_alike_alone(alone: LossTrace, small: LossTrace, large: LossTrace, sizes: tuple[int, int]) -> None:
    """Raise DifferentRunsError unless the run with one sample alone, which the two traces do not cover, computes as
    they do; its memory layout may differ."""
    for op, a, b in zip_longest(*(_computed(trace) for trace in (alone, small, large))):
        if op is None or a is None or b is None or op[0] != a[0] or len(op[1]) != len(a[1]) or len(a[1]) != len(b[1]):
            raise DifferentRunsError(f"{(op or a or b)[0]} is not done alike with one sample")
        for one, *pair in zip(op[1], a[1], b[1], strict=True):
            if not follows(one, (pair[0], pair[1]), sizes):
                raise DifferentRunsError(f"{op[0]} computes with {one} with one sample, and with {pair[0]} with two")


def _computed(trace: LossTrace) -> list[tuple[str, list[Any]]]:
    """The ops of a trace that compute something, and the numbers that they are given."""
    return [
        (op.name, numbers_of(trace.calls_of[index].arguments) if index in trace.calls_of else [])
        for index, op in enumerate(trace.ops)
        if op.kind not in ("view", "copy") or op.name.removeprefix("aten.") in CUT_BY_NUMBERS
    ]


def numbers_of(arguments: Mapping[str, Any]) -> list[Any]:
    """The numbers among an op's arguments; of lists, most of which are sizes, only the fractions."""
    alone = [v for v in arguments.values() if isinstance(v, (int, float, bool, str))]
    lists = [v for v in arguments.values() if isinstance(v, (list, tuple))]
    return [*alone, *(v for listed in lists for v in listed if isinstance(v, float))]
