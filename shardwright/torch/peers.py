"""Batches of the tensor axis: where its ranks have samples of their own, a step is over those of all of them."""

import torch
import torch.distributed as dist

from shardwright.backends.torch.agreement import compare_over
from shardwright.backends.torch.mesh import BoundMesh
from shardwright.backends.torch.transfer import as_carried
from shardwright.backends.torch.watch import Watch
from shardwright.core.errors import ShardwrightError


def of_all_peers(tensor: torch.Tensor, axis: int, name: str, bound: BoundMesh, watch: Watch) -> torch.Tensor:
    """The samples of all tensor-parallel peers, in order of their coordinate, joined along ``axis``.

    Every rank of the tensor axis calls this. Raises ShardwrightError when peers give different shapes.
    """
    peers = bound.groups["tp"]
    sizes = {f"size {dim}": size for dim, size in enumerate(tensor.shape)}
    different = compare_over("tp", {"dims": tensor.dim(), **sizes}, bound, watch)
    if different:
        raise ShardwrightError(
            f"tensor-parallel peers, ranks {list(peers)}, give {name!r} different shapes ({tuple(tensor.shape)} here): "
            f"with prescaled_batch=False every rank passes as many samples, of the same size"
        )
    mine = tensor.contiguous()
    pieces = [torch.empty_like(mine) for _ in peers]
    with watch.waiting(f"the batches of tp peers, ranks {list(peers)}"):
        dist.all_gather([as_carried(p) for p in pieces], as_carried(mine), group=bound.handles["tp"])
    return torch.cat(pieces, axis)
