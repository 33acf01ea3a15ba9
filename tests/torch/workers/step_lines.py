"""The lines of training steps on all ranks, with what they should say. Writes JSON: for each case the lines of rank 0.

Usage: step_lines.py OUT.json CASE...
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from launched import leave
from torch import nn

import shardwright.torch as sw
from shardwright.core.cost.training_flops import training_flops
from shardwright.core.values.step_line import LINES, StepLine

WIDTH, LENGTH, WORDS = 16, 6, 29


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


def tokens(step: int, samples: int) -> torch.Tensor:
    made = torch.randint(0, WORDS, (samples, LENGTH), generator=torch.Generator().manual_seed(step))
    count = sw.rdp_size()
    return made.chunk(count)[sw.rdp_rank()]


@sw.step
def train_step(model, tokens):
    loss = model(tokens)
    model.backward(loss)
    return loss


@sw.step
def summed_step(model, tokens):
    loss = model(tokens) * tokens.shape[0]
    model.backward(loss, reduction="sum")
    return loss


@sw.step
def silent_step(model, tokens):
    model.backward(model(tokens))


scaler = torch.amp.GradScaler("cpu", init_scale=4.0)


@sw.step
def scaled_step(model, tokens):
    model.backward(scaler.scale(model(tokens)))


def begin(config: dict[str, Any], change: Callable[[nn.Module], None] = lambda model: None, **how: Any) -> Any:
    sw.init({"ddp": True, "microbatches": 2, "log_every": 2, **config})
    torch.manual_seed(1)
    net = Net()
    change(net)
    graph = sw.capture(net, {"tokens": torch.zeros(2, LENGTH, dtype=torch.long)})
    model = sw.DistributedModel(net)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(trained, lr=1e-2), **how)
    return model, optimizer, graph


def plain(config: dict[str, Any], step: Any = train_step, samples: int = 8, clip: bool = True) -> Any:
    def run() -> dict[str, Any]:
        model, optimizer, graph = begin(config)
        losses, norms = [], []
        for number in range(4):
            optimizer.zero_grad()
            loss = step(model, tokens(number, samples))
            norms.append(float(model.clip_grad_norm_(1.0)) if clip else None)
            optimizer.step()
            if loss is not None:
                total = loss.all_reduce_sum() if step is summed_step else loss.all_reduce_mean()
                losses.append(float(total))
        return {"losses": losses, "norms": norms, "flops": counted(graph, samples)}

    return run


def counted(graph: Any, samples: int) -> dict[str, float]:
    """The FLOPs of one step of one replica."""
    return training_flops(graph, samples // sw.rdp_size()).by_precision


def accumulated() -> dict[str, Any]:
    model, optimizer, graph = begin({})
    losses = []
    for number in range(4):
        optimizer.zero_grad()
        called = [float(train_step(model, tokens(3 * number + k, 8)).all_reduce_mean()) for k in range(3)]
        optimizer.step()
        losses.append(sum(called))
    return {"losses": losses, "flops": counted(graph, 8), "calls": 3}


def uneven() -> dict[str, Any]:
    model, optimizer, graph = begin({})
    losses = []
    for number in range(4):
        optimizer.zero_grad()
        losses.append(float(train_step(model, tokens(number, 7 if number == 3 else 8)).all_reduce_mean()))
        optimizer.step()
    return {"losses": losses, "flops": counted(graph, 8), "short": counted(graph, 7)}


def frozen() -> dict[str, Any]:
    def freeze(net: nn.Module) -> None:
        for parameter in (*net.embedding.parameters(), *net.blocks[0].parameters(), *net.blocks[2].parameters()):
            parameter.requires_grad_(False)

    model, optimizer, graph = begin({}, freeze)
    for number in range(4):
        optimizer.zero_grad()
        train_step(model, tokens(number, 8))
        optimizer.step()
    return {"flops": counted(graph, 8)}


def overflowing() -> dict[str, Any]:
    """The first loss overflows at this scale, and the second at a lower one no more."""
    model, optimizer, _ = begin({"fp16": True}, dynamic_loss_scale=True, init_scale=2.0**60, scale_factor=2.0**50)
    skipped = []
    for number in range(4):
        optimizer.zero_grad()
        train_step(model, tokens(number, 8))
        optimizer.step()
        skipped.append(optimizer.overflow)
    return {"skipped": skipped}


def scaled() -> dict[str, Any]:
    """A scaler of torch's leaves out the second update."""
    model, optimizer, _ = begin({})
    for number in range(4):
        optimizer.zero_grad()
        scaled_step(model, tokens(number, 8))
        if number == 1:
            next(model.local_parameters()).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
    return {}


def two_optimizers() -> dict[str, Any]:
    sw.init({"log_every": 1})
    torch.manual_seed(1)
    model = sw.DistributedModel(Net())
    parameters = list(model.parameters())
    first = sw.DistributedOptimizer(torch.optim.AdamW(parameters[:3], lr=1e-2))
    second = sw.DistributedOptimizer(torch.optim.SGD(parameters[3:], lr=1e-2))
    losses = []
    for number in range(3):
        for optimizer in (first, second):
            optimizer.zero_grad()
        losses.append(float(train_step(model, tokens(number, 8)).reduce_mean()))
        for optimizer in (second, first):
            optimizer.step()
    return {"losses": losses}


def off() -> dict[str, Any]:
    return plain({"log_every": 0})()


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": plain({}), "pp": plain({"pipeline_parallel_degree": 2}), "tp": plain({"tensor_parallel_degree": 2}),
    "sharded": plain({"shard": 3}), "bf16": plain({"bf16": True}),
    "recompute": plain({"pipeline_parallel_degree": 2, "recompute": "full"}),
    "messages": plain({"pipeline_parallel_degree": 2, "pipeline_mode": "messages"}),
    "sum": plain({}, summed_step), "silent": plain({}, silent_step, clip=False),
    "accumulated": accumulated, "uneven": uneven, "frozen": frozen, "overflowing": overflowing, "scaled": scaled,
    "two optimizers": two_optimizers, "off": off,
}  # fmt: skip


def main(out: str, names: list[str]) -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    texts: list[str] = []
    lines: list[dict[str, Any]] = []
    LINES.addHandler(_Kept(texts))
    as_said = StepLine.text

    def text(line: StepLine) -> str:
        flops = None if line.work.flops is None else dict(line.work.flops)
        kept = {n: getattr(line, n) for n in ("step", "loss", "grad_norm", "skipped", "seconds", "mfu")}
        lines.append(kept | {"samples": line.work.samples, "tokens": line.work.tokens, "flops": flops})
        return as_said(line)

    StepLine.text = text  # type: ignore[method-assign]
    for name in names:
        result = CASES[name]()
        sw.shutdown()
        found[name] = result | {"texts": texts[:], "lines": lines[:]}
        texts.clear()
        lines.clear()
    leave(found, out)


class _Kept(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


main(sys.argv[1], sys.argv[2:])
