"""What users do wrong with sharded state, precision and optimizers on two ranks. Writes JSON: the error of each rank.

Usage: bad_input.py OUT.json CASE...
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from launched import leave
from torch import nn

import shardwright.torch as sw

scaler = torch.amp.GradScaler("cpu", init_scale=8.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@sw.step
def scaled_step(model, x):
    loss = model(x)
    model.backward(scaler.scale(loss))
    return loss


@sw.step
def train_step(model, x):
    loss = model(x)
    model.backward(loss)
    return loss


def start(**config: Any) -> Any:
    sw.init({"ddp": True, "microbatches": 2, "log_every": 0, **config})
    return sw.DistributedModel(Net())


def batch() -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).chunk(sw.rdp_size())[sw.rdp_rank()]


def wrapped(model: Any) -> sw.DistributedOptimizer:
    return sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def clipped_while_scaled(**config: Any) -> None:
    model = start(**config)
    optimizer = wrapped(model)
    scaled_step(model, batch())
    scaler.unscale_(optimizer)
    norm = float(model.clip_grad_norm_(1e9))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    train_step(model, batch())
    same = float(model.clip_grad_norm_(1e9))
    assert 0 < same < 4 * norm, "without a scaler nothing is asked for"
    optimizer.zero_grad()
    scaled_step(model, batch())
    model.clip_grad_norm_(1.0)


def clipped_master_gradients() -> None:
    model = start()
    optimizer = wrapped(model)
    scaled_step(model, batch())
    optimizer.clip_master_grads(1.0)


def optimizer_before(**config: Any) -> None:
    """An optimizer that was made before the model had values, and was not wrapped."""
    with sw.delay_param_initialization():
        net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sw.init({"ddp": True, "microbatches": 2, "log_every": 0, **config})
    model = sw.DistributedModel(net)
    train_step(model, batch())
    optimizer.step()


def optimizer_before_a_plain_model() -> None:
    """It holds the model's own parameters, and trains them."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sw.init({"ddp": True, "microbatches": 2, "log_every": 0})
    model = sw.DistributedModel(net)
    before = {name: p.clone() for name, p in model.local_named_parameters()}
    train_step(model, batch())
    optimizer.step()
    changed = [name for name, p in model.local_named_parameters() if not torch.equal(p, before[name])]
    raise sw.ShardwrightError(f"trained {len(changed)} of {len(before)} parameters")


def hook_of_another_shape(**config: Any) -> None:
    model = start(**config)
    for _, parameter in model.local_named_parameters():
        if parameter.dim() == 2 or config.get("shard"):
            parameter.register_hook(lambda gradient: gradient.reshape(-1)[:1])
    train_step(model, batch())


def module_hook_of_another_shape(**config: Any) -> None:
    net = Net()
    net.layers[0].register_full_backward_hook(
        lambda module, given, made: tuple(g[..., :1] for g in given if g is not None)
    )
    sw.init({"ddp": True, "microbatches": 2, "log_every": 0, **config})
    model = sw.DistributedModel(net)
    x = batch().requires_grad_()
    train_step(model, x)


def backward_outside_a_step() -> None:
    """A loss of what the model gives outside of a step is read; its gradients would be of this replica alone."""
    model = start()
    assert float(model(batch())) > 0
    model(batch()).backward()


CASES: dict[str, Any] = {
    "clipped": lambda: clipped_while_scaled(), "clipped, pp": lambda: clipped_while_scaled(pipeline_parallel_degree=2),
    "clipped, shard 3": lambda: clipped_while_scaled(shard=3), "clipped masters": clipped_master_gradients,
    "before": lambda: optimizer_before(), "before, shard 3": lambda: optimizer_before(shard=3),
    "before, pp": lambda: optimizer_before(pipeline_parallel_degree=2), "before, plain": optimizer_before_a_plain_model,
    "hook": lambda: hook_of_another_shape(), "hook, pp": lambda: hook_of_another_shape(pipeline_parallel_degree=2),
    "hook, bf16": lambda: hook_of_another_shape(bf16=True),
    "outside": backward_outside_a_step, "module hook": lambda: module_hook_of_another_shape(),
}  # fmt: skip


def main(out: str, names: list[str]) -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name in names:
        error = "none"
        try:
            CASES[name]()
        except (sw.ShardwrightError, RuntimeError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        sw.shutdown()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, error)
        found[name] = every
    leave(found, out)


main(sys.argv[1], sys.argv[2:])
