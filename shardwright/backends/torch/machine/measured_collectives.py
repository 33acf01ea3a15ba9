"""The collectives that a profile times, by kind, ranks and bytes, as the runtime calls them.

Sums of whole tensors and messages go through the process group. Shards are gathered and summed as the data axis does
it: through the process group on GPUs, and between CPU ranks of one host by reading each other's memory, where they may.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.backends.torch.machine.cross_memory import CrossMemory
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.core.cluster.hardware.collective_table import CollectiveKind, MeasuredCollective

MESSAGES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
"""The sizes in bytes of what is measured: one rank's whole tensor."""
CUDA_MESSAGES = (*MESSAGES, 1 << 26, 1 << 28)
"""The sizes on GPUs, whose links are not filled before."""
LONGEST_S = 120.0
"""Seconds after which a rank that waits for the others gives up."""

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


def run_count(ranks: int, device: torch.device) -> int:
    """The number of runs that `collective_runs` gives on so many ranks."""
    kinds = sum(3 + (degree == 2) for degree in _degrees(ranks))
    return kinds * len(_sizes(device))


@contextmanager
def collective_runs(device: torch.device) -> Iterator[tuple[CollectiveRun, ...]]:
    """The runs over the default process group, and over groups of every number of ranks that divides it. All ranks
    enter this, and then each run, together and equally often."""
    world, found, opened = dist.get_world_size(), [], []
    for ranks in _degrees(world):
        peers = [list(range(first, first + ranks)) for first in range(0, world, ranks)]
        groups = [dist.new_group(members) for members in peers]
        number, place = divmod(dist.get_rank(), ranks)
        group, memory = groups[number], None
        if device.type == "cpu":
            memory = CrossMemory.bind(place, group, Watchdog("this rank, measuring", LONGEST_S))
            opened.append(memory)
        kinds: tuple[tuple[CollectiveKind, Callable[[int], Call]], ...] = (
            ("all_reduce", partial(_all_reduce, group, ranks, device)),
            ("all_gather", partial(_all_gather, group, memory, place, ranks, device)),
            ("reduce_scatter", partial(_reduce_scatter, group, memory, ranks, device)),
        )
        for size in _sizes(device):
            shard = size // 4 // ranks
            found += [CollectiveRun(kind, ranks, shard * ranks * 4, partial(make, shard)) for kind, make in kinds]
            if ranks == 2:
                found.append(CollectiveRun("send", 2, size, partial(_message, peers[number], size, device)))
    try:
        yield tuple(found)
    finally:
        for each in opened:
            if each is not None:
                each.close()


def _degrees(world: int) -> list[int]:
    return [ranks for ranks in range(2, world + 1) if world % ranks == 0]


def _sizes(device: torch.device) -> tuple[int, ...]:
    return CUDA_MESSAGES if device.type == "cuda" else MESSAGES


def _all_reduce(group: ProcessGroup, ranks: int, device: torch.device, shard: int) -> Call:
    tensor = torch.ones(ranks * shard, device=device)
    return lambda: dist.all_reduce(tensor, group=group)


def _all_gather(
    group: ProcessGroup, memory: CrossMemory | None, place: int, ranks: int, device: torch.device, shard: int
) -> Call:
    every = list(torch.ones(ranks, shard, device=device).unbind(0))
    if memory is None:
        own = torch.ones(shard, device=device)
        return lambda: dist.all_gather(every, own, group=group)
    numbers = count()

    def read() -> None:
        memory.begin_gather(every, every[place], next(numbers))()
        memory.settle()

    return read


def _reduce_scatter(
    group: ProcessGroup, memory: CrossMemory | None, ranks: int, device: torch.device, shard: int
) -> Call:
    whole = torch.ones(ranks * shard, device=device)
    every = list(whole.view(ranks, shard).unbind(0))
    if memory is None:
        own = torch.ones(shard, device=device)
        return lambda: dist.reduce_scatter(own, every, group=group)
    numbers = count()
    return lambda: memory.begin_scatter(whole, every, next(numbers))()


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
