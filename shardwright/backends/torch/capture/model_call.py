"""The call of the model in a step body, as a sample for capture: its arguments, and which of their dims grow with the
batch.

The body says where the batch is. It is run up to that call at two batch sizes, on tensors without values: sizes that
change are the batch's, numbers and lists among the arguments are taken as they are at each size, and sizes that stay
the same (of positions, masks, arguments that are not split) are no batch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.capture.batch_dims import Growth, Sample, resized
from shardwright.backends.torch.capture.fake_state import find_model_call
from shardwright.core.errors import CaptureError

SIZES = (2, 3)
"""The batch sizes of `capture`."""
Body = Callable[[list[torch.Tensor]], Any]


def sample_of(model: nn.Module, body: Body, inputs: Sequence[torch.Tensor], device: torch.device) -> Sample:
    """The model's first call in a step body. Raises CaptureError where there is none, or where the batch is unknown."""
    args, kwargs = find_model_call(model, body, list(inputs), device)
    given = arguments_of(model, args, kwargs)
    found = growth_of(model, body, inputs, device)
    return Sample(given) if found is None else Sample(given, growth=found)


def arguments_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Arguments as capture takes them: all by position, or all by keyword."""
    if not args:
        return dict(kwargs)
    if not kwargs:
        return tuple(args)
    signature = inspect.signature(model.forward)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY) and name in bound:
            raise CaptureError(
                f"{type(model).__name__}.forward takes {name} by position alone and is given others by keyword: give "
                f"all by position, or all by keyword"
            )
    return bound


def growth_of(model: nn.Module, body: Body, inputs: Sequence[torch.Tensor], device: torch.device) -> Growth | None:
    """The growth of the call's arguments with the batch; None where two batch sizes do not determine it."""
    axes: Sequence[int | None] | None = getattr(body, "axes", None)
    if axes is None:
        return None
    sizes = [tensor.shape[axis] for tensor, axis in zip(inputs, axes, strict=True) if axis is not None]
    batch = min(sizes, default=1)
    if not batch or any(size % batch for size in sizes):
        return None
    calls: dict[int, Any] = {}
    for samples in SIZES:
        given = [
            tensor if axis is None else torch.zeros(resized(tensor.shape, axis, batch, samples), dtype=tensor.dtype)
            for tensor, axis in zip(inputs, axes, strict=True)
        ]
        try:
            calls[samples] = arguments_of(model, *find_model_call(model, body, given, device))
        except Exception:  # a body that fits one batch size alone
            return None
    # Leaf by leaf, as capture takes them: one tensor may be several arguments.
    few, many = ([leaf.tensor for leaf in Sample(calls[samples], fixed=True).leaves] for samples in SIZES)
    dims: list[tuple[int | None, int]] = []
    if len(few) != len(many):
        return None
    for one, other in zip(few, many, strict=True):
        if one.dim() != other.dim():
            return None
        changed = [d for d, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
        if not changed:
            dims.append((None, 1))
            continue
        (dim, rows) = (changed[0], other.shape[changed[0]] - one.shape[changed[0]])
        if len(changed) > 1 or (one.shape[dim], other.shape[dim]) != (SIZES[0] * rows, SIZES[1] * rows):
            return None
        dims.append((dim, rows))
    return Growth(batch, tuple(dims), calls)
