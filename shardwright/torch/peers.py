"""Batches of the tensor axis. Where its ranks have samples of their own, a step is over the samples of all of them,
and each rank gets the results of its own."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.pipeline_messages import as_carried
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.pipeline.step_results import Returned, even_split
from shardwright.core.errors import ShardwrightError
from shardwright.core.model.loss import Place
from shardwright.torch.session import Session


def have_own_batches(session: Session) -> bool:
    """Whether the ranks of the tensor axis are given batches of their own."""
    return session.bound.size("tp") > 1 and not session.config.prescaled_batch


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


def own_samples(gradients: Sequence[torch.Tensor], axis: int, bound: BoundMesh) -> torch.Tensor:
    """This rank's part of microbatches along the axis along which `of_all_peers` joined their samples."""
    return torch.cat(list(gradients), axis).chunk(bound.size("tp"), axis)[bound.coordinate("tp")]


def own_entries(
    outputs: Sequence[torch.Tensor], samples: Sequence[int], place: Place, bound: BoundMesh
) -> list[torch.Tensor]:
    """The entries of this rank's samples in a result of a step over the samples of all tensor-parallel peers, in as
    many parts as there are microbatches.

    Args:
        outputs: of the microbatches, in order.
        samples: of each microbatch.
        place: of the samples in each of them.

    Raises ShardwrightError for outputs whose sizes are not those of their samples.
    """
    dim = place.dim
    parts = []
    for output, count in zip(outputs, samples, strict=True):
        if output.shape[dim] != place.outer * count * place.inner:
            raise ShardwrightError(
                f"the step returned a tensor of shape {tuple(output.shape)} for {count} samples of the ranks of the "
                f"tensor axis, and dim {dim} was expected to have {place.outer * place.inner} entries for each of them"
            )
        parts.append(output.unflatten(dim, (place.outer, count, place.inner)))
    own = own_samples(parts, dim + 1, bound)
    rows = own.shape[dim + 1]
    return [part.flatten(dim, dim + 2) for part in own.split(even_split(rows, min(len(outputs), rows)), dim + 1)]
