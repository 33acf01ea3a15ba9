"""What a job's step may do, and what is refused since it would not train as it does alone."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.errors import MissingCapabilityError, PlanError, ShardwrightError
from shardwright.torch import JobTraining, run_jobs
from tests.comparison import Comparison

WIDTH, BATCH, STEPS = 16, 4, 2


class Counting(nn.Module):
    """A block with buffers that its forward writes in place and puts others in the place of, and that its backward
    reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        return torch.tanh(self.linear(x + self.mean)) / self.calls


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(5))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Forgetful(Stack):
    """It puts another buffer in the place of one, in its own forward, which is divided."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.detach().mean(0)
        return super().forward(x)


class Decaying(torch.optim.Optimizer):
    """Descent at a rate that falls with the number of steps, which the optimizer counts itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / self.count)


class CountingInState(Decaying):
    def step(self) -> None:  # type: ignore[override]
        self.state["steps"] = self.state.get("steps", 0) + 1
        super().step()


def by_mean(run: Any, inputs: list[torch.Tensor]) -> None:
    run.backward(run.model(*inputs), reduction="mean")


def by_weight(run: Any, inputs: list[torch.Tensor]) -> None:
    run.backward(run.model(*inputs), weight=inputs[0][:, 0].abs().sum())


def planned(
    model: nn.Module, optimizer_of: Any = torch.optim.SGD, step: Any = by_mean, label: Any = "recompute", **job: Any
) -> tuple[sw.JobsPlan, JobTraining]:
    """A job in shards of a block each, and what it trains."""
    graph = sw.capture(copy.deepcopy(model), torch.zeros(2, WIDTH), loss=lambda out: out)
    given = sw.Job(name="job", model=graph, steps=STEPS, batch=BATCH, microbatch=2, precision="fp32", **job)
    cluster = sw.Cluster("cpu")
    plan = sw.plan_jobs([given], cluster, budget_bytes=sw.plan_jobs([given], cluster).device_bytes * 4 // 5)
    own = plan.jobs[0]
    shards = [replace(shard, activations=label) for shard in own.shards[:-1]]
    assert shards
    data = [torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(STEPS)]
    optimizer = optimizer_of(model.parameters())
    return replace(plan, jobs=(replace(own, shards=(*shards, own.shards[-1])),)), JobTraining(
        graph=graph, model=model, optimizer=optimizer, step=step, data=data
    )


@pytest.mark.parametrize(
    ("block", "optimizer_of", "step", "label"),
    [
        (Counting, torch.optim.SGD, by_mean, "recompute"),
        (Counting, torch.optim.SGD, by_weight, "keep"),
        (lambda: nn.Linear(WIDTH, WIDTH), Decaying, by_weight, "recompute"),
    ],
    ids=["buffers, computed again", "buffers, kept", "weights"],
)
def test_a_step_trains_as_alone(block: Any, optimizer_of: Any, step: Any, label: Any) -> None:
    torch.manual_seed(0)
    model = Stack(block)
    plain = copy.deepcopy(model)
    plan, given = planned(model, optimizer_of, step, label)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # from before
    found = run_jobs(plan, {"job": given}).jobs["job"]
    assert found.failure == ""
    optimizer, compared = optimizer_of(plain.parameters()), Comparison("job")
    for batch, losses in zip(given.data, found.losses, strict=True):
        parts = batch.split(2)
        weights = [part[:, 0].abs().sum() if step is by_weight else torch.ones(()) for part in parts]
        expected = []
        for part, weight in zip(parts, weights, strict=True):
            loss = plain(part)
            (loss * weight / sum(weights)).backward()
            expected.append(loss.item())
        compared.losses(losses, expected)
        optimizer.step()
        optimizer.zero_grad()
    state = [dict((*each.named_parameters(), *each.named_buffers())) for each in (model, plain)]
    compared.values(*state, relative=1e-4, absolute=1e-6, what="weights and buffers").require()


def test_what_would_not_train_as_alone_ends_the_job_by_name() -> None:
    hooked = Stack()
    hooked.blocks[4].weight = hooked.blocks[0].weight
    hooked.blocks[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def wide(run: Any, inputs: list[torch.Tensor]) -> None:
        run.backward(run.model(*inputs).sqrt() * 0.0, weight=0.0)

    def broken() -> Any:
        raise ValueError("no such file")
        yield

    for model, options, said in (
        (hooked, {}, "there is a hook on blocks.0.weight by register_hook"),
        (Forgetful(), {}, "writes to buffer 'seen'"),
        (Stack(), {"optimizer_of": CountingInState}, "has a state 'steps' that is of no parameter"),
        (Stack(), {"step": wide}, "the weights of its losses add up to 0"),
        (Stack(), {"data": broken()}, "step 0: ValueError: no such file"),
    ):
        data = options.pop("data", None)
        plan, given = planned(model, **options)
        found = run_jobs(plan, {"job": given if data is None else replace(given, data=data)})
        assert said in found.jobs["job"].failure, found.jobs["job"].failure


def test_jobs_that_would_change_each_other_are_refused() -> None:
    aliased = Stack()
    aliased.blocks[4].weight = nn.Parameter(aliased.blocks[0].weight.data)
    plan, given = planned(aliased)
    with pytest.raises(MissingCapabilityError, match=r"blocks.0.weight and blocks.4.weight lie in the same memory"):
        run_jobs(plan, {"job": given})
    plan, one = planned(Stack())
    both = replace(plan, jobs=(*plan.jobs, replace(plan.jobs[0], name="other")))
    other = planned(Stack())[1]
    data = iter(one.data)
    with pytest.raises(PlanError, match="'job' and 'other' take batches from one iterator: give each its own"):
        run_jobs(both, {"job": replace(one, data=data), "other": replace(other, data=data)})
    other.model.blocks[0] = one.model.blocks[0]
    with pytest.raises(
        ShardwrightError, match=r"'job' and 'other' hold one tensor, blocks.0.weight: give each its own"
    ):
        run_jobs(both, {"job": one, "other": other})
