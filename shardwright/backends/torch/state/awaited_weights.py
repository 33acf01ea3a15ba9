"""Parameters that a rank will hold pieces of: they have shapes and no memory until these pieces are cut."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shardwright.backends.torch.state.flat_shards import copy_span
from shardwright.backends.torch.state.ownership import Ownership, hollow_like, is_hollow
from shardwright.backends.torch.state.parts import Parts
from shardwright.backends.torch.state.weights import NamedWeights
from shardwright.core.checkpoint.boxes import Part


class AwaitedWeights:
    """Parameters without memory, and the source of their values.

    Args:
        names: first names of parameters on the meta device. From now on they are on ``device``, without memory.
        weights: as `weights.materialize` takes them, but no function.

    Attributes:
        names: those that are still without memory.
    """

    def __init__(
        self, ownership: Ownership, parts: Parts, names: Sequence[str],
        weights: str | Path | Mapping[str, torch.Tensor], device: torch.device,
    ) -> None:  # fmt: skip
        self._ownership, self._parts, self._device = ownership, parts, device
        self._source = NamedWeights(ownership, weights)
        self.names = frozenset(names)
        for name in names:
            self._source.require(name)
            ownership.put(name, hollow_like(ownership.tensor(name), device))

    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Have the values come from these weights. Raises PlanError where they lack one; the nearest is named."""
        source = NamedWeights(self._ownership, weights)
        for name in self.names:
            source.require(name)
        self._source = source

    def copy_span(
        self, name: str, parameter: torch.Tensor, strides: tuple[int, ...], span: tuple[int, int], into: torch.Tensor
    ) -> None:
        """Copy entries of a parameter, or of what it will be where it has no memory, as `flat_shards.Values`. Of
        weights in files no others are read."""
        if not is_hollow(parameter):
            copy_span(name, parameter, strides, span, into)
            return
        if self._source.is_in_files:
            part = replace(self._part(name, parameter), strides=strides, span=span)
            if into.dtype is parameter.dtype:
                self._source.read_part(name, part, into)
                return
            own = torch.empty_like(into, dtype=parameter.dtype)  # whose rounding every plan has
            self._source.read_part(name, part, own)
            into.copy_(own)
            return
        whole = self._source.read(name).detach().to(device=self._device, dtype=parameter.dtype)
        own = whole if self._parts.tensor is None else self._parts.tensor.piece(name, whole)
        copy_span(name, own, strides, span, into)

    def _part(self, name: str, parameter: torch.Tensor) -> Part:
        """What this rank holds of a parameter along the tensor axis."""
        tensor = self._parts.tensor
        split = None if tensor is None else tensor.places.get(name)
        shape = tuple(self._parts.whole_shape(name, parameter.shape))
        if tensor is None or split is None:
            return Part(shape)
        return Part(shape, split, tensor.axis.size, tensor.axis.coordinate)

    def fill(self) -> None:
        """Give all of them their memory now."""
        for name in sorted(self.names):
            parameter = self._ownership.parameter(name)
            if is_hollow(parameter):
                made = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
                self.copy_span(name, parameter, made.stride(), (0, made.numel()), made)
                parameter.data = made
        self.names = frozenset()
