"""LAMB and NovoGrad on two ranks, beside the same written out for whole parameters in one process."""

import math
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from launched import run_checks

import shardwright.torch as sw
from shardwright.compat.optimizers import FusedLAMB, FusedNovoGrad
from shardwright.core.errors import MissingCapabilityError, ShardwrightError
from tests.comparison import Comparison

STEPS = 20
LAMB: dict[str, Any] = {"lr": 2e-2, "weight_decay": 0.05, "max_grad_norm": 0.5}
NOVOGRAD: dict[str, Any] = {"lr": 2e-2, "weight_decay": 0.02, "betas": (0.9, 0.95)}
Update = Callable[[int, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]], None]


@sw.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss)
    return loss


def lamb(step: int, weights: dict[str, torch.Tensor], grads: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    """The paper's algorithm 2 with a clip by the global norm, in double precision."""
    b1, b2, decay = 0.9, 0.999, LAMB["weight_decay"]
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads.values()))
    for name, weight in weights.items():
        g = grads[name].double() * min(1.0, LAMB["max_grad_norm"] / norm)
        m, v = state.get(name, (0.0, 0.0))
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        state[name] = m, v
        r = (m / (1 - b1**step)) / ((v / (1 - b2**step)) ** 0.5 + 1e-6) + decay * weight.double()
        of_weight, of_step = float(weight.double().norm()), float(r.norm())
        trust = of_weight / of_step if of_weight > 0 and of_step > 0 else 1.0
        weight -= (LAMB["lr"] * trust * r).float()


def novograd(
    step: int, weights: dict[str, torch.Tensor], grads: dict[str, torch.Tensor], state: dict[str, Any]
) -> None:
    """The paper's algorithm 1 with bias corrections, the decay of weights a term of the step, in double precision."""
    b1, b2 = NOVOGRAD["betas"]
    for name, weight in weights.items():
        g = grads[name].double()
        square = float((g**2).sum())
        m, v = state.get(name, (0.0, square))
        v = b2 * v + (1 - b2) * square
        m = b1 * m + (1 - b1) * g
        state[name] = m, v
        denominator = math.sqrt(v) / math.sqrt(1 - b2**step) + 1e-8
        weight -= (NOVOGRAD["lr"] * ((m / (1 - b1**step)) / denominator + NOVOGRAD["weight_decay"] * weight)).float()


KINDS: dict[str, tuple[Update, Callable[[Any], torch.optim.Optimizer]]] = {
    "LAMB": (lamb, lambda params: FusedLAMB(params, **LAMB)),
    "NovoGrad": (novograd, lambda params: FusedNovoGrad(params, **NOVOGRAD)),
}


def built() -> torch.nn.Module:
    torch.manual_seed(0)
    return models.build("gpt2")


def batch(step: int, replica: int = 0, replicas: int = 1) -> dict[str, torch.Tensor]:
    return {key: tensor.chunk(replicas)[replica] for key, tensor in models.batch("gpt2", step % 4, 8).items()}


def plain(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and weights of one process."""
    if kind not in PLAIN:
        model, state, losses = built(), {}, []
        for step in range(STEPS):
            model.zero_grad()
            loss = model(**batch(step)).loss
            loss.backward()
            weights = dict(model.named_parameters())
            with torch.no_grad():
                KINDS[kind][0](step + 1, weights, {name: p.grad for name, p in weights.items()}, state)
            losses.append(loss.item())
        PLAIN[kind] = losses, model.state_dict()
    return PLAIN[kind]


PLAIN: dict[str, tuple[list[float], dict[str, torch.Tensor]]] = {}


def under(*kinds: str, **config: Any) -> None:
    for kind in kinds:
        make = KINDS[kind][1]
        sw.init({"microbatches": 2, "log_every": 0, **config})
        model = sw.DistributedModel(built())
        optimizer = sw.DistributedOptimizer(make(model.parameters()))
        losses = []
        for step in range(STEPS):
            if step == STEPS // 2:  # states are whole, and go on from where they were
                state = optimizer.state_dict()
                optimizer = sw.DistributedOptimizer(make(model.parameters()))
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            losses.append(float(train_step(model, batch(step, sw.rdp_rank(), sw.rdp_size())).all_reduce_mean()))
            optimizer.step()
        wanted, weights = plain(kind)
        found = Comparison(f"{kind} under {config}").losses(losses, wanted, moving=0.1)
        found.values(model.state_dict(), weights, relative=2e-3, absolute=2e-4).require()
        sw.shutdown()


def stages() -> None:
    under("LAMB", pipeline_parallel_degree=2)


def tensor_axis() -> None:
    under("LAMB", "NovoGrad", tensor_parallel_degree=2)


def sharded_states() -> None:
    under("NovoGrad", ddp=True, shard=1)


def sharded_parameters() -> None:
    under("LAMB", ddp=True, shard=3)


def what_is_refused() -> None:
    sw.init({"tensor_parallel_degree": 2, "log_every": 0})
    model = sw.DistributedModel(built())
    alone = FusedLAMB(model.parameters())
    with pytest.raises(ShardwrightError, match=r"FusedLAMB has parameters of a split model.*DistributedOptimizer"):
        alone.step()
    sw.shutdown()
    sw.init({"ddp": True, "offload_states": "optimizer", "log_every": 0})
    model = sw.DistributedModel(built())
    optimizer = sw.DistributedOptimizer(FusedNovoGrad(model.parameters()))
    train_step(model, batch(0, sw.rdp_rank(), 2))
    with pytest.raises(MissingCapabilityError, match="offload_states steps parameters in parts, and FusedNovoGrad"):
        optimizer.step()
    sw.shutdown()


if __name__ == "__main__":
    run_checks((stages, tensor_axis, sharded_states, sharded_parameters, what_is_refused))
