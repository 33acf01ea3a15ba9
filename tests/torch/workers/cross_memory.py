"""Checks of sums and gathers by reading memory, on three ranks in one launch.

Prints `ok NAME` for each; a failure ends the launch.
"""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from launched import run_checks

from shardwright.backends.torch.machine import process_memory
from shardwright.backends.torch.machine.cross_memory import CHUNK_BYTES, CrossMemory
from shardwright.backends.torch.machine.data_groups import DataGroups
from shardwright.backends.torch.machine.mesh import bind
from shardwright.backends.torch.machine.watchdog import PeerError, Watchdog
from shardwright.core.layout.mesh import Mesh
from tests.comparison import Comparison

WAYS = 3
SIZES = (0, 1, 2, 7, 1000, 3 * CHUNK_BYTES // 4 + 5)


def opened(timeout_s: float = 60.0) -> CrossMemory | None:
    group = dist.group.WORLD
    assert group is not None
    return CrossMemory.bind(dist.get_rank(), group, Watchdog(f"rank {dist.get_rank()}", timeout_s))


def opened_here() -> CrossMemory:
    found = opened()
    assert found is not None
    return found


def entries(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1000 * seed + rank)
    whole = torch.randint(-1000, 1000, (size,), generator=drawn)
    return whole.to(dtype) / 700 if dtype.is_floating_point else whole.to(dtype)


def is_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """But for the order of sums in float32."""
    Comparison().values(found, wanted, relative=1e-6, absolute=1e-5).require()


def sums_are_those_of_all_ranks_to_the_bit() -> None:
    memory, me = opened_here(), dist.get_rank()
    kinds = [(torch.float32, dist.ReduceOp.SUM), (torch.float64, dist.ReduceOp.SUM), (torch.int64, dist.ReduceOp.MAX),
             (torch.bfloat16, dist.ReduceOp.SUM), (torch.float32, dist.ReduceOp.MAX)]  # fmt: skip
    for size, (dtype, op) in itertools.product(SIZES, kinds):
        own = entries(me, size, dtype)
        every = torch.stack([entries(rank, size, dtype) for rank in range(WAYS)])
        expected = every.amax(0) if op == dist.ReduceOp.MAX else every.double().sum(0)
        before = memory.read_bytes
        memory.begin_sum(own, op)()
        near = 1e-2 if dtype is torch.bfloat16 else 1e-6
        if size:
            Comparison().values(own.double(), expected.double(), relative=near, absolute=3 * near).require()
        others = [torch.empty_like(own) for _ in range(WAYS)]
        dist.all_gather(others, own)
        assert all(torch.equal(other, own) for other in others), "ranks have other bits"
        if size % WAYS == 0:  # as a ring sends
            assert memory.read_bytes - before == 2 * own.nbytes * (WAYS - 1) // WAYS
    memory.close()


def not_a_number_reaches_every_rank() -> None:
    memory, me = opened_here(), dist.get_rank()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        own = torch.zeros(10)
        if me == 1:
            own[0] = own[9] = float("nan")
        memory.begin_sum(own, op)()
        assert own.isnan().tolist() == [True] + [False] * 8 + [True]
    memory.close()


def waits_may_come_in_any_order() -> None:
    """Sums, gathers and scattered sums under way together, waited for in another order on every rank."""
    memory, me = opened_here(), dist.get_rank()
    drawn = random.Random(me)
    for trial in range(30):
        sums = [entries(me, 50 + number, torch.float32, number) for number in range(4)]
        scattered = [entries(me, WAYS * 11, torch.float32, 10 + number) for number in range(3)]
        gathered = [torch.full((WAYS, 5), -1.0) for _ in range(3)]
        shards = [torch.full((5,), 100.0 * number + me + trial) for number in range(3)]
        waits = [memory.begin_sum(tensor) for tensor in sums]
        parts: dict[int, torch.Tensor] = {}

        def add(number: int, parts: dict[int, torch.Tensor] = parts, scattered: list = scattered) -> None:
            cut = list(scattered[number].view(WAYS, -1))
            parts[number] = memory.begin_scatter(scattered[number], cut, number)()

        numbers = list(range(3))
        drawn.shuffle(numbers)
        for number in numbers:  # begun in another order too: they are matched by their number
            waits.append(memory.begin_gather(list(gathered[number]), shards[number], number))
        drawn.shuffle(waits)
        for wait in waits:
            wait()
        for number in range(3):
            add(number)
        for number in range(3):
            every = torch.stack([entries(rank, WAYS * 11, torch.float32, 10 + number) for rank in range(WAYS)])
            is_near(parts[number], every.sum(0).view(WAYS, -1)[me])
            for rank in (rank for rank in range(WAYS) if rank != me):
                assert gathered[number][rank].eq(100.0 * number + rank + trial).all()
        memory.settle()
        for shard in shards:
            shard.fill_(float("nan"))  # nobody reads it any more
    memory.close()


def other_sizes_are_refused() -> None:
    memory = opened_here()
    with pytest.raises(RuntimeError, match="bytes where this rank has"):
        memory.begin_gather(list(torch.empty(WAYS, 4)), torch.zeros(4 + dist.get_rank()), 0)()
    dist.barrier()
    memory.close()


def a_rank_that_may_not_read_leaves_gloo_to_all() -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(process_memory, "_READ", None)
        assert opened() is None


def another_host_leaves_gloo_to_all() -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            patch.setattr(process_memory, "host_name", lambda: "another")
        assert opened() is None


def groups_sum_and_gather_alike_with_and_without() -> None:
    for reads_peers in (True, False):
        bound = bind(Mesh(("dp",), (WAYS,)), reads_peers=reads_peers)
        watchdog = Watchdog("a rank", 60.0)
        groups = DataGroups.bind(bound, WAYS, watchdog)
        assert (groups.memory is not None) == reads_peers
        groups.tags.begin()
        for size in (3, 3 * 40_001):
            own = entries(dist.get_rank(), size, torch.float32)
            every = torch.stack([entries(rank, size, torch.float32) for rank in range(WAYS)])
            is_near(groups.begin(own.clone())(), every.sum(0))
            borders = [rank * size // WAYS for rank in range(WAYS + 1)]
            part = groups.sum_shards(own.clone(), 0, borders)()
            is_near(part, every.sum(0).view(WAYS, -1)[dist.get_rank()])
            whole = torch.empty(size)
            groups.gather(whole, own.view(WAYS, -1)[dist.get_rank()], 1, borders)()
            Comparison().equal(
                whole, torch.stack([e.view(WAYS, -1)[r] for r, e in enumerate(every)]).view(-1)
            ).require()
            groups.settle()
        groups.close()


def a_peer_that_goes_ends_the_wait() -> None:
    memory, me = opened_here(), dist.get_rank()
    if me == 0:
        memory.close()
    else:
        with (
            pytest.raises(PeerError, match=r"the peer closed|the connection broke"),
            Watchdog(f"rank {me}", 5.0).waiting("peers"),
        ):
            memory.begin_sum(torch.zeros(8))()
    dist.barrier()
    memory.close()


CHECKS = (
    sums_are_those_of_all_ranks_to_the_bit,
    not_a_number_reaches_every_rank,
    waits_may_come_in_any_order,
    other_sizes_are_refused,
    a_rank_that_may_not_read_leaves_gloo_to_all,
    another_host_leaves_gloo_to_all,
    groups_sum_and_gather_alike_with_and_without,
    a_peer_that_goes_ends_the_wait,
)


if __name__ == "__main__":
    run_checks(CHECKS)
