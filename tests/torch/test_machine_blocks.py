"""The block by which a GPU's host is measured issues what the cost model counts."""

import torch

import shardwright as sw
from shardwright.backends.torch.machine.blocks import Block, dispatched_s
from shardwright.core.cost.unit_seconds import EAGER_OP_DISPATCH
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import fold


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_a_block_issues_what_is_counted() -> None:
    graph = sw.capture(Blocks(), torch.randn(2, 8, Block.WIDTH))
    counter, folded = WorkCounter(graph), fold(graph)
    inner = [counter.count(unit, 2) for unit in folded.units[1:-1]]
    assert inner, "the blocks are units"
    for work in inner:
        products = len(work.products)
        assert products + EAGER_OP_DISPATCH * (work.eager_kernels - products) == Block.ISSUED


def test_its_time_is_one_of_the_host() -> None:
    assert 1e-7 < dispatched_s(torch.device("cpu"), 0.05) < 1e-1
