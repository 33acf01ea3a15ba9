"""Small models for two replicas that share their state, their training, and that of torch alone on the whole batch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright.torch as sw
from tests.comparison import Comparison

STEPS, MICROBATCHES, SAMPLES = 4, 2, 8


class Net(nn.Module):
    """Embedding, two blocks, a branch that is used only where the batch says so, a head tied to the embedding."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 24, max_norm=max_norm)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 50), nn.GELU(), nn.Linear(50, 24)) for _ in range(2)
        )
        self.unused = nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits = self.norm(x) @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 37), tokens[:, 1:].reshape(-1))


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 37, (SAMPLES, 9), generator=torch.Generator().manual_seed(step))


def build(**given: Any) -> Net:
    torch.manual_seed(3)
    return Net(**given)


@sw.step
def train_step(model, tokens):
    loss = model(tokens)
    model.backward(loss)
    return loss


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def whole_run(model: nn.Module, make: Make, begin: int = 0, end: int = STEPS) -> dict[str, Any]:
    """Torch alone, on the microbatches of all replicas."""
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    losses, gradients = [], {}
    for step in range(begin, end):
        optimizer.zero_grad()
        parts = tokens(step).chunk(2 * MICROBATCHES)
        total = 0.0
        for part in parts:
            loss = model(part) / len(parts)
            loss.backward()
            total += float(loss)
        losses.append(total)
        if step == begin:
            gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return {"losses": losses, "gradients": gradients, "optimizer": optimizer.state_dict(), "state": model.state_dict()}


def start(model: nn.Module, make: Make, **keys: Any) -> tuple[sw.DistributedModel, sw.DistributedOptimizer]:
    sw.init({"microbatches": MICROBATCHES, "ddp": True, "wait_timeout_s": 60.0, **keys})
    wrapped = sw.DistributedModel(model)
    return wrapped, sw.DistributedOptimizer(make([p for p in wrapped.parameters() if p.requires_grad]))


def train(model: sw.DistributedModel, optimizer: Any, begin: int = 0, end: int = STEPS) -> dict[str, Any]:
    losses, gradients = [], {}
    parts = model.runtime.split_model.parts
    for step in range(begin, end):
        optimizer.zero_grad()
        own = tokens(step).chunk(2)[sw.rdp_rank()]
        losses.append(float(train_step(model, own).all_reduce_mean()))
        if step == begin:
            for name, p in sorted(model.local_named_parameters()):
                grad = None if p.grad is None else p.grad.clone()
                flags = torch.tensor([float(grad is not None)])
                dist.all_reduce(flags)
                if float(flags) and parts.is_part(name):
                    grad = parts.whole(name, torch.empty(0) if grad is None else grad)
                gradients[name] = grad
        optimizer.step()
    return {"losses": losses, "gradients": gradients}


def compare(title: str, model: Any, optimizer: Any, found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    same = Comparison(title).losses(found["losses"], expected["losses"])
    same.gradients(found["gradients"], expected["gradients"])
    same.values(model.state_dict(), expected["state"], relative=0.0, absolute=1e-4, what="weights")
    same_states(same, optimizer, expected["optimizer"])
    return same.report()


def same_states(same: Comparison, optimizer: Any, plain: dict[str, Any]) -> None:
    """The whole states by names, counts of steps among them, beside those of torch alone."""
    own = optimizer.state_dict()
    trained = [name for group in own["param_groups"] for name in group["params"]]
    named = {trained[number]: state for number, state in plain["state"].items()}
    assert sorted(own["state"]) == sorted(named), (sorted(own["state"]), sorted(named))
    for name, state in named.items():
        for key, entry in state.items():
            if isinstance(entry, torch.Tensor):
                same.values({key: own["state"][name][key]}, {key: entry}, relative=1e-3, absolute=1e-5, what="states")


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "lamb": lambda ps: Lamb(ps, lr=1e-2),
    "coupled": lambda ps: Coupled(ps, lr=1e-2),
}


class Lamb(torch.optim.Optimizer):
    """A step by the ratio of two norms of the whole parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] * p.norm() / (p.grad.norm() + 1e-6))


class Coupled(torch.optim.Optimizer):
    """A step by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.sub_(p.grad * self.param_groups[0]["lr"] / norm)


class Tower(nn.Module):
    """Layers of one size, each of which is gathered by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + nn.functional.gelu(block(x))
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 37), tokens[:, 1:].reshape(-1))
