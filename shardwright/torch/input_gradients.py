"""Gradients of the tensors that a step is given, brought together from the stages that use them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.core.errors import MissingCapabilityError
from shardwright.torch.peers import own_samples


def wants_gradient(leaf: Any) -> bool:
    """Whether an argument is a tensor that gets a gradient."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()


def require_can_have_gradient(tensor: torch.Tensor, axis: int | None, label: str, bound: BoundMesh) -> None:
    """Raise MissingCapabilityError for an argument whose gradient cannot be brought together; ``axis``: along which it
    is cut into microbatches, None where each gets it whole."""
    if tensor.is_complex():
        raise MissingCapabilityError(f"{label} is complex and requires a gradient: pass torch.view_as_real of it")
    if axis is None and bound.size("dp") > 1:
        raise MissingCapabilityError(
            f"{label} requires a gradient and every microbatch gets it whole: that is not summed over the "
            f"{bound.size('dp')} replicas. Make it a parameter of the model, or pass it detached"
        )


@dataclass(frozen=True, slots=True)
class _Wanting:
    """A tensor that wants a gradient, and the leaves that microbatches are given in its place."""

    tensor: torch.Tensor
    leaves: list[torch.Tensor]
    axis: int | None


class InputGradients:
    """The gradients of the arguments of one call of a step.

    Args:
        own: whether microbatches hold samples of all ranks of the tensor axis, of which this rank gave its own.
    """

    def __init__(self, bound: BoundMesh, watchdog: Watchdog, *, own: bool) -> None:
        self._bound, self._watchdog, self._own = bound, watchdog, own
        self._wanting: list[_Wanting] = []

    def leaves(self, tensor: torch.Tensor, pieces: list[torch.Tensor], axis: int | None) -> list[torch.Tensor]:
        """What microbatches are given of an argument: its pieces, or leaves with their values where it wants a
        gradient."""
        if not wants_gradient(tensor):
            return pieces
        leaves = [piece.detach().requires_grad_() for piece in pieces]
        self._wanting.append(_Wanting(tensor, leaves, axis))
        return leaves

    def give(self, divisor: float) -> None:
        """Give the arguments their gradients, when the backward passes have run. Every rank calls this.

        Args:
            divisor: what gradients are divided by.
        """
        if not self._wanting:
            return
        found = [[leaf.grad for leaf in one.leaves] for one in self._wanting]
        if self._bound.size("pp") > 1:
            found = self._over_stages(found)
        tensors, gradients = [], []
        for one, each in zip(self._wanting, found, strict=True):
            if all(gradient is None for gradient in each):
                continue
            whole = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(one.leaves, each, strict=True)]
            if one.axis is None:
                gradient = torch.stack(whole).sum(dim=0)
            else:
                gradient = own_samples(whole, one.axis, self._bound) if self._own else torch.cat(whole, one.axis)
            tensors.append(one.tensor)
            gradients.append(gradient.div_(divisor).to(one.tensor))
        if tensors:
            torch.autograd.backward(tensors, gradients)

    def _over_stages(self, found: Sequence[Sequence[torch.Tensor | None]]) -> list[list[torch.Tensor | None]]:
        """The sums over the pipeline's ranks of what each has; None where none has any."""
        leaves = [one.leaves for one in self._wanting]
        is_double = any(leaf.dtype is torch.float64 for each in leaves for leaf in each)
        dtype, device = torch.float64 if is_double else torch.float32, self._bound.device
        flat = [torch.tensor([g is not None for each in found for g in each], dtype=dtype, device=device)]
        for each, of_leaves in zip(found, leaves, strict=True):
            for gradient, leaf in zip(each, of_leaves, strict=True):
                given = torch.zeros_like(leaf) if gradient is None else gradient
                flat.append(given.detach().to(device, dtype).reshape(-1))
        total = torch.cat(flat)
        peers = self._bound.groups["pp"]
        with self._watchdog.waiting(f"the gradients of inputs on pp peers, ranks {list(peers)}"):
            dist.all_reduce(total, group=self._bound.handles["pp"])
        there, *sums = total.split([len(one) for one in flat])
        parts = iter(zip(there.tolist(), sums, strict=True))
        return [
            [part.view_as(leaf).to(leaf.dtype) if has else None for leaf in of_leaves for has, part in [next(parts)]]
            for of_leaves in leaves
        ]
