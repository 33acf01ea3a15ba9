"""Parameters that a rank will hold pieces of: they have shapes and no memory until these pieces are cut."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shardwright.backends.torch.state.ownership import Ownership, hollow_like, is_hollow
from shardwright.backends.torch.state.parts import Parts
from shardwright.backends.torch.state.weights import NamedWeights


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

    def value(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter, or what it will be where it has no memory: whole along the data axis."""
        if not is_hollow(parameter):
            return parameter
        whole = self._source.read(name).detach().to(device=self._device, dtype=parameter.dtype)
        return whole if self._parts.tensor is None else self._parts.tensor.piece(name, whole)

    def fill(self) -> None:
        """Give all of them their memory now."""
        for name in sorted(self.names):
            parameter = self._ownership.parameter(name)
            if is_hollow(parameter):
                parameter.data = self.value(name, parameter).clone(memory_format=torch.contiguous_format)
        self.names = frozenset()
