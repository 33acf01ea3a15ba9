"""The values that units keep for the backward pass, and the units of which it computes something again."""

from typing import Any

import jax

from shardwright.core.plan.plan import Plan

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "scaled_matmul"})
_ATTENTION = "fused_attention"
"""In the name of a primitive that is attention as one kernel."""


def _is_product(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in _PRODUCTS or _ATTENTION in primitive.name


POLICIES: dict[str, Any] = {
    "full": None,
    "selective": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "elementwise": _is_product,
}
"""The values that a unit keeps beside what enters it. "full" recomputation keeps none. "selective" recomputation keeps
products with weights and computes products of activations with activations (attention) again (arXiv 2205.05198, section
5). "elementwise" keeps all products, as `jax.checkpoint_policies.dots_saveable` does, convolutions too."""


def computed_again(plan: Plan) -> tuple[int, ...]:
    """The units of which the backward pass computes something again: under selective recomputation any may be."""
    return tuple(unit for unit, mode in enumerate(plan.unit_modes) if mode not in ("none", "offload"))


def told_apart(plan: Plan) -> tuple[int, ...]:
    """The units whose equations are to be told apart: those that do not keep all, or not on the device."""
    return tuple(unit for unit, mode in enumerate(plan.unit_modes) if mode != "none")
