"""The collectives that a profile times, by kind, ranks and bytes, as the tensor axis and pipelines call them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.core.cluster.hardware.collective_table import CollectiveKind, MeasuredCollective

MESSAGES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
"""The sizes in bytes of what is measured: one rank's whole tensor."""
CUDA_MESSAGES = (*MESSAGES, 1 << 26, 1 << 28)
"""The sizes on GPUs, whose links are not filled before."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class CollectiveRun:
    """A collective that all ranks take part in at once, in groups of ``ranks`` neighbours.

    prepare: makes the tensors, and gives the function that runs it once. Of messages that is one there and one back.
    """

    kind: CollectiveKind
    ranks: int
    size_bytes: int
    prepare: Callable[[], Call]

    def measured(self, seconds: float) -> MeasuredCollective:
        """The value of a measurement in which one run took ``seconds``."""
        one_s = seconds / 2 if self.kind == "send" else seconds
        return MeasuredCollective(self.kind, self.ranks, self.size_bytes, one_s)


def collective_runs(device: torch.device) -> tuple[CollectiveRun, ...]:
    """The runs over the default process group, and over groups of every number of ranks that divides it. All ranks call
    this, and then each run, together and equally often."""
    world, found = dist.get_world_size(), []
    sizes = CUDA_MESSAGES if device.type == "cuda" else MESSAGES
    for ranks in (ranks for ranks in range(2, world + 1) if world % ranks == 0):
        peers = [list(range(first, first + ranks)) for first in range(0, world, ranks)]
        groups = [dist.new_group(members) for members in peers]
        mine = dist.get_rank() // ranks
        for size in sizes:
            shard = size // 4 // ranks
            kinds: tuple[tuple[CollectiveKind, Callable[..., Call]], ...] = (
                ("all_reduce", _all_reduce),
                ("all_gather", _all_gather),
                ("reduce_scatter", _reduce_scatter),
            )
            for kind, prepare in kinds:
                prepared = partial(prepare, groups[mine], ranks, shard, device)
                found.append(CollectiveRun(kind, ranks, shard * ranks * 4, prepared))
            if ranks == 2:
                found.append(CollectiveRun("send", 2, size, partial(_message, peers[mine], size, device)))
    return tuple(found)


def _all_reduce(group: ProcessGroup, ranks: int, shard: int, device: torch.device) -> Call:
    tensor = torch.ones(ranks * shard, device=device)
    return lambda: dist.all_reduce(tensor, group=group)


def _all_gather(group: ProcessGroup, ranks: int, shard: int, device: torch.device) -> Call:
    own, every = torch.ones(shard, device=device), list(torch.ones(ranks, shard, device=device).unbind(0))
    return lambda: dist.all_gather(every, own, group=group)


def _reduce_scatter(group: ProcessGroup, ranks: int, shard: int, device: torch.device) -> Call:
    own, every = torch.ones(shard, device=device), list(torch.ones(ranks, shard, device=device).unbind(0))
    return lambda: dist.reduce_scatter(own, every, group=group)


def _message(pair: list[int], size_bytes: int, device: torch.device) -> Call:
    """A message from the first of two ranks to the second, and one back."""
    tensor, (first, second) = torch.ones(size_bytes // 4, device=device), pair

    def there_and_back() -> None:
        for source, target in ((first, second), (second, first)):
            if dist.get_rank() == source:
                dist.send(tensor, target)
            else:
                dist.recv(tensor, source)

    return there_and_back
