"""Look-ups in a table whose looked-up dim is split: every rank gives its own entries, and zero for the rest."""

import torch

from shardwright.backends.torch.machine.tensor_axis import Axis


def _local_index(index: torch.Tensor, held: int, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """The index into this rank's shard of ``held`` entries, and a mask of the places where it is outside."""
    local = index - axis.coordinate * held
    outside = (local < 0) | (local >= held)
    return local.masked_fill(outside, 0), outside


def embedding(weight: torch.Tensor, index: torch.Tensor, padding: int, by_frequency: bool, axis: Axis) -> torch.Tensor:
    """A term of the rows that ``index`` names. ``padding``: the row of the whole table that gets no gradient, or -1."""
    held = weight.shape[0]
    local, outside = _local_index(index, held, axis)
    own = padding - axis.coordinate * held
    if padding >= 0 and 0 <= own < held:
        rows = torch.ops.aten.embedding.default(weight, local, own, by_frequency)
    else:
        rows = torch.ops.aten.embedding.default(weight, local, -1, by_frequency)
    found: torch.Tensor = rows.masked_fill(outside.unsqueeze(-1), 0.0)
    return found


def select(source: torch.Tensor, dim: int, index: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A term of `torch.index_select`."""
    local, outside = _local_index(index, source.shape[dim], axis)
    shape = [1] * source.dim()
    shape[dim] = -1
    return source.index_select(dim, local.reshape(-1)).masked_fill(outside.reshape(shape), 0)


def take_along(source: torch.Tensor, dim: int, index: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A term of `torch.gather`."""
    local, outside = _local_index(index, source.shape[dim], axis)
    return source.gather(dim, local).masked_fill(outside, 0)


def picked(source: torch.Tensor, target: torch.Tensor, ignored: int, axis: Axis | None) -> torch.Tensor:
    """The negative log-probability of every target, 0 where it is ``ignored``; a term of it when the classes are split
    over ``axis``. Classes are dim 1, or dim 0 of a vector."""
    dim = 1 if source.dim() > 1 else 0
    skipped = target == ignored
    index = target.masked_fill(skipped, 0)
    if axis is not None:
        index, outside = _local_index(index, source.shape[dim], axis)
        skipped = skipped | outside
    found = source.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    return (-found).masked_fill(skipped, 0.0)


def mean_of_targets(values: torch.Tensor, target: torch.Tensor, ignored: int) -> torch.Tensor:
    """The mean over the targets that count."""
    return values.sum() / (target != ignored).sum()


def count_of_targets(target: torch.Tensor, ignored: int, dtype: torch.dtype) -> torch.Tensor:
    """The number of targets that count."""
    return (target != ignored).sum().to(dtype)
