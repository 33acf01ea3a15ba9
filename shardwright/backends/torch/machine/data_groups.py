"""The ranks of the data axis that share the shards of parameters, and the sums and gathers over them."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from shardwright.backends.torch.compat import all_gather_single, reduce_scatter_single
from shardwright.backends.torch.machine.cross_memory import CrossMemory
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.machine.mesh import BoundMesh, process_group
from shardwright.backends.torch.machine.node_stages import NodeGrid, StagedCollectives, StagedMessages, StageGroups
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.core.errors import MissingCapabilityError

_FIRST_TAG, _TAGS_OF_A_STEP, _STEPS = 25_000, 4096, 100_000


class Tags:
    """The tags of messages between the ranks of a shard group: by step, so that what a step that failed has sent is
    never taken for a message of a later one; and by what is sent, so that ranks that send in another order wait for
    each other, and take nothing for something else.

    Attributes:
        under_way: the messages of this step. They are kept while it lasts, as are those of a step that failed: torch
            waits for a message that is let go.
        stages: what sends more of them, where groups gather and sum in stages.
    """

    def __init__(self) -> None:
        self.under_way: list[Work | None] = []
        self.stages: StagedMessages | StagedCollectives | None = None
        self._step = 0

    def begin(self, *, failed: bool = False) -> None:
        """Begin a step; every rank calls this. ``failed``: the messages of the one before may never arrive."""
        if failed:
            _LOST.extend(self.under_way)
            _LOST.extend(self.stages.abandon() if self.stages is not None else ())
        self.under_way = []
        self._step = (self._step + 1) % _STEPS

    def of(self, number: int, *, is_sum: bool) -> int:
        """The tag of the sums, or of the shards, of a group of parameters."""
        return _FIRST_TAG + self._step * _TAGS_OF_A_STEP + 2 * (number % (_TAGS_OF_A_STEP // 2)) + is_sum


_LOST: list[Any] = []
"""The messages of steps that failed."""


@dataclass(frozen=True, slots=True)
class DataGroups:
    """This rank's place among the replicas.

    Attributes:
        ways: the number of ranks that share the shards.
        coordinate: the number of this rank among them, and of its shard.
        group: their process group; None where there is one rank.
        gathers: another of the same ranks, for gathers: their order among the sums is not that of every rank.
        ranks: their global ranks.
        replicas: the process group of the ranks with the same shard, one in each group; None where there is one group.
        replica_ranks: their global ranks.
        memory: sums and gathers over ``group`` by reading memory; None where ranks cannot.
        replica_memory: the same over ``replicas``.
        stages: gathers and sums between nodes and within each; None where they go over all ranks of the group at once.
    """

    ways: int
    coordinate: int
    group: ProcessGroup | None
    gathers: ProcessGroup | None
    ranks: tuple[int, ...]
    replicas: ProcessGroup | None
    replica_ranks: tuple[int, ...]
    stages: StagedMessages | StagedCollectives | None = None
    tags: "Tags" = field(default_factory=lambda: Tags())
    memory: CrossMemory | None = None
    replica_memory: CrossMemory | None = None

    @classmethod
    def bind(cls, bound: BoundMesh, ways: int, watchdog: Watchdog, hierarchical: bool = False) -> "DataGroups":
        """The groups of ``ways`` neighbours each on the data axis. Every rank calls this at the same time.
        ``hierarchical``: whether a group that has several ranks on each of several nodes gathers and sums in stages."""
        found: DataGroups | None = None
        uneven: list[tuple[int, ...]] = []
        for ranks in bound.mesh.groups("dp"):
            groups = [ranks[first : first + ways] for first in range(0, len(ranks), ways)]
            handles = [process_group(group) if ways > 1 else None for group in groups]
            use = "" if bound.device.type == "cpu" else "gathers"  # messages are matched by tags there
            gathers = [process_group(group, use) if ways > 1 else None for group in groups]
            shards = [ranks[first::ways] for first in range(ways)]
            replicas = [process_group(ranks) if len(groups) > 1 else None for ranks in shards]
            staged = [
                _staged(bound, group, handle) for group, handle in zip(groups, handles, strict=True) if hierarchical
            ]
            uneven += [group for group in groups if hierarchical and _is_uneven(bound, group)]
            if bound.rank in ranks:
                number, coordinate = divmod(ranks.index(bound.rank), ways)
                of_group = handles[number], gathers[number], groups[number]
                found = cls(ways, coordinate, *of_group, replicas[coordinate], shards[coordinate])
                if hierarchical and staged[number] is not None:
                    found = replace(found, stages=staged[number])
                    found.tags.stages = staged[number]
        assert found is not None
        if uneven and bound.rank == 0:
            warnings.warn(
                f"ranks {list(uneven[0])} share state and lie on nodes {[bound.nodes[rank] for rank in uneven[0]]}: "
                f"each gathers from all the others at once, which sends the same bytes to a node several times. Start "
                f"as many neighbouring ranks on every node, so that they gather between the nodes and then within each",
                stacklevel=2,
            )
        if bound.device.type == "cpu":
            return found._reading_peers(watchdog) if bound.reads_peers else found
        if found.group is not None:
            require_reduce_scatter(found.group, bound.device)
        return found

    def _reading_peers(self, watchdog: Watchdog) -> "DataGroups":
        """The same, where ranks of one host read each other's memory."""
        memory = None
        if self.group is not None and self.stages is None:
            memory = CrossMemory.bind(self.coordinate, self.group, watchdog)
        if self.replicas is None:
            return replace(self, memory=memory)
        number = self.replica_ranks.index(dist.get_rank())
        return replace(self, memory=memory, replica_memory=CrossMemory.bind(number, self.replicas, watchdog))

    def have_alike(self, text: str, device: torch.device, watchdog: Watchdog) -> bool:
        """Whether all replicas give the same text; every rank calls this at the same time."""
        own = digest_of(text) >> 1
        ends = torch.tensor([own, -own], dtype=torch.int64)
        if self.ways > 1 or self.replicas is not None:
            with watchdog.waiting(self.said()):
                ends = self.begin(ends.to(device), dist.ReduceOp.MAX)().cpu()
        return int(ends[0]) == -int(ends[1])

    def said(self) -> str:
        """The ranks that this one waits for, in words."""
        more = f" and of ranks {list(self.replica_ranks)}" if self.replicas is not None else ""
        return f"dp peers, ranks {list(self.ranks)}{more}"

    def gather(
        self, whole: torch.Tensor, shard: torch.Tensor, number: int, borders: Sequence[int]
    ) -> Callable[[], None]:
        """Begin to fill ``whole`` with the shards of all ranks; the result waits for the end. ``number`` is that of the
        group of parameters, ``borders`` the first entry of every shard and the end of the last, as in `sum_shards`."""
        parts, own = _parts(whole, borders), real_entries(shard)
        is_even = len({part.numel() for part in parts}) == 1
        if is_even and isinstance(self.stages, StagedCollectives):
            return self.stages.gather(real_entries(whole).view(self.ways, -1), own)
        if is_even and self.ways > 1 and whole.device.type != "cpu":
            work = all_gather_single(real_entries(whole), own, group=self.gathers, async_op=True)
            return partial(self._finish, [work])
        if parts[self.coordinate].data_ptr() != own.data_ptr():
            parts[self.coordinate].copy_(own)
        if self.ways == 1:
            return partial(self._finish, [])
        if isinstance(self.stages, StagedMessages):
            return self.stages.gather(parts, self.tags.of(number, is_sum=False))
        if whole.device.type != "cpu":
            return partial(self._finish, self._broadcasts(parts))
        if self.memory is not None:
            return self.memory.begin_gather(parts, own, self.tags.of(number, is_sum=False))
        sent = [parts[self.coordinate]] * self.ways
        return partial(self._finish, self._exchange(sent, parts, self.tags.of(number, is_sum=False)))

    def begin(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Callable[[], torch.Tensor]:
        """Begin to reduce a tensor over all replicas, in place; the result waits, and gives it."""
        given = real_entries(tensor)
        begun = self._begin_reduction(given, op, self.group, self.memory)

        def wait() -> torch.Tensor:
            begun()
            self._begin_reduction(given, op, self.replicas, self.replica_memory)()
            return tensor

        return wait

    def _begin_reduction(
        self, given: torch.Tensor, op: Any, group: ProcessGroup | None, memory: CrossMemory | None
    ) -> Callable[[], None]:
        if memory is not None:
            return memory.begin_sum(given, op)
        works = [] if group is None else [dist.all_reduce(given, op=op, group=group, async_op=True)]
        return partial(self._finish, works)

    def sum_shards(self, flat: torch.Tensor, number: int, borders: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Begin the sum of a flat buffer over the group; the result waits, and gives this rank's shard of the sum over
        all replicas, which keeps no other memory alive. The buffer is this function's from now on."""
        begun = self._begin_sum(flat, number, borders)

        def wait() -> torch.Tensor:
            shard = begun()
            self._begin_reduction(shard, dist.ReduceOp.SUM, self.replicas, self.replica_memory)()
            return torch.view_as_complex(shard.view(-1, 2)) if flat.is_complex() else shard

        return wait

    def _begin_sum(self, flat: torch.Tensor, number: int, borders: Sequence[int]) -> Callable[[], torch.Tensor]:
        """As `sum_shards`, over the group alone, with complex entries as pairs of real ones."""
        parts = _parts(flat, borders)
        if self.ways == 1:
            return lambda: parts[0]
        is_even = len({part.numel() for part in parts}) == 1
        if is_even and isinstance(self.stages, StagedCollectives):
            return self.stages.sum(real_entries(flat).view(self.ways, -1))
        if isinstance(self.stages, StagedMessages):
            return self.stages.sum(parts, self.tags.of(number, is_sum=True))
        if flat.device.type != "cpu":
            shard = torch.empty_like(parts[0]) if is_even else parts[self.coordinate]
            works = [self._scatter(shard, flat)] if is_even else self._reduces(parts)

            def wait_scattered() -> torch.Tensor:
                self._finish(works)
                return shard

            return wait_scattered
        if self.memory is not None:
            return self.memory.begin_scatter(real_entries(flat), parts, self.tags.of(number, is_sum=True))
        # Gloo has no reduce-scatter of its own: it sums everything on every rank. Each rank is sent its shards, and
        # sums them in the order of ranks.
        received = [part if r == self.coordinate else torch.empty_like(parts[self.coordinate])
                    for r, part in enumerate(parts)]  # fmt: skip
        works = self._exchange(parts, received, self.tags.of(number, is_sum=True))

        def wait() -> torch.Tensor:
            self._finish(works)
            if self.coordinate:
                total, *others = received
            else:  # into memory apart from the buffer, which is then free
                first, total, *others = received
                total.add_(first)
            for part in others:
                total.add_(part)
            return total

        return wait

    @property
    def read_bytes(self) -> int:
        """The bytes that this rank has read from the memory of others so far."""
        return sum(memory.read_bytes for memory in (self.memory, self.replica_memory) if memory is not None)

    def settle(self) -> None:
        """Wait until the other ranks have what they gather of this one, which may change from now on."""
        if self.memory is not None:
            self.memory.settle()

    def close(self) -> None:
        """Nothing is summed or gathered afterwards."""
        for memory in (self.memory, self.replica_memory):
            if memory is not None:
                memory.close()

    def _scatter(self, shard: torch.Tensor, flat: torch.Tensor) -> Work | None:
        given = shard, real_entries(flat)
        work: Work | None = reduce_scatter_single(*given, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
        return work

    def _broadcasts(self, parts: Sequence[torch.Tensor]) -> list[Work | None]:
        """Begin to send unequal shards, each from its rank to all."""
        by_rank = [(rank, part) for rank, part in zip(self.ranks, parts, strict=True) if part.numel()]
        return [dist.broadcast(part, rank, group=self.gathers, async_op=True) for rank, part in by_rank]

    def _reduces(self, parts: Sequence[torch.Tensor]) -> list[Work | None]:
        """Begin to sum unequal shards, each on its rank."""
        by_rank = [(rank, part) for rank, part in zip(self.ranks, parts, strict=True) if part.numel()]
        return [dist.reduce(p, rank, op=dist.ReduceOp.SUM, group=self.group, async_op=True) for rank, p in by_rank]

    def _exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], tag: int) -> list[Work | None]:
        """Begin to send one tensor to every other rank of the group, and to receive one from each; none is sent that is
        empty."""
        works: list[Work | None] = []
        for other, rank in enumerate(self.ranks):
            if other != self.coordinate and received[other].numel():
                works.append(dist.irecv(received[other], rank, group=self.group, tag=tag))
            if other != self.coordinate and sent[other].numel():
                works.append(dist.isend(sent[other], rank, group=self.group, tag=tag))
        self.tags.under_way += works
        return works

    def _finish(self, works: Sequence[Work | None]) -> None:
        """Wait for messages, and let them and their tensors go."""
        for work in works:
            if work is not None:
                work.wait()
        done = {id(work) for work in works}
        self.tags.under_way = [work for work in self.tags.under_way if id(work) not in done]


def _staged(
    bound: BoundMesh, ranks: tuple[int, ...], group: ProcessGroup | None
) -> StagedMessages | StagedCollectives | None:
    """What gathers and sums over the ranks of a shard group in stages; None where they are no grid of nodes and places,
    or this rank is none of them. Every rank calls this."""
    nodes = [bound.nodes[rank] for rank in ranks] if bound.nodes else [0] * len(ranks)
    place = ranks.index(bound.rank) if bound.rank in ranks else 0
    grid = NodeGrid.of(nodes, place)
    if grid is None:
        return None
    if bound.device.type == "cpu":
        return StagedMessages(grid, ranks, group) if bound.rank in ranks and group is not None else None
    gathers, sums = (_stage_groups(grid, ranks, use) for use in ("gathers", "sums"))
    if gathers is None or sums is None:
        return None
    return StagedCollectives(grid, gathers, sums, bound.device)


def _stage_groups(grid: NodeGrid, ranks: tuple[int, ...], use: str) -> StageGroups | None:
    """The process groups of this rank's node and place; None where it is none of the ranks."""
    rows = [process_group(tuple(ranks[i] for i in row), f"{use}, beside") for row in grid.rows()]
    columns = [process_group(tuple(ranks[i] for i in column), f"{use}, across") for column in grid.columns()]
    beside, across = next(filter(None, rows), None), next(filter(None, columns), None)
    return None if beside is None or across is None else StageGroups(beside, across)


def _is_uneven(bound: BoundMesh, ranks: tuple[int, ...]) -> bool:
    """Whether some node holds several of these ranks, which lie on several, and they are no grid."""
    nodes = [bound.nodes[rank] for rank in ranks] if bound.nodes else [0] * len(ranks)
    return 1 < len(set(nodes)) < len(nodes) and NodeGrid.of(nodes, 0) is None


def require_reduce_scatter(group: ProcessGroup, device: torch.device) -> None:
    """Raise MissingCapabilityError where the backend of a group has no reduce-scatter. Every rank of it calls this."""
    try:
        ways = dist.get_world_size(group)
        given = torch.zeros(ways, device=device)
        reduce_scatter_single(torch.zeros(1, device=device), given, op=dist.ReduceOp.SUM, group=group)
    except (RuntimeError, NotImplementedError) as error:
        raise MissingCapabilityError(
            f"the process group of backend {dist.get_backend(group)!r} has no reduce-scatter for {device.type} "
            f"tensors, by which replicas sum their gradients ({str(error).splitlines()[0]}): use "
            f"ddp_dist_backend='nccl', or call sw.init without a process group of your own"
        ) from error


def real_entries(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor as collectives take it: complex entries as pairs of real ones."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _parts(tensor: torch.Tensor, borders: Sequence[int]) -> list[torch.Tensor]:
    """The shards of a flat tensor, as collectives take them."""
    entries = real_entries(tensor)
    each = entries.numel() // max(1, tensor.numel())
    return [entries[each * first : each * end] for first, end in pairwise(borders)]
