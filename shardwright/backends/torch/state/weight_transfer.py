"""Weights on their way between ranks before training begins."""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.pipeline_messages import as_carried
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.state.ownership import Ownership


def add_holders(ownership: Ownership, needs: Mapping[int, Sequence[str]], bound: BoundMesh, watchdog: Watchdog) -> bool:
    """Send parameters and buffers from their home to ranks that turned out to need them.

    Args:
        needs: names by coordinate on pp.

    Returns:
        whether this rank got any.
    """
    old = ownership.placement
    assert old is not None
    new = old.with_needs(needs)
    ownership.placement = new
    changed = False
    for name in sorted((*new.parameters, *new.buffers)):
        home, *_ = old.holders(name)
        for holder in new.holders(name):
            if holder in old.holders(name):
                continue
            watchdog.doing(f"moving {name} to pp rank {holder}")
            if ownership.rank == home:
                with watchdog.waiting(f"rank {bound.peer('pp', holder)}"):
                    dist.send(as_carried(ownership.tensor(name).detach()), bound.peer("pp", holder))
            elif ownership.rank == holder:
                buffer = torch.empty_like(
                    ownership.tensor(name), device=bound.device, memory_format=torch.contiguous_format
                )
                with watchdog.waiting(f"rank {bound.peer('pp', home)}"):
                    dist.recv(as_carried(buffer), bound.peer("pp", home))
                ownership.put(name, buffer)
                changed = True
    return changed


def take_values(model: nn.Module, source: int, bound: BoundMesh, watchdog: Watchdog) -> None:
    """Give every rank the parameters and buffers that rank ``source`` has; every rank calls this, with the same model.

    Tensors on the meta device stay there.
    """
    watchdog.doing("taking the first weights of rank 0")
    with torch.no_grad(), watchdog.waiting(f"all ranks, to take the first weights of rank {source}"):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_meta:
                continue
            whole = tensor.detach().to(bound.device).contiguous().resolve_conj()
            dist.broadcast(as_carried(whole), source)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)
    watchdog.doing("between steps")


def synchronize(
    ownership: Ownership, bound: BoundMesh, watchdog: Watchdog, axes: Sequence[str] = ("dp",),
    left_out: Collection[str] = (),
) -> None:  # fmt: skip
    """Start all peers on ``axes``, and all holders of a tied parameter, from the same numbers: those of the first.
    ``left_out`` are names of tensors that all of them are yet to get from the same source."""
    placement = ownership.placement
    assert placement is not None
    watchdog.doing("bringing initial weights in line")
    for name in sorted({*ownership.local_parameters(), *ownership.local_buffers()} - set(left_out)):
        tensor = ownership.tensor(name).detach()
        holders = placement.holders(name)
        me, home = ownership.rank, holders[0]
        carried = as_carried(tensor)
        if len(holders) > 1 and name in placement.parameters:
            with watchdog.waiting(f"the holders of {name}"):
                if me == home:
                    for holder in holders[1:]:
                        dist.send(carried, bound.peer("pp", holder))
                else:
                    dist.recv(carried, bound.peer("pp", home))
        for axis in axes:
            if bound.size(axis) > 1:
                with watchdog.waiting(f"{axis} peers, ranks {list(bound.groups[axis])}"):
                    dist.broadcast(carried, bound.groups[axis][0], group=bound.handles[axis])
        if carried.data_ptr() != tensor.data_ptr():
            tensor.copy_(carried.view_as(tensor))
    watchdog.doing("between steps")
