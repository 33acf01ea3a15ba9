"""Checks that a model and a state of training are those of a plan."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardwright.backends.jax.capture.precision import between_steps
from shardwright.backends.jax.capture.tree import Parts, path_names
from shardwright.core.errors import PlanError
from shardwright.core.plan.plan import Plan

NAMED_DEVICES = 8
"""The most devices that an error names."""


def require_model(plan: Plan, parts: Parts) -> None:
    """Raise PlanError unless these are the plan's parameters: as many entries under the same names, with gradients."""
    plan.require_model("jax", parts.names, "the model given to init")
    leaves = dict(zip(parts.names, jax.tree.leaves(parts.params), strict=True))
    for name, leaf in leaves.items():
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        if isinstance(kind, str) or not jnp.issubdtype(kind, jnp.inexact):
            raise PlanError(
                f"parameter {name} is {kind}, which has no gradient: give it as a floating array, or keep it in the "
                "state or the batch"
            )
    for unit, bound in enumerate(plan.binding("jax").units):
        slots = dict(plan.model.class_slots[plan.model.unit_classes[unit]])
        for role, name, _ in bound.parameters:
            if math.prod(slots[role]) != math.prod(leaves[name].shape):
                raise PlanError(
                    f"parameter {name} has shape {leaves[name].shape}, and the plan is for a model where it has "
                    f"{math.prod(slots[role])} entries {slots[role]}: capture this model and plan again"
                )


def require_like(found: Any, expected: Any) -> None:
    """Raise PlanError unless the leaves of a state's tree have the shapes and dtypes of those expected."""
    named, shapes = path_names(found), jax.tree.leaves(expected)
    another = "it is another plan's; give its parameters, train.params(state), to this plan's init"
    if len(named) != len(shapes):
        raise PlanError(
            f"the state has {len(named)} arrays where one of this plan and optimizer has {len(shapes)}: {another}"
        )
    for (name, leaf), shape in zip(named, shapes, strict=True):
        if (leaf.shape, leaf.dtype) != (shape.shape, shape.dtype):
            raise PlanError(
                f"array {name} of the state is {leaf.dtype}{list(leaf.shape)} where one of this "
                f"plan and optimizer has {shape.dtype}{list(shape.shape)}: {another}"
            )


def require_wide(names: Sequence[str], params: Any, trained: Sequence[bool], compute: Any) -> None:
    """Raise PlanError unless parameters that are trained are float32 between steps that compute in ``compute``."""
    wanted = jax.tree.leaves(between_steps(jax.eval_shape(lambda: params), trained, compute))
    for name, leaf, shape in zip(names, jax.tree.leaves(params), wanted, strict=True):
        if leaf.dtype != shape.dtype:
            raise PlanError(
                f"parameter {name} of the state is {leaf.dtype}, and this plan computes in {compute} beside parameters "
                f"in {shape.dtype}: it is another plan's; give its parameters, train.params(state), to this plan's init"
            )


def require_places(arrays: Any, shardings: Any) -> None:
    """Raise PlanError unless the arrays of a state have the shardings of this plan: trees of one structure."""
    named, places = path_names(arrays), jax.tree.leaves(shardings)
    for (name, leaf), at in zip(named, places, strict=True):
        if not isinstance(leaf, jax.Array) or not leaf.sharding.is_equivalent_to(at, leaf.ndim):
            found = _described(leaf.sharding) if isinstance(leaf, jax.Array) else "in the host's memory"
            raise PlanError(
                f"array {name} of the state is {found} where this plan keeps it "
                f"{_described(at)}: the state is another plan's, or was moved; put it there with "
                "state = train.place(state)"
            )


def _described(sharding: jax.sharding.Sharding) -> str:
    """A text of a sharding with its devices, which JAX does not say of a NamedSharding."""
    devices: list[jax.Device] = sorted(sharding.device_set, key=lambda device: device.id)
    named = ", ".join(f"{device.platform}:{device.id}" for device in devices[:NAMED_DEVICES])
    more = f" and {len(devices) - NAMED_DEVICES} more" if len(devices) > NAMED_DEVICES else ""
    split = f"{sharding.spec} over {dict(sharding.mesh.shape)}" if isinstance(sharding, NamedSharding) else sharding
    return f"on {named}{more} as {split}"
