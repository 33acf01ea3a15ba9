"""Checks of the arguments of `train_step`."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from shardwright.backends.capabilities import JAX as CAPABILITIES
from shardwright.backends.jax.loss.reductions import REDUCTIONS
from shardwright.core.errors import MissingCapabilityError, PlanError, PlanWarning
from shardwright.core.model.loss.scaling import LossScale, loss_scale_of
from shardwright.core.plan.plan import Plan

FP8_CAPABILITY = (8, 9)
"""The first compute capability of GPUs with products in fp8."""


def require_supported(plan: Plan) -> None:
    """Raise PlanError for anything but a plan, MissingCapabilityError for a plan that this runtime does not carry
    out."""
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is {plan!r:.80}: give what sw.plan or sw.Plan.load returned")
    decision = plan.decision
    CAPABILITIES.require_axes({"pp": decision.pp})
    CAPABILITIES.require_on_device(decision.offloaded_units)
    CAPABILITIES.require_modes(decision.other_recompute)
    CAPABILITIES.require_states(decision.offload_states)
    if decision.activation_loading_horizon > 1:
        raise MissingCapabilityError(
            f"the plan has activation_loading_horizon={decision.activation_loading_horizon}, and in the jax runtime of "
            f"this version what a stage keeps on the host comes back at once: plan again without it"
        )
    CAPABILITIES.require_residency(decision.shard, decision.gathered_stages, decision.reduce_after)
    if decision.slice_count > 1 and decision.tp > 1 and decision.sequence_parallel:
        raise MissingCapabilityError(
            f"the plan has {decision.slice_count} slices and sequence_parallel=True, and the jax runtime of this "
            f"version does not divide slices over the tensor axis: plan with sequence_parallel=False, or without slices"
        )
    if decision.slice_count > 1 and decision.fp8_weights:
        raise MissingCapabilityError(
            f"the plan has {decision.slice_count} slices and products in fp8, whose scales are of whole sequences in "
            f"the jax runtime of this version: plan for 'bf16', or without slices"
        )


def require_fp8(plan: Plan, devices: Sequence[jax.Device]) -> None:
    """Raise MissingCapabilityError for a plan with products in fp8 on a GPU that has none. CPUs and TPUs compute the
    same numbers in bf16."""
    if not plan.decision.fp8_weights:
        return
    for device in devices:
        major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
        if device.platform != "gpu" or not (major.isdigit() and minor.isdigit()):
            continue
        if (int(major), int(minor)) < FP8_CAPABILITY:
            raise MissingCapabilityError(
                f"the plan computes products in fp8, and {device.device_kind} has none (compute capability "
                f"{major}.{minor}, and {'.'.join(map(str, FP8_CAPABILITY))} is the first that has them): plan for "
                f"'bf16', which this device computes"
            )


def loss_scale_rule(plan: Plan, static: Any, dynamic: Any, given: Mapping[str, Any] | None) -> LossScale | None:
    """The rule of the factor of the loss; None but in float16. Raises ShardwrightError for arguments that are not
    possible, and for a factor in another precision."""
    if not isinstance(static, int | float) or isinstance(static, bool):
        raise PlanError(f"static_loss_scale={static!r:.80}: expected a number")
    if not isinstance(dynamic, bool):
        raise PlanError(f"dynamic_loss_scale={dynamic!r:.80}: expected True or False")
    if given is not None and not isinstance(given, Mapping):
        raise PlanError(f"dynamic_loss_args={given!r:.80}: expected a dict, as {{'scale_window': 500}}")
    rule = loss_scale_of(static, dynamic, given or {})
    precision = plan.decision.precision
    if precision == "fp16":
        return rule or LossScale()
    if rule is not None:
        said = "dynamic_loss_scale=True" if dynamic else f"static_loss_scale={static}"
        raise PlanError(
            f"{said} was given, and the plan's precision is {precision!r}: losses are scaled in float16, whose "
            "smallest numbers are not small enough for gradients; leave it out, or plan with precision='fp16'"
        )
    return None


def say_precision(plan: Plan, rule: LossScale | None) -> None:
    """Warn of 16 bits that nobody asked for, and of float16 in which small gradients vanish."""
    precision = plan.decision.precision
    if precision != "fp32" and not plan.is_pinned("precision"):
        warnings.warn(
            f"steps compute in {precision}, as the plan's devices are faster in it and nobody pinned a precision; "
            f"parameters stay float32 between steps. precision={precision!r} says that it is meant, precision='fp32' "
            "computes in the model's own precision",
            PlanWarning,
            stacklevel=4,
        )
    if rule is not None and not rule.is_dynamic and rule.scale == 1.0:
        warnings.warn(
            "the plan computes in float16 and losses are not scaled, so that small gradients become zero: give "
            "train_step dynamic_loss_scale=True, or a static_loss_scale",
            PlanWarning,
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
