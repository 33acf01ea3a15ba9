"""What a recomputed backward runs again, in FLOPs: predicted, and as torch counts them in checkpointed models."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shardwright as sw
from shardwright.backends.torch.memory.kept_results import KeptResults

WIDTH, TOKENS, BATCH = 16, 8, 4


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Gated(nn.Module):
    """The last product is read by the backward: its result is a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.down(self.up(x).relu()) + self.gate(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.mlp(x + self.out((q @ k.transpose(1, 2)).softmax(-1) @ v))


class Parallel(nn.Module):
    """The first branch ends in a product that nothing reads, and what follows keeps values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Mlp(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.other(x)


class Frozen(nn.Module):
    """A weight that is not trained is kept for the gradient of what it is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.down.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class Normed(nn.Module):
    """What follows the last product keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.up(x))


class Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(make() for _ in range(3)), nn.Linear(WIDTH, 1)
        self.mode = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.mode == "none" else run_again(block, x, self.mode)
        return self.head(x).square().mean()


def run_again(block: nn.Module, x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "full":
        return checkpoint(block, x, use_reentrant=False)

    return checkpoint(block, x, use_reentrant=False, context_fn=KeptResults(mode, block).contexts)


def counted_flops(model: Blocks, mode: str) -> int:
    model.mode = mode
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(BATCH, TOKENS, WIDTH)).backward()
    return counter.get_total_flops()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "mlp": (Mlp, ("products:up", "products:down", "products:down,up", "alternate")),
    "mlp with dropout": (lambda: Mlp(0.1), ("products:up", "alternate")),
    "gated": (Gated, ("products:down", "products:gate,up", "elementwise", "alternate")),
    "attention": (Attention, ("products:qkv", "products:mlp.up,qkv", "products:", "products:out", "elementwise")),
    "normed": (Normed, ("products:up",)),
    "parallel": (Parallel, ("products:one.down", "products:one.up,other.up")),
    "frozen": (Frozen, ("products:up", "products:down")),
}


@pytest.mark.parametrize("name", list(CASES))
def test_flops_that_are_run_again_are_those_that_torch_counts(name: str) -> None:
    make, modes = CASES[name]
    model = Blocks(make)
    graph = sw.capture(model, torch.ones(2, TOKENS, WIDTH))
    once = counted_flops(model, "none")
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=1)
    for mode in ("full", *modes):
        plan = sw.plan(graph, cluster, batch=BATCH, microbatch=BATCH, recompute=mode, precision="fp32")
        assert plan.unit_modes.count(mode) == 3
        assert plan.work.recomputed_flops == counted_flops(model, mode) - once, mode


def test_modules_say_which_of_them_runs_also_where_one_fails() -> None:
    block = Mlp()
    results = KeptResults("products:up", block)
    with results.around(), pytest.raises(RuntimeError):
        block(torch.ones(1, WIDTH + 1))
    assert results._running.paths == []
    before = dict(nn.modules.module._global_forward_hooks)
    with results.around():
        assert len(nn.modules.module._global_forward_hooks) == len(before) + 1
    assert dict(nn.modules.module._global_forward_hooks) == before
