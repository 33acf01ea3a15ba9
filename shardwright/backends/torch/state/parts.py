"""A rank's part of each parameter: its shard along the tensor axis, and of that its piece along the data axis."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwright.backends.torch.capture.precision import step_dtype
from shardwright.backends.torch.state.flat_shards import FlatShards
from shardwright.backends.torch.state.ownership import Ownership
from shardwright.backends.torch.state.parameter_shards import Shards


class Parts:
    """The parts of a model's parameters on one rank.

    Attributes:
        compute: the dtype in which steps compute; None: that of the parameters.
        tensor: the shards along the tensor axis; None where there is none.
        flat: the pieces along the data axis; None where replicas are whole, and before the first step.
    """

    def __init__(self, ownership: Ownership, compute: torch.dtype | None = None) -> None:
        self.ownership, self.compute = ownership, compute
        self.tensor: Shards | None = None
        self.flat: FlatShards | None = None

    def is_part(self, name: str) -> bool:
        """Whether this rank holds a part alone of a parameter that it holds."""
        return self._is_flat(name) or (self.tensor is not None and name in self.tensor.places)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter, or of something that is cut like it. Every rank that has a part calls this."""
        if self._is_flat(name):
            assert self.flat is not None
            part = self.flat.whole(name, part)
        return part if self.tensor is None else self.tensor.whole(name, part)

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        if self.tensor is not None:
            whole = self.tensor.piece(name, whole)
        return self.flat.piece(name, whole) if self.flat is not None and self._is_flat(name) else whole

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """The shape of the whole parameter, from that of the part that is held here."""
        if self.flat is not None and self._is_flat(name):
            shape = self.flat.shape(name)
        return shape if self.tensor is None else self.tensor.whole_shape(name, shape)

    @contextmanager
    def as_whole(self) -> Iterator[None]:
        """A context in which the model has parameters of whole shapes, on the meta device, in place of parts."""
        names = set() if self.tensor is None else set(self.tensor.places)
        if self.flat is not None and self.flat.is_shared:
            names |= set(self.flat.group_of)
        if self.compute is not None:
            names |= self.ownership.parameter_names
        stand_ins: dict[int, nn.Parameter] = {}
        for name in names:
            part = self.ownership.parameter(name)
            dtype = step_dtype(part.dtype, self.compute)
            whole = torch.empty(self.whole_shape(name, part.shape), dtype=dtype, device="meta")
            stand_ins[id(part)] = nn.Parameter(whole, requires_grad=part.requires_grad)
        tables = [(module._parameters, dict(module._parameters)) for module in self.ownership.model.modules()]
        try:
            for table, before in tables if names else ():
                table.update({k: stand_ins.get(id(p), p) for k, p in before.items() if p is not None})
            yield
        finally:
            for table, before in tables if names else ():
                table.update(before)

    @contextmanager
    def in_own_dtypes(self) -> Iterator[None]:
        """A context in which the model is called with inputs as they are given: its parameters are in their own dtypes
        there, as where it is captured for a plan, which counts its precision by itself."""
        compute, self.compute = self.compute, None
        try:
            yield
        finally:
            self.compute = compute

    def _is_flat(self, name: str) -> bool:
        return self.flat is not None and self.flat.is_shared and name in self.flat.group_of
