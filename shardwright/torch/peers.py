"""Batches of the tensor axis. Where its ranks have samples of their own, a step is over the samples of all of them, and
each rank gets the results of its own."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.pipeline_messages import as_carried
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.pipeline.step_results import Returned


def of_all_peers(tensor: torch.Tensor, axis: int, bound: BoundMesh, watchdog: Watchdog) -> torch.Tensor:
    """The samples of all tensor-parallel peers, in order of their coordinate, joined along ``axis``.

    Every rank of the tensor axis calls this, with a tensor of the same shape.
    """
    return torch.cat(of_each_peer(tensor, bound, watchdog), axis)


def of_each_peer(tensor: torch.Tensor, bound: BoundMesh, watchdog: Watchdog) -> list[torch.Tensor]:
    """The tensors of all tensor-parallel peers, in order of their coordinate.

    Every rank of the tensor axis calls this, with a tensor of the same shape.
    """
    peers = bound.groups["tp"]
    mine = tensor.contiguous()
    pieces = [torch.empty_like(mine) for _ in peers]
    with watchdog.waiting(f"the batches of tp peers, ranks {list(peers)}"):
        dist.all_gather([as_carried(p) for p in pieces], as_carried(mine), group=bound.handles["tp"])
    return pieces


def together(turns: Sequence[Returned], own: int) -> Returned:
    """One result of a step that was run for each peer: this rank's own, with the values of all for reductions over
    them."""
    found, everywhere = turns[own], [turn.everywhere for turn in turns]
    if any(values is None for values in everywhere):
        return found
    weights = [turn.weights for turn in turns]
    if all(one is None for one in weights):
        joined = None
    else:
        counts = zip(weights, everywhere, strict=True)
        joined = torch.cat([torch.ones(len(e)) if w is None else w.cpu() for w, e in counts if e is not None])
    values = [one for one in everywhere if one is not None]
    first = sum(len(one) for one in values[:own]) + found.first
    return replace(found, everywhere=torch.cat(values), weights=joined, first=first)


def of_this_rank(outputs: Sequence[torch.Tensor], samples: Sequence[int], bound: BoundMesh) -> list[torch.Tensor]:
    """The results for this rank's samples of a step over the samples of all tensor-parallel peers.

    Args:
        outputs: of the microbatches, in order. Where dim 0 counts samples, or as many entries for each of them, this
            rank keeps its own, in as many parts as there are microbatches; anything else, a loss say, is of all
            samples and stays.
        samples: of each microbatch.
    """
    each = {out.shape[0] / count if out.dim() else 0.0 for out, count in zip(outputs, samples, strict=True)}
    entries = next(iter(each))
    if len(each) > 1 or entries < 1 or entries != int(entries):
        return list(outputs)
    own = torch.cat(list(outputs)).chunk(bound.size("tp"))[bound.coordinate("tp")]
    rows = own.shape[0] // int(entries)
    count = min(len(outputs), rows)
    sizes = [int(entries) * (rows // count + (m < rows % count)) for m in range(count)]
    return list(own.split(sizes))
