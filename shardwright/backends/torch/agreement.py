"""What peers must have alike: each tells a number, and all see whose differs."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.backends.torch.mesh import BoundMesh
from shardwright.backends.torch.transfer import as_carried
from shardwright.backends.torch.watch import Watch
from shardwright.core.errors import ShardwrightError


def require_same_inputs(
    model: nn.Module, batch: Sequence[torch.Tensor], seed: int, bound: BoundMesh, watch: Watch
) -> None:
    """Raise ShardwrightError, naming the ranks, unless all pp and tp peers have this model and this seed, and were
    given this batch.

    Of a model the names and dtypes of its parameters count, of a batch everything.
    """
    names = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        names.update(f"{name} {parameter.dtype};".encode())
    text = hashlib.blake2b(digest_size=8)
    for tensor in batch:
        text.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        if tensor.numel():
            text.update(as_carried(tensor.detach().cpu()).reshape(-1).view(torch.uint8).numpy().tobytes())
    for axis, what in (("pp", "pipeline"), ("tp", "tensor-parallel")):
        own = {"model": signed(names), "batch": signed(text), "seed": seed}
        found = compare_over(axis, own, bound, watch)
        first = bound.peer(axis, 0)
        if different := found.get("model"):
            raise ShardwrightError(
                f"the ranks {first} and {', '.join(map(str, different))} are {what} peers and hold different models: "
                f"the names or dtypes of parameters differ; every rank builds the same model and wraps it"
            )
        if different := found.get("seed"):
            raise ShardwrightError(
                f"the ranks {first} and {', '.join(map(str, different))} are {what} peers and have different seeds "
                f"({seed} here), by which they would draw parts of different dropout masks: call sw.set_seed, or pass "
                f"seed to sw.init, with the same number on all of them"
            )
        if different := found.get("batch"):
            raise ShardwrightError(
                f"the ranks {first} and {', '.join(map(str, different))} are {what} peers and were given different "
                f"batches: each rank passes the batch of its dp coordinate (here {bound.coordinate('dp')}), the same "
                f"on all its {axis} peers; sw.sampler(dataset) does that"
            )


def compare_over(axis: str, numbers: Mapping[str, int], bound: BoundMesh, watch: Watch) -> dict[str, list[int]]:
    """For each name the ranks among the peers on an axis whose number differs from that of the peer at coordinate 0."""
    if bound.size(axis) == 1 or not numbers:
        return {}
    own = torch.tensor(list(numbers.values()), dtype=torch.int64, device=bound.device)
    every = [torch.empty_like(own) for _ in range(bound.size(axis))]
    with watch.waiting(f"{axis} peers, ranks {list(bound.groups[axis])}, to compare what they were given"):
        work = dist.all_gather(every, own, group=bound.handles[axis], async_op=True)
        if work is not None:
            work.wait(timedelta(seconds=watch.timeout_s))
    table = torch.stack(every).tolist()
    return {
        name: [bound.peer(axis, c) for c, row in enumerate(table) if row[column] != table[0][column]]
        for column, name in enumerate(numbers)
        if any(row[column] != table[0][column] for row in table)
    }


def signed(digest: Any) -> int:
    """A digest of eight bytes as a number that an int64 tensor can hold."""
    return int.from_bytes(digest.digest(), "big", signed=True)
