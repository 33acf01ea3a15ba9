"""``smp.optimizers``: LAMB and NovoGrad as NVIDIA's fused optimizers have them, by torch's own operations.

Both scale the step of each parameter by norms of it, which are those of the whole parameter on every rank, however it
is cut: `DistributedOptimizer` gives them `norms`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardwright.backends.torch.state.whole_norms import LocalNorms
from shardwright.compat.names import refused
from shardwright.core.errors import MissingCapabilityError, ShardwrightError
from shardwright.torch.session import current, is_initialized

__all__ = ["FusedLAMB", "FusedNovoGrad"]


class _ByNorms(torch.optim.Optimizer):
    """An optimizer whose steps depend on norms of whole tensors, and otherwise on single entries."""

    takes_whole_norms = True
    norms: LocalNorms | None = None
    """The norms over all ranks, where a `DistributedOptimizer` has it."""

    def _require_possible(self, amsgrad: bool, betas: tuple[float, float], **numbers: float) -> None:
        name = type(self).__name__
        if amsgrad:
            raise MissingCapabilityError(f"{name}(amsgrad=True) is not there, as in NVIDIA's: leave amsgrad out")
        if not all(isinstance(beta, int | float) and 0.0 <= beta < 1.0 for beta in betas) or len(betas) != 2:
            raise ShardwrightError(f"{name}(betas={betas!r}): expected two numbers from 0 to below 1")
        for key, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0.0:
                raise ShardwrightError(f"{name}({key}={value!r}): expected a number of at least 0")

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset the gradients, to None as ``set_grad_none`` says where it is not said here."""
        super().zero_grad(self.defaults["set_grad_none"] if set_to_none is None else set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from their gradients. Returns what the closure returned.

        Raises ShardwrightError for gradients of rows, and for parameters of a split model outside of
        `DistributedOptimizer`, which knows the norms of whole parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            raise ShardwrightError(f"{type(self).__name__} takes no gradients of rows: leave sparse=True out")
        if self.norms is None and is_initialized() and current().bound.mesh.size > 1:
            owned = any(run.runtime.ownership.name_of(p) for run in current().models for p in parameters)
            if owned:
                raise ShardwrightError(
                    f"{type(self).__name__} has parameters of a split model, whose norms are those of all ranks: wrap "
                    f"it, DistributedOptimizer(optimizer)"
                )
        with torch.no_grad():
            self._update(parameters, LocalNorms() if self.norms is None else self.norms)
        return loss

    def _update(self, parameters: list[torch.Tensor], norms: LocalNorms) -> None:
        raise NotImplementedError


class FusedLAMB(_ByNorms):
    """LAMB (arXiv 1904.00962), with the arguments of NVIDIA's ``apex.optimizers.FusedLAMB``.

    Args:
        bias_correction: whether moments are divided by 1 - beta ** step.
        adam_w_mode: whether the decay of weights is a term of the step; False: of the gradient.
        grad_averaging: whether the first moment takes gradients times 1 - beta1, or whole.
        set_grad_none: whether `zero_grad` sets gradients to None.
        max_grad_norm: the norm of all gradients of this optimizer to which they are clipped; None: they are not.
        use_nvlamb: whether the steps of groups without decay of weights are scaled by the trust ratio too.

    Raises:
        MissingCapabilityError: ``amsgrad``.
        ShardwrightError: a value that is not possible.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01, amsgrad: bool = False,
        adam_w_mode: bool = True, grad_averaging: bool = True, set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0, use_nvlamb: bool = False,
    ) -> None:  # fmt: skip
        self._require_possible(amsgrad, betas, lr=lr, eps=eps, weight_decay=weight_decay)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ShardwrightError(f"FusedLAMB(max_grad_norm={max_grad_norm!r}): expected a norm above 0, or None")
        super().__init__(params, {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode, "grad_averaging": grad_averaging, "set_grad_none": set_grad_none,
            "max_grad_norm": max_grad_norm, "use_nvlamb": use_nvlamb, "step": 0,
        })  # fmt: skip

    def _update(self, parameters: list[torch.Tensor], norms: LocalNorms) -> None:
        total = norms.total(parameters, norms.each(parameters, [p.grad for p in parameters]))
        updates: list[torch.Tensor | None] = []
        for group in self.param_groups:
            group["step"] += 1
            most = group["max_grad_norm"]
            scale = None if most is None else (most / total).clamp(max=1.0)
            updates += [self._direction(p, group, scale) for p in group["params"]]
        moved = [None if update is None else p for p, update in zip(parameters, updates, strict=True)]
        of_both = norms.each([*parameters, *parameters], [*moved, *updates])
        of_weights, of_updates = of_both.chunk(2)
        ratios = torch.where((of_weights > 0) & (of_updates > 0), of_weights / of_updates, 1.0)
        place = 0
        for group in self.param_groups:
            is_scaled = bool(group["weight_decay"]) or group["use_nvlamb"]
            for p in group["params"]:
                update = updates[place]
                if update is not None:
                    rate = group["lr"] * ratios[place].to(p.device) if is_scaled else group["lr"]
                    p.sub_((update * rate).to(p.dtype))
                place += 1

    def _direction(self, p: torch.Tensor, group: dict[str, Any], scale: torch.Tensor | None) -> torch.Tensor | None:
        """The step of a parameter before it is scaled; None where this rank has nothing to update."""
        if p.grad is None or not p.numel():
            return None
        state = self.state[p]
        dtype = torch.float64 if p.dtype is torch.float64 else torch.float32
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p, dtype=dtype) for _ in range(2))
        first, second = group["betas"]
        decay, weight = group["weight_decay"], p.to(dtype)
        gradient = p.grad.to(dtype)
        if scale is not None:
            gradient = gradient * scale.to(p.device, dtype)
        if decay and not group["adam_w_mode"]:
            gradient = gradient + decay * weight
        state["exp_avg"].mul_(first).add_(gradient, alpha=1.0 - first if group["grad_averaging"] else 1.0)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        of_first, of_second = _corrections(group)
        update: torch.Tensor = (state["exp_avg"] / of_first) / (
            (state["exp_avg_sq"] / of_second).sqrt_() + group["eps"]
        )
        return update.add_(weight, alpha=decay) if decay and group["adam_w_mode"] else update


class FusedNovoGrad(_ByNorms):
    """NovoGrad (arXiv 1905.11286), with the arguments of NVIDIA's ``apex.optimizers.FusedNovoGrad``.

    Args:
        bias_correction: whether moments are divided by 1 - beta ** step.
        reg_inside_moment: whether the first moment is of gradients that are divided by their norm, and with the decay
            of weights; False: both are terms of the step.
        grad_averaging: whether the first moment takes gradients times 1 - beta1, or whole.
        norm_type: of the gradient of a parameter: 2, or 0 for the largest absolute value.
        init_zero: whether the average of norms begins with 0; False: with the first norm.
        set_grad_none: whether `zero_grad` sets gradients to None.

    Raises:
        MissingCapabilityError: ``amsgrad``.
        ShardwrightError: a value that is not possible.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False,
        reg_inside_moment: bool = False, grad_averaging: bool = True, norm_type: int = 2, init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        self._require_possible(amsgrad, betas, lr=lr, eps=eps, weight_decay=weight_decay)
        if norm_type not in (0, 2):
            raise ShardwrightError(f"FusedNovoGrad(norm_type={norm_type!r}): expected 2, or 0 for the largest entry")
        super().__init__(params, {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "reg_inside_moment": reg_inside_moment, "grad_averaging": grad_averaging, "norm_type": norm_type,
            "init_zero": init_zero, "set_grad_none": set_grad_none, "step": 0,
        })  # fmt: skip

    def _update(self, parameters: list[torch.Tensor], norms: LocalNorms) -> None:
        gradients = [p.grad for p in parameters]
        kinds = sorted({group["norm_type"] for group in self.param_groups})
        found = {kind: norms.each(parameters, gradients, 2.0 if kind else float("inf")) for kind in kinds}
        place = 0
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._move(p, group, found[group["norm_type"]][place].to(p.device))
                place += 1

    def _move(self, p: torch.Tensor, group: dict[str, Any], norm: torch.Tensor) -> None:
        assert p.grad is not None
        state = self.state[p]
        dtype = torch.float64 if p.dtype is torch.float64 else torch.float32
        if not state:
            state["exp_avg"] = torch.zeros_like(p, dtype=dtype)
            state["norm"] = torch.zeros_like(norm) if group["init_zero"] else norm.clone()
        first, second = group["betas"]
        if group["norm_type"] == 2:
            state["norm"] = (second * state["norm"].square() + (1.0 - second) * norm.square()).sqrt()
        else:
            state["norm"] = second * state["norm"] + (1.0 - second) * norm
        of_first, of_second = _corrections(group)
        divisor = state["norm"] / of_second**0.5 + group["eps"]
        weight, gradient, decay = p.to(dtype), p.grad.to(dtype), group["weight_decay"]
        if group["reg_inside_moment"]:
            gradient = gradient / divisor + decay * weight
        state["exp_avg"].mul_(first).add_(gradient, alpha=1.0 - first if group["grad_averaging"] else 1.0)
        update = state["exp_avg"] / of_first
        if not group["reg_inside_moment"]:
            update = update / divisor + decay * weight
        p.sub_((update * group["lr"]).to(p.dtype))


def _corrections(group: dict[str, Any]) -> tuple[float, float]:
    """What the two moments of a group are divided by."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    first, second = group["betas"]
    return 1.0 - first ** group["step"], 1.0 - second ** group["step"]


def __getattr__(name: str) -> object:
    raise refused(f"optimizers.{name}")
