"""The leaves of what a step returns, from the values of its microbatches."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwright.backends.torch.pipeline.step_results import Returned, as_tensors
from shardwright.backends.torch.state.model_agreement import plain_text
from shardwright.core.errors import ShardwrightError
from shardwright.torch.output import StepOutput


def as_output(found: Returned | None, values: Sequence[Any], position: int) -> Any:
    """A leaf of a result: a tensor as StepOutput, and what is none as it is where it is the same for all microbatches.

    Args:
        values: of each microbatch, where it is no tensor.

    Raises ShardwrightError for leaves that differ, other than numbers.
    """
    if found is not None:
        return StepOutput(found.outputs, found.everywhere, found.weights, found.first)
    first = values[0]
    said = plain_text(first)
    if all(
        value is first or (said is not None and plain_text(value) == said) or _equal(value, first) for value in values
    ):
        return first
    if all(isinstance(value, (bool, int, float)) for value in values):
        return StepOutput(as_tensors(values))
    kinds = ", ".join(sorted({type(value).__name__ for value in values}))
    raise ShardwrightError(
        f"leaf {position} of what the step returned differs between microbatches of different shapes ({kinds}): return "
        f"tensors or numbers, or the same value for all of them"
    )


def _equal(one: Any, other: Any) -> bool:
    """Whether values that are no tensors are the same, by what they hold."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        of_objects = one.dtype.hasobject or other.dtype.hasobject
        same_form = not of_objects and (one.dtype, one.shape) == (other.dtype, other.shape)
        return same_form and one.tobytes() == other.tobytes()
    try:
        return bool(one == other)
    except Exception:  # of a comparison that has no one answer
        return False


def as_listed(found: Returned | None, values: list[Any]) -> Any:
    """A leaf of a result as SageMaker's steps return it: what is no tensor, and not None, once for each microbatch."""
    if found is None:
        return None if all(value is None for value in values) else values
    if found.are_numbers:
        return [number.item() for number in found.outputs]
    return StepOutput(found.outputs, found.everywhere, found.weights, found.first)
