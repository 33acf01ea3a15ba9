"""The ranks of the data axis that share the shards of parameters, and the sums and gathers over them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.backends.torch.compat import all_gather_single, reduce_scatter_single
from shardwright.backends.torch.machine.mesh import BoundMesh, process_group
from shardwright.backends.torch.machine.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class DataGroups:
    """This rank's place among the replicas.

    Attributes:
        ways: the number of ranks that share the shards.
        coordinate: the number of this rank among them, and of its shard.
        group: their process group; None where there is one rank.
        ranks: their global ranks.
        replicas: the process group of the ranks with the same shard, one in each group; None where there is one group.
        replica_ranks: their global ranks.
    """

    ways: int
    coordinate: int
    group: ProcessGroup | None
    ranks: tuple[int, ...]
    replicas: ProcessGroup | None
    replica_ranks: tuple[int, ...]

    @classmethod
    def bind(cls, bound: BoundMesh, ways: int) -> "DataGroups":
        """The groups of ``ways`` neighbours each on the data axis. Every rank calls this at the same time."""
        found: DataGroups | None = None
        for ranks in bound.mesh.groups("dp"):
            groups = [ranks[first : first + ways] for first in range(0, len(ranks), ways)]
            handles = [process_group(group) if ways > 1 else None for group in groups]
            shards = [ranks[first::ways] for first in range(ways)]
            replicas = [process_group(ranks) if len(groups) > 1 else None for ranks in shards]
            if bound.rank in ranks:
                number, coordinate = divmod(ranks.index(bound.rank), ways)
                found = cls(ways, coordinate, handles[number], groups[number], replicas[coordinate], shards[coordinate])
        assert found is not None
        return found

    def said(self) -> str:
        """The ranks that this one waits for, in words."""
        more = f" and of ranks {list(self.replica_ranks)}" if self.replicas is not None else ""
        return f"dp peers, ranks {list(self.ranks)}{more}"

    def gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Callable[[], None]:
        """Begin to fill ``whole`` with the shards of all ranks; the result waits for the end."""
        if self.ways == 1:
            if whole.data_ptr() != shard.data_ptr():
                whole.copy_(shard)
            return lambda: None
        work = all_gather_single(_real(whole), _real(shard), group=self.group, async_op=True)

        def wait() -> None:
            if work is not None:
                work.wait()

        return wait

    def sum_shards(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin the sum of a flat buffer over the group; the result waits, and gives this rank's shard of the sum over
        all replicas."""
        begun = self._begin_sum(flat)

        def wait() -> torch.Tensor:
            shard = begun()
            if self.replicas is not None:
                dist.all_reduce(_real(shard), op=dist.ReduceOp.SUM, group=self.replicas)
            return shard

        return wait

    def _begin_sum(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        shape = self.ways, flat.numel() // self.ways
        if self.ways == 1:
            return lambda: flat
        if flat.device.type == "cpu":
            # Gloo has no reduce-scatter of its own: it sums everything on every rank. Each rank is sent its shards, and
            # sums them in the order of ranks.
            received = torch.empty_like(flat)
            work = dist.all_to_all_single(_real(received), _real(flat), group=self.group, async_op=True)

            def wait() -> torch.Tensor:
                if work is not None:
                    work.wait()
                return received.view(shape).sum(0)

            return wait
        shard = flat.new_empty(shape[1])
        scattered = reduce_scatter_single(
            _real(shard), _real(flat), op=dist.ReduceOp.SUM, group=self.group, async_op=True
        )

        def wait_scattered() -> torch.Tensor:
            if scattered is not None:
                scattered.wait()
            return shard

        return wait_scattered

    def any(self, flags: torch.Tensor, watchdog: Watchdog) -> torch.Tensor:
        """The largest of every flag over all replicas."""
        with watchdog.waiting(self.said()):
            for group in (self.group, self.replicas):
                if group is not None:
                    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        return flags


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor as collectives take it: complex entries as pairs of real ones."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
