"""LAMB and NovoGrad under SageMaker's names: see `workers/fused_optimizers.py` for split models."""

from typing import Any

import pytest
import torch

from shardwright.backends.torch.state.elementwise import is_elementwise
from shardwright.compat.optimizers import FusedLAMB, FusedNovoGrad
from shardwright.core.errors import MissingCapabilityError, ShardwrightError
from tests.comparison import Comparison
from tests.torch.launch import on_ranks

STEPS = 20


@pytest.mark.timeout(600)
def test_norms_are_those_of_whole_parameters() -> None:
    """Over stages, the tensor axis, and sharded states and parameters, 20 steps beside the plain algorithm."""
    outcome = on_ranks("fused_optimizers.py", 2, timeout_s=150)
    assert outcome.code == 0, outcome.text[-4000:]
    assert outcome.text.count("ok ") >= 5, outcome.text[-4000:]


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (4,), (2, 2, 2))]
    return [*made, torch.zeros(3, dtype=torch.float64)]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [10.0 ** (step % 3 - 1) * torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in weights()]


def trained(optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(w) for w in weights()]
    made = optimizer(parameters, lr=0.05, **options)
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        made.step()
        made.zero_grad()
        assert all(p.grad is None for p in parameters)
    return [p.detach() for p in parameters]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.0},
        {"weight_decay": 0.0, "use_nvlamb": True},
        {"adam_w_mode": False, "weight_decay": 0.3},
        {"grad_averaging": False, "bias_correction": False},
        {"max_grad_norm": None, "betas": (0.5, 0.6), "eps": 1e-3},
    ],
    ids=str,
)
def test_lamb(options: dict[str, Any]) -> None:
    given = {
        "weight_decay": 0.01, "use_nvlamb": False, "adam_w_mode": True, "grad_averaging": True, "eps": 1e-6,
        "bias_correction": True, "max_grad_norm": 1.0, "betas": (0.9, 0.999), **options,
    }  # fmt: skip
    (b1, b2), decay = given["betas"], given["weight_decay"]
    w = weights()
    m, v = [0 * one for one in w], [0 * one for one in w]
    for step in range(STEPS):
        g = gradients(step)
        norm = torch.cat([one.flatten() for one in g]).norm()
        if given["max_grad_norm"] and norm > given["max_grad_norm"]:
            g = [one * given["max_grad_norm"] / norm for one in g]
        for i, weight in enumerate(w):
            if not given["adam_w_mode"]:
                g[i] = g[i] + decay * weight
            m[i] = b1 * m[i] + (1 - b1 if given["grad_averaging"] else 1) * g[i]
            v[i] = b2 * v[i] + (1 - b2) * g[i] ** 2
            c1, c2 = (1 - b1 ** (step + 1), 1 - b2 ** (step + 1)) if given["bias_correction"] else (1, 1)
            update = (m[i] / c1) / ((v[i] / c2).sqrt() + given["eps"])
            if given["adam_w_mode"]:
                update = update + decay * weight
            scaled = (decay or given["use_nvlamb"]) and weight.norm() > 0 and update.norm() > 0
            w[i] = weight - 0.05 * (weight.norm() / update.norm() if scaled else 1.0) * update
    Comparison("LAMB").values(trained(FusedLAMB, options), w, relative=1e-9, absolute=1e-12).require()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "reg_inside_moment": True},
        {"init_zero": True, "betas": (0.8, 0.7)},
        {"norm_type": 0, "grad_averaging": False, "betas": (0.8, 0.7)},
        {"bias_correction": False, "eps": 1e-2},
    ],
    ids=str,
)
def test_novograd(options: dict[str, Any]) -> None:
    given = {
        "weight_decay": 0.0, "reg_inside_moment": False, "init_zero": False, "norm_type": 2, "grad_averaging": True,
        "bias_correction": True, "eps": 1e-8, "betas": (0.9, 0.999), **options,
    }  # fmt: skip
    (b1, b2), decay = given["betas"], given["weight_decay"]
    w = weights()
    m, n = [0 * one for one in w], [0.0 for _ in w]
    for step in range(STEPS):
        for i, (weight, g) in enumerate(zip(w, gradients(step), strict=True)):
            norm = float(g.norm() if given["norm_type"] == 2 else g.abs().max())
            if step == 0 and not given["init_zero"]:
                n[i] = norm
            power = 2 if given["norm_type"] == 2 else 1
            n[i] = (b2 * n[i] ** power + (1 - b2) * norm**power) ** (1 / power)
            c1, c2 = (1 - b1 ** (step + 1), 1 - b2 ** (step + 1)) if given["bias_correction"] else (1, 1)
            denominator = n[i] / c2**0.5 + given["eps"]
            inside = g / denominator + decay * weight if given["reg_inside_moment"] else g
            m[i] = b1 * m[i] + (1 - b1 if given["grad_averaging"] else 1) * inside
            update = m[i] / c1
            if not given["reg_inside_moment"]:
                update = update / denominator + decay * weight
            w[i] = weight - 0.05 * update
    Comparison("NovoGrad").values(trained(FusedNovoGrad, options), w, relative=1e-9, absolute=1e-12).require()


def test_what_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    for make, said in (
        (lambda: FusedLAMB([parameter], amsgrad=True), "amsgrad=True"),
        (lambda: FusedNovoGrad([parameter], amsgrad=True), "amsgrad=True"),
    ):
        with pytest.raises(MissingCapabilityError, match=said):
            make()
    for make, said in (
        (lambda: FusedLAMB([parameter], max_grad_norm=0.0), "max_grad_norm=0.0"),
        (lambda: FusedLAMB([parameter], lr=-1.0), "lr=-1.0"),
        (lambda: FusedLAMB([parameter], betas=(0.9, 1.0)), "from 0 to below 1"),
        (lambda: FusedNovoGrad([parameter], norm_type=1), "norm_type=1"),
    ):
        with pytest.raises(ShardwrightError, match=said):
            make()
    table = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = FusedLAMB(table.parameters(), set_grad_none=False)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ShardwrightError, match="takes no gradients of rows"):
        optimizer.step()
    assert is_elementwise(optimizer)
    with pytest.raises(ZeroDivisionError):
        FusedLAMB([parameter]).step(lambda: 1 / 0)
    assert FusedLAMB([parameter]).step(lambda: 3.0) == 3.0
