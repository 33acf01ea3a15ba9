"""Weights on their way between ranks before training begins."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.pipeline_messages import as_carried
from shardwright.backends.torch.machine.watchdog import Watch
from shardwright.backends.torch.state.ownership import Holding


def add_holders(holding: Holding, needs: Mapping[int, Sequence[str]], bound: BoundMesh, watch: Watch) -> bool:
    """Bring parameters and buffers to ranks that turned out to need them: the home sends what it has.

    Args:
        needs: names by coordinate on pp.

    Returns:
        whether this rank got any.
    """
    old = holding.placement
    assert old is not None
    new = old.with_needs(needs)
    holding.placement = new
    changed = False
    for name in sorted((*new.parameters, *new.buffers)):
        home, *_ = old.holders(name)
        for holder in new.holders(name):
            if holder in old.holders(name):
                continue
            watch.doing(f"moving {name} to pp rank {holder}")
            if holding.rank == home:
                with watch.waiting(f"rank {bound.peer('pp', holder)}"):
                    dist.send(as_carried(holding.tensor(name).detach()), bound.peer("pp", holder))
            elif holding.rank == holder:
                buffer = torch.empty_like(
                    holding.tensor(name), device=bound.device, memory_format=torch.contiguous_format
                )
                with watch.waiting(f"rank {bound.peer('pp', home)}"):
                    dist.recv(as_carried(buffer), bound.peer("pp", home))
                holding.put(name, buffer)
                changed = True
    return changed


def take_values(model: nn.Module, source: int, bound: BoundMesh, watch: Watch) -> None:
    """Give every rank the parameters and buffers that rank ``source`` has; every rank calls this, with the same model.

    What is on the meta device stays there.
    """
    watch.doing("taking the first weights of rank 0")
    with torch.no_grad(), watch.waiting(f"all ranks, to take the first weights of rank {source}"):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_meta:
                continue
            whole = tensor.detach().to(bound.device).contiguous().resolve_conj()
            dist.broadcast(as_carried(whole), source)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)
    watch.doing("between steps")


def synchronize(holding: Holding, bound: BoundMesh, watch: Watch, axes: Sequence[str] = ("dp",)) -> None:
    """Start all peers on ``axes``, and all holders of a tied parameter, from the same numbers: those of the first."""
    placement = holding.placement
    assert placement is not None
    watch.doing("bringing initial weights in line")
    for name in sorted((*holding.local_parameters(), *holding.local_buffers())):
        tensor = holding.tensor(name).detach()
        holders = placement.holders(name)
        me, home = holding.rank, holders[0]
        carried = as_carried(tensor)
        if len(holders) > 1 and name in placement.parameters:
            with watch.waiting(f"the holders of {name}"):
                if me == home:
                    for holder in holders[1:]:
                        dist.send(carried, bound.peer("pp", holder))
                else:
                    dist.recv(carried, bound.peer("pp", home))
        for axis in axes:
            if bound.size(axis) > 1:
                with watch.waiting(f"{axis} peers, ranks {list(bound.groups[axis])}"):
                    dist.broadcast(carried, bound.groups[axis][0], group=bound.handles[axis])
        if carried.data_ptr() != tensor.data_ptr():
            tensor.copy_(carried.view_as(tensor))
    watch.doing("between steps")
