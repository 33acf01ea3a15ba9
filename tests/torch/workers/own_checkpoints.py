"""Models that checkpoint by themselves, or are marked, on two stages: gradients of the plain model, blocks run twice.

Usage: own_checkpoints.py [CHECK...]
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import run_checks
from models import batch, build
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright.torch as sw
from tests.comparison import Comparison

MICROBATCHES = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8))
        self.number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RAN.append(self.number)  # outside of the modules, whose attributes a recomputed forward leaves as they were
        return x + self.layers(x)


RAN: list[int] = []
"""The number of every block that ran."""


class Rows(nn.Module):
    """Blocks in a row, of which the model checkpoints ``first`` … ``end`` - 1."""

    def __init__(self, first: int, end: int, *, reentrant: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        for number, block in enumerate(self.blocks):
            block.number = number
        self.leave = nn.Linear(8, 1)
        self.checkpointed, self.reentrant = range(first, end), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=self.reentrant) if number in self.checkpointed else block(x)
        return self.leave(x).square().mean()


@sw.step
def train_step(model, x):
    loss = model(x)
    model.backward(loss)
    return loss


def runs_twice(model: Rows, expected: range, **config: Any) -> Any:
    """Train the model split and whole, and compare; blocks of ``expected`` run twice for each microbatch. Returns the
    plan."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = copy.deepcopy(model)
    plain.checkpointed = range(0)
    for block, of_plain in zip(model.blocks, plain.blocks, strict=True):
        of_plain.load_state_dict(block.state_dict())
    sw.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES} | config)
    split = sw.DistributedModel(model)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    train_step(split, x)  # records, and captures
    RAN.clear()
    split.zero_grad()
    loss = train_step(split, x)
    runs = [RAN.count(number) for number in range(len(model.blocks))]
    local = {name.split(".")[1] for name, _ in split.local_named_parameters() if name.startswith("blocks")}
    for number, count in enumerate(runs):
        wanted = MICROBATCHES * (2 if number in expected else 1) if str(number) in local else 0
        assert count == wanted, (number, runs, expected)
    total = plain(x)
    total.backward()
    same = Comparison("checkpointed").losses(float(loss.reduce_mean()), float(total.detach()))
    found = {name: p.grad for name, p in split.local_named_parameters()}
    same.gradients(found, {name: p.grad for name, p in plain.named_parameters() if name in found}).require()
    plan = split.runtime.stage_map.plan
    sw.shutdown()
    return plan


def checkpoints_around_calls_are_carried_out() -> None:
    for reentrant in (False, True):
        runs_twice(Rows(0, 6, reentrant=reentrant), range(6))
    runs_twice(Rows(0, 6), range(6), pipeline="zb-h1")


def blocks_that_are_not_checkpointed_are_kept() -> None:
    runs_twice(Rows(1, 3), range(1, 3))


def marked_blocks_are_recomputed() -> None:
    model = Rows(0, 0)
    sw.set_activation_checkpointing(model.blocks[4])
    sw.set_activation_checkpointing(model.blocks[0])
    runs_twice(copy.deepcopy(model), range(0))  # marks are of the modules themselves: a copy has none
    whole = copy.deepcopy(model)
    sw.set_activation_checkpointing(whole.blocks)
    runs_twice(whole, range(6))


@sw.step
def mean_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss, reduction="mean")
    return loss


def marked_blocks_write_to_their_buffers_once() -> None:
    for mode in ("recorded", "messages"):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = nn.Sequential(
            nn.Linear(4, 4), block, nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        )
        plain = copy.deepcopy(model)
        sw.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "pipeline_mode": mode})
        split = sw.DistributedModel(model)
        for number in (1, 3):
            sw.set_activation_checkpointing(model[number])
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        mean_step(split, x)
        for part in x.chunk(MICROBATCHES):
            plain(part)
        found, compared = split.state_dict(), Comparison(mode)
        for name, wanted in plain.named_buffers():
            compared.values(found[name], wanted, relative=1e-5, absolute=1e-6, what=name)
        compared.require()
        sw.shutdown()


class Counting(nn.Module):
    """What it computes follows from how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.seen = nn.Linear(4, 4), 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return torch.tanh(self.layer(x)) * (1.0 + 0.5 * len(self.seen))


def marked_blocks_set_their_attributes_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Counting(), nn.Linear(4, 4)), Counting(), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    sw.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "pipeline_mode": "messages"})
    split = sw.DistributedModel(model)
    for number in (1, 2):
        sw.set_activation_checkpointing(model[number])
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    compared = Comparison("attributes")
    for _ in range(2):
        split.zero_grad()
        plain.zero_grad()
        losses = [plain(part).square().mean() / MICROBATCHES for part in x.chunk(MICROBATCHES)]
        torch.stack(losses).sum().backward()
        compared.losses(mean_step(split, x).all_reduce_mean(), torch.stack(losses).sum().detach())
        held = dict(split.local_named_parameters())
        found = {name: p.grad for name, p in held.items() if p.grad is not None}
        compared.gradients(found, {name: p.grad for name, p in plain.named_parameters() if name in found})
    own = [one for one in model.modules() if isinstance(one, Counting) and not one.layer.weight.is_meta]
    calls = 2 * MICROBATCHES
    assert all(module.calls == calls and module.seen == [*range(1, calls + 1)] for module in own), own
    counted = torch.tensor(len(own))
    dist.all_reduce(counted)
    assert int(counted) == 2
    compared.require()
    sw.shutdown()


def replicas_that_are_not_split_recompute_their_blocks() -> None:
    alone = {"pipeline_parallel_degree": 1, "ddp": True}
    assert runs_twice(Rows(0, 0), range(6), recompute="full", **alone).decision.pp == 1
    model = Rows(0, 0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    sw.set_activation_checkpointing(model.blocks[2])
    assert runs_twice(model, range(2, 3), **alone).unit_modes.count("full") == 1


def blocks_go_to_the_host() -> None:
    plan = runs_twice(Rows(0, 0), range(0), offload_activations=True)
    assert plan.unit_modes.count("offload") == 6
    with pytest.raises(sw.ShardwrightError, match="offload_activations=True and recompute='full'"):
        sw.init({"offload_activations": True, "recompute": "full"})


def what_does_not_go_together_is_refused() -> None:
    sw.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "offload_activations": True})
    model = sw.DistributedModel(Rows(0, 6))
    said = "asks by checkpoints or marks to compute blocks again: leave out one of them"
    with pytest.raises(sw.ShardwrightError, match=said):
        train_step(model, torch.randn(4, 4))
    sw.shutdown()


def layers_that_checkpoint_themselves_run_twice() -> None:
    """Hugging Face's layers checkpoint inside of their own call."""
    plain = build("gpt2", dropout=0.1)
    model: Any = copy.deepcopy(plain)
    model.gradient_checkpointing_enable()
    counts = {id(block): 0 for block in model.transformer.h}

    def count(module: nn.Module, *_: Any) -> None:
        counts[id(module)] += 1

    for block in model.transformer.h:
        block.attn.register_forward_hook(lambda module, *_, block=block: count(block))
    losses = {}
    for name, of in (("split", model), ("plain", copy.deepcopy(plain))):
        sw.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES})
        sw.set_seed(3)
        split = sw.DistributedModel(of)
        given = batch("gpt2", 0)
        step = sw.step(lambda m, b: _backward(m, b))
        step(split, given)
        counts.update(dict.fromkeys(counts, 0))
        split.zero_grad()
        losses[name] = float(step(split, given).reduce_mean())
        if name == "split":
            local = {n.split(".")[2] for n, _ in split.local_named_parameters() if n.startswith("transformer.h.")}
            runs = {str(number): counts[id(block)] for number, block in enumerate(model.transformer.h)}
            assert all(runs[number] == 2 * MICROBATCHES for number in local), (runs, local)
        found = {n: p.grad.clone() for n, p in split.local_named_parameters()}
        sw.shutdown()
        if name == "split":
            kept = found
    same = Comparison("gpt2").losses(losses["split"], losses["plain"])
    same.gradients(kept, found).require()


def _backward(model: Any, given: Any) -> Any:
    loss = model(**given).loss
    model.backward(loss)
    return loss


CHECKS: tuple[Callable[[], None], ...] = (
    checkpoints_around_calls_are_carried_out,
    blocks_that_are_not_checkpointed_are_kept,
    marked_blocks_are_recomputed,
    marked_blocks_write_to_their_buffers_once,
    marked_blocks_set_their_attributes_once,
    replicas_that_are_not_split_recompute_their_blocks,
    blocks_go_to_the_host,
    what_does_not_go_together_is_refused,
    layers_that_checkpoint_themselves_run_twice,
)

if __name__ == "__main__":
    run_checks(check for check in CHECKS if len(sys.argv) == 1 or check.__name__ in sys.argv[1:])
