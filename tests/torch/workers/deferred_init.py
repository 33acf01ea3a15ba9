"""Trains models that were built without memory for their parameters, beside those that were built plainly.

Usage: deferred_init.py OUT.json CASE...
"""

import ctypes
import gc
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launched import leave
from torch import nn

import shardwright.torch as sw

CONFIGS: dict[str, dict[str, Any]] = {
    "pp": {"pipeline_parallel_degree": 2}, "tp": {"tensor_parallel_degree": 2}, "shard 1": {"shard": 1},
    "shard 3": {"shard": 3}, "bf16": {"shard": 3, "bf16": True}, "groups": {"shard": 3, "shard_group": 2},
    "shard 3, tp": {"shard": 3, "tensor_parallel_degree": 2}, "messages": {
        "pipeline_parallel_degree": 2, "pipeline_mode": "messages"},
    "shard 3, pp": {"shard": 3, "pipeline_parallel_degree": 2},
    "saved": {"shard": 3}, "loaded": {"shard": 3}, "given": {"shard": 3}, "read": {"shard": 3},
}  # fmt: skip
WIDTH, WORDS = 32, 41


class Net(nn.Module):
    """Blocks, a tied head, an own initialisation at the end as Hugging Face's models have it."""

    def __init__(self, width: int = WIDTH, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(width))
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.05)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x * self.scale.to(x.dtype)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


@sw.step
def train_step(model, tokens):
    loss = model(tokens)
    model.backward(loss)
    return loss


def tokens(step: int) -> torch.Tensor:
    made = torch.randint(0, WORDS, (8, 6), generator=torch.Generator().manual_seed(step))
    return made.chunk(sw.rdp_size())[sw.rdp_rank()]


def trained(case: str, *, late: bool) -> Any:
    torch.manual_seed(11)
    if late:
        with sw.delay_param_initialization():
            net = Net()
    else:
        net = Net()
    sw.init({"ddp": True, "microbatches": 2, "log_every": 0, **CONFIGS[case]})
    bare = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(12)
    other = Net().state_dict() if case in ("loaded", "given") else {}
    other.pop("scale", None)
    model = sw.DistributedModel(net, weights=other if case == "given" and late else None)
    if case == "given" and not late:
        model.load_state_dict(other, strict=False)
    optimizer = sw.DistributedOptimizer(bare)
    first: Any = None
    if case == "saved":
        first = {name: _sum(t) for name, t in model.state_dict().items()}
    if case == "loaded":
        model.load_state_dict(other, strict=False)
    if case == "read":
        with torch.no_grad():
            for _, parameter in model.local_named_parameters():
                parameter.mul_(0.5)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        losses.append(float(train_step(model, tokens(step)).all_reduce_mean()))
        optimizer.step()
    sums = {name: _sum(t) for name, t in model.state_dict().items()}
    sw.shutdown()
    return {"losses": losses, "weights": sums, "first": first}


def _sum(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().abs().sum())


def seeds() -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    with sw.delay_param_initialization():
        net = Net()
    sw.init({"ddp": True, "shard": 3, "log_every": 0})
    try:
        sw.DistributedModel(net)
    except sw.ShardwrightError as error:
        return {"error": str(error)}
    finally:
        sw.shutdown()
    return {"error": "none"}


def memory() -> dict[str, Any]:
    """The most that this process grows by: while the model is built, and until its first step is over."""
    ctypes.CDLL("libc.so.6").mallopt(-3, 2**17)  # large memory goes back to the system, not to a heap with holes
    for library in ("networkx", "scipy.optimize", "scipy.sparse.csgraph"):  # else planning loads them while it counts
        importlib.import_module(library)
    width, blocks = 512, 24
    sw.init({"ddp": True, "shard": 3, "microbatches": 1, "log_every": 0})
    began = _reset_peak()
    torch.manual_seed(11)
    with sw.delay_param_initialization():
        net = Net(width, blocks)
    built = _peak() - began
    parameters = [p.numel() * 4 for p in net.parameters()]
    model = sw.DistributedModel(net)
    began_step = _reset_peak()
    with torch.no_grad():
        evaluate(model, tokens(0))
    cut = _peak() - began_step
    whole, block = sum(parameters), 2 * 4 * width * width * 4
    mine = {"built": built, "cut": cut}
    every: list[Any] = [None] * sw.size()
    dist.all_gather_object(every, mine)
    sw.shutdown()
    return {"whole": whole, "block": block, "ranks": every}


@sw.step
def evaluate(model, tokens):
    return model(tokens)


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def _reset_peak() -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def main(out: str, names: list[str]) -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name in names:
        if name in ("seeds", "memory"):
            found[name] = {"seeds": seeds, "memory": memory}[name]()
        else:
            found[name] = {"plain": trained(name, late=False), "late": trained(name, late=True)}
    leave(found, out)


main(sys.argv[1], sys.argv[2:])
