"""The sample that a model is captured with: which dim of which tensor is the batch, and other sizes of it.

A sample is a tensor, a tuple or list (positional arguments) or a mapping (keyword arguments), nested as deep as the
model's forward takes it. An entry that is no tensor is handed on as it is, or as a copy where it can change.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwright.core.errors import CaptureError, nearest


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of the sample, where it stands, and its batch dim (None: the same at every batch size)."""

    name: str
    tensor: torch.Tensor
    batch_dim: int | None
    rows: int = 1
    """Entries along the batch dim for each sample: the patches of an image, where they lie one after the other."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of a sample with the batch, where it is known.

    Attributes:
        batch: the batch size of the sample.
        dims: of every tensor, in the order of the sample, its batch dim (None: it has none) and rows for each sample.
        at: the whole sample at other batch sizes, because arguments that are no tensors may change too.
    """

    batch: int
    dims: tuple[tuple[int | None, int], ...]
    at: Mapping[int, Any]


class Sample:
    """A sample with its batch dims known. Raises CaptureError when they do not agree.

    ``batch_dims`` is a dim for all tensors (None: dim 0), or the sample's own structure with a dim, or None for no
    batch, in place of each tensor; the dim of an entry that a mapping leaves out is 0. The batch is the smallest of
    their sizes; others may be multiples of it, several entries for each sample.
    """

    def __init__(
        self, sample: Any, batch_dims: Any = None, *, fixed: bool = False, growth: Growth | None = None
    ) -> None:
        """``fixed``: no tensor grows with the batch. ``growth``: the growth of every tensor, in place of
        ``batch_dims``."""
        self._sample = sample
        self._at: Mapping[int, Any] = {} if growth is None else growth.at
        self.leaves: list[Leaf] = []
        if growth is not None:
            self._collect(sample, None, "")
            self.batch = growth.batch
            if len(self.leaves) != len(growth.dims):
                raise CaptureError(f"the sample has {len(self.leaves)} tensors, and {len(growth.dims)} are known")
            self.leaves = [
                replace(leaf, batch_dim=dim, rows=rows)
                for leaf, (dim, rows) in zip(self.leaves, growth.dims, strict=True)
            ]
            return
        if fixed:
            self._collect(sample, None, "")
            self.batch = 1
            return
        self._collect(sample, 0 if batch_dims is None else batch_dims, "")
        sizes = {leaf.name: leaf.tensor.shape[leaf.batch_dim] for leaf in self.leaves if leaf.batch_dim is not None}
        if not sizes:
            raise CaptureError(
                "no tensor of the sample has a batch dim, so nothing says what grows with the batch: give a tensor, a "
                "tuple or a dict of tensors that are batched along dim 0, or say which dims are with batch_dims="
            )
        first, self.batch = next(iter(sizes.items()))
        least = min(sizes.values())
        several = least > 1 and all(size % least == 0 for size in sizes.values())
        self.batch = least if several else self.batch
        for name, size in sizes.items():
            if size != self.batch and not several:
                raise CaptureError(
                    f"the sample's tensors disagree about the batch: {first} has {self.batch} entries along its batch "
                    f"dim, {name} has {size}. Say where the batch is, or that there is none, with "
                    f"batch_dims={{{name!r}: None}} (a dim or None per tensor; dim 0 where nothing is said)"
                )

        self.leaves = [
            leaf if leaf.batch_dim is None else replace(leaf, rows=leaf.tensor.shape[leaf.batch_dim] // self.batch)
            for leaf in self.leaves
        ]

    def arguments(
        self, make: Callable[[Leaf], torch.Tensor], size: int
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """The positional and keyword arguments at a batch size, with every tensor replaced by ``make(leaf)``; and the
        tensors that were made."""
        made = [make(leaf) for leaf in self.leaves]
        replaced = _replace(self._at.get(size, self._sample), iter(made))
        if isinstance(self._sample, Mapping):
            return (), dict(replaced), made
        if isinstance(self._sample, (tuple, list)):
            return tuple(replaced), {}, made
        return (replaced,), {}, made

    def _collect(self, value: Any, dims: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            self.leaves.append(Leaf(name or "input", value, _dim_of(value, dims, name or "input")))
        elif isinstance(value, Mapping):
            if isinstance(dims, Mapping):
                for key in dims:
                    if key not in value:
                        known = nearest(str(key), map(str, value))
                        raise CaptureError(f"batch_dims names {key!r}, which the sample does not have: {known}")
            for key, item in value.items():
                self._collect(item, dims.get(key, 0) if isinstance(dims, Mapping) else dims, _join(name, key))
        elif isinstance(value, (tuple, list)):
            each = dims if isinstance(dims, (tuple, list)) else [dims] * len(value)
            if len(each) != len(value):
                raise CaptureError(f"batch_dims has {len(each)} entries for {len(value)} in the sample{_at(name)}")
            for i, (item, dim) in enumerate(zip(value, each, strict=True)):
                self._collect(item, dim, _join(name, i))


def resized(shape: Sequence[int], axis: int | None, samples: int, wanted: int) -> tuple[int, ...]:
    """A shape of so many samples along ``axis`` (None: none) with another number of them."""
    found = list(shape)
    if axis is not None:
        found[axis] = found[axis] // samples * wanted
    return tuple(found)


def _replace(value: Any, made: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(made)
    if isinstance(value, Mapping):
        return {key: _replace(item, made) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_replace(item, made) for item in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, (str, bytes, int, float, complex, type(None), torch.nn.Module)) or callable(value):
        return value
    try:
        return copy.deepcopy(value)  # caches and the like are written by the forward pass
    except Exception:
        return value


def _dim_of(tensor: torch.Tensor, dim: Any, name: str) -> int | None:
    if dim is None or tensor.dim() == 0:
        return None
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise CaptureError(f"batch_dims gives {dim!r} for {name}: expected a dim or None")
    if not -tensor.dim() <= dim < tensor.dim():
        raise CaptureError(f"batch_dims gives dim {dim} for {name}, which has {tensor.dim()} dims")
    return dim % tensor.dim()


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _at(name: str) -> str:
    return f" at {name}" if name else ""
