"""Modules that are placed on ranks by hand, over two stages: losses and weights of the unsplit model."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from launched import chosen, run_checks
from torch import nn

import shardwright.compat.modelparallel as smp
import shardwright.torch as sw
from shardwright.core.errors import MissingCapabilityError, PlanError, PlanWarning, ShardwrightError
from tests.comparison import Comparison

PLACED = {"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False}


@sw.step
def train_step(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss if isinstance(batch, dict) else model(batch).square().mean()
    model.backward(loss)
    return loss


def trained(build: Callable[[], nn.Module], data: Callable[[int], Any], **keys: Any) -> tuple[Any, list[float]]:
    """Losses of three steps, and what ran them: (this rank's names, whether by messages, whole state)."""
    sw.init({**PLACED, **keys})
    torch.manual_seed(0)
    model = sw.DistributedModel(build())
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(float(train_step(model, data(step)).reduce_mean()))
        optimizer.step()
    held = {name for name, _ in model.local_named_parameters()}
    by_messages = model.runtime.messages is not None
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sw.shutdown()
    return (held, by_messages, state), losses


def plain(build: Callable[[], nn.Module], data: Callable[[int], Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        batch = data(step)
        loss = model(**batch).loss if isinstance(batch, dict) else model(batch).square().mean()
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
    return model.state_dict(), losses


def same(
    found: tuple[Any, list[float]], expected: tuple[dict[str, torch.Tensor], list[float]]
) -> tuple[set[str], bool]:
    (held, by_messages, state), losses = found
    compared = Comparison("placed by hand")
    compared.losses(losses, expected[1])
    compared.values(state, expected[0], relative=1e-5, absolute=1e-6)
    compared.require()
    return held, by_messages


class Net(nn.Module):
    """Its modules in the order in which they run, each made in the partition of that number."""

    def __init__(self, *places: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for place in places:
            if place is None:
                self.layers.append(nn.Linear(6, 6))
                continue
            with sw.partition(place):
                self.layers.append(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def rows(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def gpt2(step: int) -> Any:
    return models.batch("gpt2", step, 8)


def blocks_of_a_language_model_are_where_they_are_placed() -> None:
    def build() -> nn.Module:
        model = models.build("gpt2")
        if sw.is_initialized():
            for number, block in enumerate(model.transformer.h):
                sw.set_partition(block, int(number > 0))
            sw.set_partition(model.transformer.ln_f, 1)
            sw.set_partition(model.lm_head, 1)
        return model

    expected = plain(build, gpt2)
    held, by_messages = same(trained(build, gpt2), expected)
    assert not by_messages
    blocks = {name.split(".")[2] for name in held if name.startswith("transformer.h.")}
    assert blocks == ({"0"} if dist.get_rank() == 0 else {str(n) for n in range(1, 8)} & blocks)
    assert ("transformer.ln_f.weight" in held) == (dist.get_rank() == 1)


def what_returns_to_an_earlier_rank_runs_by_messages() -> None:
    def build() -> nn.Module:  # the norm and the head stay in the default partition, as SageMaker's own scripts have it
        model = models.build("gpt2")
        if sw.is_initialized():
            for block in list(model.transformer.h)[1:]:
                sw.set_partition(block, 1)
        return model

    expected = plain(build, gpt2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(build, gpt2)
    why = "placed by hand, and 'transformer.ln_f' is in partition 0 and runs behind modules of partition 1"
    assert any(why in str(one.message) for one in told) == (dist.get_rank() == 0)
    held, by_messages = same(found, expected)
    assert by_messages
    assert ("transformer.ln_f.weight" in held) == (dist.get_rank() == 0)
    with pytest.raises(ShardwrightError, match="placed by hand"):
        trained(build, gpt2, pipeline_mode="recorded")
    sw.shutdown()


CALLS: list[bool] = []


class Noted(nn.Module):
    """A layer that notes its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(torch.is_grad_enabled())
        return x + self.layers(x)


def marked_modules_are_computed_again_by_messages() -> None:
    def build(marks: bool) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(Noted(), Noted(), nn.Sequential(Noted(), Noted()))
        if sw.is_initialized():
            for place, module in zip((0, 1, 0), model, strict=True):
                sw.set_partition(module, place)
        if marks:
            sw.set_activation_checkpointing(model[1])
            sw.set_activation_checkpointing(model[2])  # each of its layers
            sw.set_activation_checkpointing(model[2][0].layers)  # which one of these holds
        return model

    expected = plain(partial(build, False), rows)
    calls = {}
    for marks in (False, True):
        CALLS.clear()
        _, by_messages = same(trained(partial(build, marks), rows), expected)
        assert by_messages
        calls[marks] = sum(CALLS)
    again = 1 if dist.get_rank() == 1 else 2
    assert calls[True] == calls[False] + again * 3 * PLACED["microbatches"], calls


def contexts_place_what_is_made_in_them() -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return Net(0, 0, 1, 1) if sw.is_initialized() else Net(None, None, None, None)

    sw.init(PLACED)
    torch.manual_seed(1)
    unsplit = Net(0, 0, 1, 1)
    sw.shutdown()
    expected = plain(lambda: unsplit, rows)
    held, by_messages = same(trained(build, rows), expected)
    assert not by_messages
    here = dist.get_rank()
    assert held == {f"layers.{2 * here + n}.0.{kind}" for n in (0, 1) for kind in ("weight", "bias")}


def the_default_partition_has_what_is_placed_nowhere() -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return Net(0, None, None)

    sw.init(PLACED)
    torch.manual_seed(1)
    unsplit = Net(0, None, None)
    sw.shutdown()
    held, by_messages = same(trained(build, rows, default_partition=1), plain(lambda: unsplit, rows))
    assert not by_messages
    assert {name.split(".")[1] for name in held} == ({"0"} if dist.get_rank() == 0 else {"1", "2"})


def the_innermost_place_wins() -> None:
    sw.init(PLACED)
    torch.manual_seed(1)
    with sw.partition(1):
        first = nn.Linear(6, 6)
        with sw.partition(0):
            second = nn.Linear(6, 6)
    unsplit = nn.Sequential(first, second)
    sw.set_partition(unsplit, 0)
    model = sw.DistributedModel(unsplit)
    x = rows(0)
    loss = train_step(model, x)
    assert model.runtime.messages is not None, "the first module is on rank 1, the second on rank 0"
    assert {name for name, _ in model.local_named_parameters()} == (
        {"1.weight", "1.bias"} if dist.get_rank() == 0 else {"0.weight", "0.bias"}
    )
    torch.manual_seed(1)
    again = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    Comparison("the innermost place").losses([float(loss.reduce_mean())], [float(again(x).square().mean())]).require()
    sw.shutdown()


class Uneven(nn.Module):
    """A table that takes memory and no time, before blocks that take time and little memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20_000, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16)) for _ in range(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x


def the_tree_weighs_memory_against_time() -> None:
    def tokens(step: int) -> torch.Tensor:
        return torch.randint(20_000, (8, 64), generator=torch.Generator().manual_seed(step))

    held = {}
    for name, keys in {
        "memory": {"memory_weight": 1.0},
        "time": {"memory_weight": 0.0},
        "speed": {"partitioner": "tree", "optimize": "speed"},
        "default": {"partitioner": "tree"},
    }.items():
        names = same(trained(Uneven, tokens, auto_partition=True, **keys), plain(Uneven, tokens))[0]
        held[name] = sum(n.endswith("0.weight") for n in names)  # blocks of this rank
    first = {"memory": 0, "time": 3, "speed": 2, "default": 0}
    assert held == (first if dist.get_rank() == 0 else {name: 6 - count for name, count in first.items()}), held


def what_cannot_be_is_refused() -> None:
    def refused(kind: type[Exception], said: str, call: Callable[[], Any]) -> None:
        with pytest.raises(kind, match=said):
            call()

    refused(ShardwrightError, "not initialised", lambda: sw.set_partition(nn.Linear(1, 1), 0))
    sw.init({"pipeline_parallel_degree": 2})
    refused(ShardwrightError, "auto_partition=True lets the planner", lambda: sw.set_partition(nn.Linear(1, 1), 1))
    refused(ShardwrightError, r"was given 2: expected a partition from 0 to 1", lambda: sw.partition(2).__enter__())
    with pytest.warns(PlanWarning, match="no effect under auto_partition=True"), smp.partition(1):
        marked = nn.Linear(1, 1)
    with pytest.warns(PlanWarning, match="no effect under auto_partition=True"):
        smp.set_partition(marked, 1)
    sw.shutdown()
    sw.init(PLACED)
    refused(ShardwrightError, "marks a torch.nn.Module, not a str", lambda: smp.set_partition("layers.0", 1))  # type: ignore[arg-type]
    refused(ShardwrightError, "expected a partition", lambda: smp.set_partition(nn.Linear(1, 1), True))
    sw.shutdown()
    for build, said in ((lambda: Net(0, 0), "no module is placed in partition 1 of 2"),):
        with pytest.raises(PlanError, match=said):
            trained(build, rows)
        sw.shutdown()
    with pytest.raises(MissingCapabilityError, match="by message passing, which does not do recompute"):
        trained(lambda: Net(0, 1, 0), rows, recompute="full")
    sw.shutdown()
    for keys, said in (
        ({"memory_weight": 0.5}, "auto_partition=False and memory_weight=0.5"),
        ({"virtual_stages": 2}, "auto_partition=False and virtual_stages=2"),
        ({"default_partition": 2}, "default_partition=2: expected 0 to 1"),
        ({"auto_partition": True, "memory_weight": 1.5}, "memory_weight=1.5: expected a number from 0"),
        ({"auto_partition": True, "partitioner": "trees"}, "did you mean 'tree'"),
        ({"auto_partition": True, "partitioner": "exact", "memory_weight": 1}, "only the module tree weighs"),
        ({"auto_partition": 1}, "auto_partition=1: expected True or False"),
    ):
        refused(ShardwrightError, said, partial(sw.init, {**PLACED, **keys}))


CHECKS = (
    blocks_of_a_language_model_are_where_they_are_placed,
    what_returns_to_an_earlier_rank_runs_by_messages,
    marked_modules_are_computed_again_by_messages,
    contexts_place_what_is_made_in_them,
    the_default_partition_has_what_is_placed_nowhere,
    the_innermost_place_wins,
    the_tree_weighs_memory_against_time,
    what_cannot_be_is_refused,
)

if __name__ == "__main__":
    run_checks(chosen(CHECKS))
