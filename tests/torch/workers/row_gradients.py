"""Sums of gradients of a few rows over four ranks, against the sum of dense ones.

Usage: row_gradients.py [CHECK...]
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import run_checks

import shardwright.torch as sw
from shardwright.backends.torch.data_parallel import row_gradients
from shardwright.core.cost.row_gradients import RowGradient
from tests.comparison import Comparison

ROWS, WIDTH = 50, 6


def looked_up(seed: int, tokens: int, padding_idx: int | None = None, sparse: bool = True) -> torch.Tensor:
    """The gradient of a table, with rows that occur several times."""
    drawn = torch.Generator().manual_seed(seed)
    table = torch.nn.Embedding(ROWS, WIDTH, padding_idx=padding_idx, sparse=sparse)
    with torch.no_grad():
        table.weight.copy_(torch.randn(ROWS, WIDTH, generator=drawn))
    tokens_given = torch.randint(0, ROWS // 2, (tokens,), generator=drawn)
    (table(tokens_given).sin() * torch.randn(tokens, WIDTH, generator=drawn)).sum().backward()
    assert table.weight.grad is not None
    return table.weight.grad


def summed(make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """What all ranks have together, made dense, on one."""
    return sum(make(rank).to_dense() for rank in range(dist.get_world_size()))  # type: ignore[return-value]


def sums_are_those_of_dense_gradients() -> None:
    cases: dict[str, Callable[[int], torch.Tensor]] = {
        "duplicates": lambda rank: looked_up(rank, 40),
        "an empty rank": lambda rank: looked_up(rank, 0 if rank == 1 else 8),
        "all ranks empty": lambda rank: looked_up(rank, 0),
        "padding": lambda rank: looked_up(rank, 30, padding_idx=3),
        "unequal": lambda rank: looked_up(rank, 3 * 4**rank),
        "dense": lambda rank: looked_up(rank, 5, sparse=False),
        "vectors": lambda rank: looked_up(rank, 9).to_dense().sum(1),
        "double": lambda rank: looked_up(rank, 9).double(),
    }
    for name, make in cases.items():
        own, wanted = make(dist.get_rank()), summed(make)
        for policy in ("auto", "dense", "sparse"):
            found = sw.reduce_gradient(own, policy)
            if policy != "auto":
                assert found.is_sparse == (policy == "sparse"), name
            same = Comparison(f"{name}, {policy}")
            same.values(found.to_dense(), wanted, relative=1e-6, absolute=1e-6).require()
            if policy == "sparse" and own.is_sparse and name != "all ranks empty":
                indices = found.indices()[0]
                assert indices.equal(indices.unique()), name
    assert torch.equal(own.to_dense(), make(dist.get_rank()).to_dense())  # what was given is as it was


def infinities_and_nans_arrive() -> None:
    own = torch.zeros(ROWS, WIDTH)
    own[dist.get_rank(), 0] = float("nan") if dist.get_rank() == 2 else float("inf")
    for policy in ("dense", "sparse"):
        found = sw.reduce_gradient(own, policy).to_dense()
        assert found[2, 0].isnan(), policy
        assert found[1, 0].isinf(), policy
        assert found.isfinite().sum() == found.numel() - dist.get_world_size(), policy


def a_group_sums_for_itself() -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    found = sw.reduce_gradient(looked_up(rank, 20), "sparse", group=halves[rank // 2])
    first = rank // 2 * 2
    wanted = looked_up(first, 20).to_dense() + looked_up(first + 1, 20).to_dense()
    Comparison("a half").values(found.to_dense(), wanted, relative=1e-6, absolute=1e-6).require()


def bytes_follow_the_formula() -> None:
    """As they are sent: each rank hands the gather its rows, and the sum its table."""
    sent: list[int] = []
    gather, reduce = dist.all_gather_into_tensor, dist.all_reduce

    def gathering(out: torch.Tensor, own: torch.Tensor, **more: Any) -> Any:
        sent.append(own.nbytes * (dist.get_world_size(more.get("group")) - 1))
        return gather(out, own, **more)

    def reducing(whole: torch.Tensor, **more: Any) -> Any:
        size = dist.get_world_size(more.get("group"))
        sent.append(whole.nbytes * 2 * (size - 1) // size)
        return reduce(whole, **more)

    rank = dist.get_rank()
    groups = {2: dist.new_group([0, 1]), 4: dist.group.WORLD}
    dist.all_gather_into_tensor, dist.all_reduce = gathering, reducing  # type: ignore[assignment]
    try:
        for size, group in groups.items():
            if rank >= size:
                continue
            most = max(looked_up(other, 30).coalesce()._nnz() for other in range(size))
            for policy in ("dense", "sparse"):
                sent.clear()
                sw.reduce_gradient(looked_up(rank, 30), policy, group=group)
                of = RowGradient(ROWS, 4 * WIDTH, most, size)
                agreeing = 8 * 8 * (size - 1) + (8 * (size - 1) if policy == "sparse" else 0)
                assert sum(sent) == agreeing + of.moved_bytes(policy), (size, policy, sent)
    finally:
        dist.all_gather_into_tensor, dist.all_reduce = gather, reduce


def ranks_that_differ_stop_together() -> None:
    rank = dist.get_rank()
    bad: dict[str, tuple[torch.Tensor, str]] = {
        r"ranks differ in rows, \[50, 50, 50, 49\]": (torch.ones(ROWS - (rank == 3), WIDTH), "auto"),
        r"ranks differ in dtype": (torch.ones(ROWS, WIDTH, dtype=torch.float64 if rank else torch.float32), "auto"),
        r"ranks differ in policy": (torch.ones(ROWS, WIDTH), "dense" if rank else "sparse"),
        r"ranks \[1\] cannot be summed": (torch.ones(ROWS, WIDTH, dtype=torch.int32 if rank == 1 else None), "auto"),
        r"ranks \[0, 1, 2, 3\] cannot be summed: it has 2 sparse dims": (torch.eye(4).to_sparse(), "auto"),
        r"policy='spares': did you mean 'sparse'\? known: auto, dense, sparse": (torch.ones(2), "spares"),
    }
    for match, (gradient, policy) in bad.items():
        with pytest.raises(sw.ShardwrightError, match=match):
            sw.reduce_gradient(gradient, policy)
    assert row_gradients.POLICIES == ("auto", "dense", "sparse")


CHECKS: tuple[Callable[[], None], ...] = (
    sums_are_those_of_dense_gradients,
    infinities_and_nans_arrive,
    a_group_sums_for_itself,
    bytes_follow_the_formula,
    ranks_that_differ_stop_together,
)

if __name__ == "__main__":
    run_checks(check for check in CHECKS if len(sys.argv) == 1 or check.__name__ in sys.argv[1:])
