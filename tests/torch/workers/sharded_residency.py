"""What is whole at once, and when it is gathered and freed, under shard 3: limits, layers, tables, and parameters that
are read in the backward pass or given away."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from sharded_training import MICROBATCHES, OPTIMIZERS, STEPS, Tower, compare, start, tokens, train, whole_run
from torch import nn

import shardwright.torch as sw
from shardwright.backends.torch.machine.data_groups import DataGroups
from shardwright.backends.torch.state.flat_shards import FlatGroup
from tests.comparison import Comparison

LIMITS: dict[str, dict[str, Any]] = {
    "free": {}, "live": {"sdp_max_live_parameters": 4_200}, "most": {"sdp_max_live_parameters": int(1e9)},
    "buckets": {"sdp_reduce_bucket_size": 4_200}, "large": {"sdp_reduce_bucket_size": 5e8},
    "whole": {"sdp_param_persistence_threshold": 4_200}, "none whole": {"sdp_param_persistence_threshold": 0},
}  # fmt: skip


def limited(which: str) -> dict[str, Any]:
    """SageMaker's limits, on layers of 4,160 parameters each: what is whole, and gathered, at once."""
    plain = torch.manual_seed(3) and Tower()
    expected = whole_run(plain, OPTIMIZERS["adamw"])
    torch.manual_seed(3)
    model, optimizer = start(Tower(), OPTIMIZERS["adamw"], shard=3, **LIMITS[which])
    most, gather = [0], DataGroups.gather

    def watched(groups: DataGroups, *given: Any) -> Any:
        flat = model.runtime.split_model.residency.flat
        most.append(sum(g.layout.entries for g in flat.groups if g.frees and g.gathered.untyped_storage().size()))
        return gather(groups, *given)

    DataGroups.gather = watched
    try:
        found = train(model, optimizer)
    finally:
        DataGroups.gather = gather
    flat = model.runtime.split_model.parts.flat
    return {
        "same": compare(which, model, optimizer, found, expected), "live": max(most),
        "largest": max(g.layout.entries for g in flat.groups), "groups": len(flat.groups),
        "staying": sum(g.layout.entries for g in flat.groups if not g.frees),
    }  # fmt: skip


class Cache:
    """What every block was given and leaves for the next ones, as a cache of keys and values."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(24, 400), nn.Linear(400, 24)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.held.append(torch.tanh(self.inner(x) + bias))
        made: torch.Tensor = x + self.outer(cache.held[-1] if len(cache.held) < 3 else cache.held[-1] + cache.held[-3])
        return made


class Cached(nn.Module):
    """Layers that are given one bias and one cache, some of which read what others left; tied tables, of which a hook
    reads more than the rows that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.bias = nn.Embedding(600, 24), nn.Linear(24, 400)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.head = nn.Linear(24, 600, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.embedding.register_forward_hook(lambda module, _, made: made + module.weight.square().mean(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, cache = self.embedding(tokens), Cache()
        bias = self.bias(x)
        for layer in self.layers:
            x = layer(x, bias, cache)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].reshape(-1, 600), tokens[:, 1:].reshape(-1))


def freed(level: int) -> dict[str, Any]:
    """What is whole at once, in layers, beside the tables, and how often these are gathered."""
    torch.manual_seed(3)
    plain = Cached()
    model, optimizer = start(copy.deepcopy(plain), OPTIMIZERS["adamw"], shard=level)
    expected = whole_run(plain, OPTIMIZERS["adamw"])
    most, tables, before = 0, 0, FlatGroup.begin_gather

    def begin_gather(group: FlatGroup) -> None:
        nonlocal most, tables
        is_new = not group.is_whole and group._gathering is None
        before(group)
        flat = model.runtime.split_model.parts.flat
        assert flat is not None
        whole = [g for g in flat.groups if g.gathered.untyped_storage().size()]
        tables += is_new and "embedding.weight" in group.names
        most = max(most, sum(any(name.startswith("layers.") for name in g.names) for g in whole))

    FlatGroup.begin_gather = begin_gather  # type: ignore[method-assign]
    try:
        found = train(model, optimizer)
    finally:
        FlatGroup.begin_gather = before  # type: ignore[method-assign]
    report = compare("freed", model, optimizer, found, expected)
    return {"same": report, "layers": most, "tables": tables / (STEPS * MICROBATCHES)}


NEAR = {"relative": 0.0, "absolute": 1e-5}


class Watched(Cached):
    """Hooks on results and on parameters read these parameters in the backward pass; a layer gives its weight away."""

    def __init__(self) -> None:
        super().__init__()
        for module, weight in ((self.embedding, self.embedding.weight), (self.layers[3], self.layers[3].inner.weight)):
            module.register_forward_hook(lambda _, given, made, w=weight: self.watch(made, w))
            weight.register_hook(lambda g, w=weight: g + 0.01 * w.detach())
        self.given = Giving()

    @staticmethod
    def watch(made: torch.Tensor, weight: torch.Tensor) -> None:
        if made.requires_grad:
            made.register_hook(lambda gradient: gradient * (1 + weight.detach().square().mean()))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, bias = self.given()
        return super().forward(tokens) + bias.square().mean(), rows


class Giving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(60, 100)), nn.Parameter(torch.randn(30))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight[3:5], self.bias


@sw.step
def watched_step(model, tokens):
    loss, rows = model(tokens)
    model.backward(loss, reduction="mean")
    return loss, rows, model.module.given.weight


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def watched(level: int) -> dict[str, Any]:
    """Whatever reads parameters in a backward pass, or takes them out of a step, has them whole."""
    plain, split = (seeded(Watched) for _ in range(2))
    limit = {"sdp_param_persistence_threshold": 0} if level == 3 else {}
    model, optimizer = start(split, OPTIMIZERS["sgd"], shard=level, **limit)
    alone = OPTIMIZERS["sgd"](list(plain.parameters()))
    same = Comparison("watched")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, rows, weight = watched_step(model, tokens(step).chunk(2)[sw.rdp_rank()])
        alone.zero_grad()
        parts = [plain(part)[0] / (2 * MICROBATCHES) for part in tokens(step).chunk(2 * MICROBATCHES)]
        for part in parts:
            part.backward()
        same.losses([float(loss.all_reduce_mean())], [float(sum(parts))])
        given = plain.given.weight.detach()
        same.values([*rows.outputs, *weight.outputs], [given[3:5], given[3:5], given, given], **NEAR, what="given")
        optimizer.step()
        alone.step()
    same.values(model.state_dict(), plain.state_dict(), **NEAR, what="weights")
    return {"same": same.report()}
