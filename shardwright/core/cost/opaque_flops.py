"""The FLOPs that an op may have when nothing but its operands and results is known: an estimate from above."""

import math

from shardwright.core.model.graph import Graph, Op, Tensor

HEADED_DIMS = 3
"""The number of dims beside the batch from which values are taken to have heads, as those of an attention do."""


def most_flops(graph: Graph, op: Op, batch: int) -> int:
    """The most that such operands and such a result are usually for, sample by sample; never 0.

    - A product of the two largest operands, or of the only one with itself: m·k, k·n and m·n entries give m·n·k.
    - A product or a convolution of the largest operand with a weight: one dim of both is the same, the smallest where
      several could be it.
    - Of values with heads an attention: two products over the longest dim.
    """
    tensors = [graph.tensors[t] for t in (*op.inputs, *op.outputs)]
    given, made = tensors[: len(op.inputs)], max(1, _entries(result_of(graph, op, batch), batch))
    values = [value for value in given if value.carries_gradients]
    found = [made]
    if values:
        sizes = sorted(_entries(value, batch) for value in values)
        found.append(math.isqrt(sizes[-1] * sizes[-2 if len(sizes) > 1 else -1] * made))
    if moving := [value for value in values if any(value.per_sample)]:
        largest = max(moving, key=lambda value: _entries(value, batch))
        for weight in given:
            shared = [size for size in _dims(weight) if size > 1 and size in _dims(largest)]
            if shared and not any(weight.per_sample):
                found.append(_entries(largest, batch) * _entries(weight, batch) // min(shared))
        if any(len(_dims(value)) >= HEADED_DIMS for value in moving):
            found.append(2 * made * max(max(_dims(value), default=1) for value in moving))
    return 2 * max(found) * (batch if any(any(value.per_sample) for value in tensors) else 1)


def result_of(graph: Graph, op: Op, batch: int) -> Tensor:
    """The largest result of an op, or its largest operand where it has no result."""
    return max((graph.tensors[t] for t in op.outputs or op.inputs), key=lambda value: value.elements(batch))


def _dims(value: Tensor) -> list[int]:
    """The sizes of the dims of one sample, without that of the batch."""
    sizes = zip(value.fixed, value.per_sample, strict=True)
    return [slope or size for size, slope in sizes if slope != 1]


def _entries(value: Tensor, batch: int) -> int:
    """The entries of one sample; all entries where they do not grow with the batch."""
    return value.elements(batch) // (batch if any(value.per_sample) else 1)
