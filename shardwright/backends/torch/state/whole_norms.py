"""Norms of tensors that are cut like the parameters of a model: those of the whole tensors, on every rank."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.state.ownership import Ownership
from shardwright.backends.torch.state.parts import Parts


class LocalNorms:
    """The norms of whole tensors in one process."""

    def each(
        self, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], order: float = 2.0
    ) -> torch.Tensor:
        """The norms of tensors that are laid like these parameters; 0 for None."""
        powers = [self._power(own, given, order) for own, given in zip(parameters, tensors, strict=True)]
        device = parameters[0].device if parameters else torch.device("cpu")
        found = torch.stack([one.to(device) for one in powers]) if powers else torch.zeros(0)
        return found if math.isinf(order) else found.pow(1.0 / order)

    def total(self, parameters: Sequence[torch.Tensor], norms: torch.Tensor) -> torch.Tensor:
        """The 2-norm of all entries, from the norms of the tensors of these parameters."""
        return norms.square().sum().sqrt()

    def _power(self, parameter: torch.Tensor, tensor: torch.Tensor | None, order: float) -> torch.Tensor:
        dtype = torch.float64 if parameter.dtype is torch.float64 else torch.float32
        if tensor is None or not tensor.numel():
            return torch.zeros((), dtype=dtype, device=parameter.device)
        norm: torch.Tensor = torch.linalg.vector_norm(tensor, order, dtype=dtype)
        return norm if math.isinf(order) else norm.pow(order)


class WholeNorms(LocalNorms):
    """The norms of whole tensors, of which ranks hold parts. Every rank calls these functions, for the same parameters
    on all peers of the tensor axis and of the data axis."""

    def __init__(self, ownership: Ownership, parts: Parts, bound: BoundMesh, watchdog: Watchdog) -> None:
        self._ownership, self._parts, self._bound, self._watchdog = ownership, parts, bound, watchdog

    def each(
        self, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], order: float = 2.0
    ) -> torch.Tensor:
        counted = [
            tensor if self._counts(parameter) else None for parameter, tensor in zip(parameters, tensors, strict=True)
        ]
        powers = [self._power(own, given, order) for own, given in zip(parameters, counted, strict=True)]
        if not powers:
            return torch.zeros(0, device=self._bound.device)
        found = torch.stack([one.to(self._bound.device) for one in powers])
        flat = self._parts.flat
        if self._bound.size("tp") > 1:
            self._sum(found, self._bound.groups["tp"], self._bound.handles["tp"], order)
        if flat is not None and flat.data.group is not None:
            self._sum(found, flat.data.ranks, flat.data.group, order)
        return found if math.isinf(order) else found.pow(1.0 / order)

    def total(self, parameters: Sequence[torch.Tensor], norms: torch.Tensor) -> torch.Tensor:
        placement, me = self._ownership.placement, self._ownership.rank
        names = [self._ownership.name_of(parameter) for parameter in parameters]
        here = [placement is None or name is None or placement.parameters[name][0] == me for name in names]
        own = norms[torch.tensor(here, dtype=torch.bool, device=norms.device)].square().sum().to(torch.float64)
        if self._bound.size("pp") > 1:  # where a stage may have no parameters, and so no dtype of theirs
            self._sum(own, self._bound.groups["pp"], self._bound.handles["pp"], 2.0)
        return own.sqrt().to(norms.dtype)

    def _counts(self, parameter: torch.Tensor) -> bool:
        """Whether this rank's part of a parameter is none that another rank has too."""
        name, parts = self._ownership.name_of(parameter), self._parts
        if name is None:
            return True
        return (parts.tensor is None or parts.tensor.counts(name)) and (parts.flat is None or parts.flat.counts(name))

    def _sum(self, own: torch.Tensor, ranks: Sequence[int], group: dist.ProcessGroup, order: float) -> None:
        self._watchdog.doing("the norms of parameters")
        with self._watchdog.waiting(f"ranks {list(ranks)}"):
            dist.all_reduce(own, op=dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group=group)
        self._watchdog.doing("between steps")
