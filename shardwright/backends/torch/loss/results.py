"""What the results of a step are to the samples of its batch, from runs of the step at two batch sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.loss.trace import LossTrace
from shardwright.core.model.loss import Finding, LossProgram, ResultOfBatch, Verdict, place_by_shape, read_results

_OF_NO_SAMPLE = ResultOfBatch(None)
_UNKNOWN = Verdict(finding=Finding("unknown", "it is not known what it is made of"))


@dataclass(frozen=True, slots=True)
class ReturnedLeaf:
    """One leaf of what a step returned.

    Attributes:
        value: the number of its value in the trace; None where it is none, as of what the step did not compute.
        shape: of a tensor; else ().
        number: a number of Python; None where it is none.
    """

    value: int | None
    shape: tuple[int, ...] = ()
    number: float | None = None


def returned_leaves(returned: Any, trace: LossTrace) -> list[ReturnedLeaf]:
    """The leaves of what a step returned. A number is known by the tensor that it was read from."""
    found = []
    for leaf in pytree.tree_leaves(returned):
        if isinstance(leaf, torch.Tensor):
            found.append(ReturnedLeaf(trace.read(leaf), tuple(leaf.shape)))
        elif isinstance(leaf, bool | int | float):
            of = {value for number, value in trace.read_numbers if type(number) is type(leaf) and number == leaf}
            found.append(ReturnedLeaf(min(of) if len(of) == 1 else None, (), leaf))
        else:
            found.append(ReturnedLeaf(None))
    return found


def results_of(
    small: Sequence[ReturnedLeaf], large: Sequence[ReturnedLeaf], program: LossProgram
) -> list[ResultOfBatch] | None:
    """What each leaf is to the samples of the batch; None where another number of them is returned at another size."""
    if len(small) != len(large):
        return None
    known = [a.value == b.value for a, b in zip(small, large, strict=True)]
    values = [a.value for a, is_known in zip(small, known, strict=True) if is_known and a.value is not None]
    of_values = dict(zip(values, read_results(program, values), strict=True))
    return [
        of_values[a.value] if is_known and a.value is not None else _unread(a, b, program.sizes, _UNKNOWN)
        for a, b, is_known in zip(small, large, known, strict=True)
    ]


def results_by_shape(
    small: Sequence[ReturnedLeaf], large: Sequence[ReturnedLeaf], sizes: tuple[int, int], verdict: Verdict
) -> list[ResultOfBatch]:
    """What each leaf is to the samples of the batch, where nothing but shapes is known; ``verdict`` says why."""
    return [_unread(a, b, sizes, verdict) for a, b in zip(small, large, strict=True)]


def _unread(a: ReturnedLeaf, b: ReturnedLeaf, sizes: tuple[int, int], verdict: Verdict) -> ResultOfBatch:
    place, finding = place_by_shape(a.shape, b.shape, sizes)
    if place is not None and place.inner == 1:
        return ResultOfBatch(place, grows=True)
    if place is not None or finding is not None:
        return ResultOfBatch(None, Verdict(finding=finding) if finding is not None else verdict, grows=True)
    is_plain = a.value is None and b.value is None and a.number == b.number
    return _OF_NO_SAMPLE if is_plain else ResultOfBatch(None, verdict)
