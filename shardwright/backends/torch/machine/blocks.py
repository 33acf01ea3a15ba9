"""Parts of a transformer, to measure on a GPU: what the host takes to issue its ops, and the rate of attention."""

import math

import torch

from shardwright.backends.torch.machine.timing import device_s, quartile_s
from shardwright.core.cost.unit_seconds import EAGER_OP_DISPATCH

ATTENTION = ((8, 16, 1024, 64), (4, 16, 2048, 128))
"""The (samples, heads, positions, entries of a head) of the attention measured."""


class Block(torch.nn.Module):
    """A transformer block as models are written, so small that a device waits for the host."""

    WIDTH = 64
    ISSUED = 5 + 6 * EAGER_OP_DISPATCH
    """What the host issues, in products, as the cost model counts it: four linear layers and attention, and six kernels
    beside."""

    def __init__(self) -> None:
        super().__init__()
        width = self.WIDTH
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU())
        self.narrow = torch.nn.Linear(4 * width, width)
        self.dropout = torch.nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, positions, width = x.shape
        parts = self.qkv(self.norms[0](x)).split(width, dim=-1)
        query, key, value = (part.view(samples, positions, 2, width // 2).transpose(1, 2) for part in parts)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(samples, positions, width)))
        x = x + self.dropout(self.narrow(self.wide(self.norms[1](x))))
        return x


def dispatched_s(device: torch.device, budget_s: float) -> float:
    """The host's time to issue a product of `Block`, forward, for training."""
    block = Block().to(device)
    rows = torch.randn(2, 8, Block.WIDTH, device=device)
    return quartile_s(lambda: block(rows), device, budget_s, whole=False) / Block.ISSUED


def attention_flops_per_s(device: torch.device, budget_s: float) -> float:
    """The rate of causal attention in bf16 with its backward, five products against two, every pair counted: the
    geometric mean over `ATTENTION`."""
    rates = []
    for samples, heads, positions, size in ATTENTION:
        shape = (samples, heads, positions, size)
        parts = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        seed = torch.randn(shape, device=device, dtype=torch.bfloat16)

        def both_ways(parts: list[torch.Tensor] = parts, seed: torch.Tensor = seed) -> None:
            query, key, value = parts
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(mixed, parts, seed)

        flops = 4 * samples * heads * positions**2 * size
        rates.append(3.5 * flops / device_s(both_ways, device, budget_s / len(ATTENTION)))
    return math.prod(rates) ** (1 / len(rates))
