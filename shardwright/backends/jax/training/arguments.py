"""Checks of the arguments of `train_step`."""

import warnings
from typing import Any

from shardwright.backends.capabilities import JAX as CAPABILITIES
from shardwright.backends.jax.loss.reductions import REDUCTIONS
from shardwright.core.errors import MissingCapabilityError, PlanError
from shardwright.core.plan.plan import Plan


def require_supported(plan: Plan) -> None:
    """Raise PlanError for anything but a plan, MissingCapabilityError for a plan that this runtime does not carry
    out."""
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is {plan!r:.80}: give what sw.plan or sw.Plan.load returned")
    decision = plan.decision
    CAPABILITIES.require_axes({"pp": decision.pp})
    CAPABILITIES.require_on_device(decision.offloaded_units)
    if decision.precision not in ("fp32", "bf16") and plan.is_pinned("precision"):
        raise MissingCapabilityError(
            f"the plan has precision={decision.precision!r}, but the JAX runtime of this version trains in fp32 and "
            "bf16: plan with one of them"
        )


def warn_of_precision(plan: Plan) -> None:
    """Warn of a precision that the plan counts with and that the model is not run in."""
    if plan.decision.precision != "fp32" and not plan.is_pinned("precision"):
        warnings.warn(
            f"the plan counts on {plan.decision.precision}, which nobody pinned: the model runs as it is, so time and "
            f"memory may differ from what was predicted; pin precision={plan.decision.precision!r} to compute in it",
            stacklevel=4,
        )


def require_functions(loss_fn: Any, optimizer: Any, reduction: Any) -> None:
    """Raise PlanError for a loss function, an optimizer or a reduction that is none."""
    if not callable(loss_fn):
        raise PlanError(f"loss_fn is {loss_fn!r:.80}: give a function of (params, batch), or of (model, batch)")
    if isinstance(optimizer, type) or not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise PlanError(f"optimizer is {optimizer!r:.80}: give an optax transformation, as optax.adam(1e-3)")
    if reduction not in REDUCTIONS:
        raise PlanError(f"reduction={reduction!r:.80}: expected 'mean', 'sum' or None")


def require_size(plan: Plan, samples: int) -> None:
    """Raise PlanError for a batch that has not as many samples as the plan's."""
    decision = plan.decision
    if samples != decision.batch:
        raise PlanError(
            f"a batch of {samples} samples was given, and the plan is for {decision.batch} (dp {decision.dp} × "
            f"microbatch {decision.microbatch} × {plan.microbatches} microbatches): give {decision.batch}, or "
            f"plan with batch={samples}"
        )
