"""The values that units keep for the backward pass, and the units of which it computes something again."""

from typing import Any

import jax

from shardwright.core.plan.plan import Plan

POLICIES: dict[str, Any] = {"full": None, "selective": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
"""The values that a unit keeps beside what enters it. "full" recomputation keeps none. "selective" recomputation keeps
products with weights and computes products of activations with activations (attention) again (arXiv 2205.05198, section
5)."""


def computed_again(plan: Plan) -> tuple[int, ...]:
    """The units of which the backward pass computes something again: under selective recomputation any may be."""
    every = tuple(range(len(plan.model.unit_classes)))
    return every if plan.decision.recompute == "selective" else plan.recomputed_units
