"""The choice between the forms of training."""

from collections.abc import Callable, Sequence

import jax
import optax

from shardwright.backends.jax.loss.microbatches import LossFunction
from shardwright.backends.jax.pipeline.sentinels import Answer
from shardwright.backends.jax.training.one_program import OneProgramTraining
from shardwright.backends.jax.training.pipelined import PipelinedTraining
from shardwright.backends.jax.training.protocol import Training
from shardwright.backends.jax.training.spmd import SpmdTraining
from shardwright.core.errors import MissingCapabilityError
from shardwright.core.model.loss.scaling import LossScale
from shardwright.core.plan.plan import Plan

Form = Callable[
    [LossFunction, optax.GradientTransformation, Plan, Sequence[jax.Device], Answer, LossScale | None], Training
]


def form_of(plan: Plan, one_program: bool, *, is_module: bool) -> Form:
    """The form for a plan. ``one_program``: whether stages are one SPMD program. ``is_module``: whether the trained
    model is an NNX module. Raises MissingCapabilityError for one program with slices."""
    decision = plan.decision
    if one_program and decision.slice_count > 1:
        raise MissingCapabilityError(
            f"one_program=True was given, and the plan has {decision.slice_count} slices of each sequence, which run "
            f"as the actions of a pipeline: leave out one_program, or plan without slices"
        )
    if decision.pp * decision.virtual_stages == 1:
        # No module of a plain function can be told to run again, but the units of its program can, on one stage.
        # Nor can a module be told to keep something on the host.
        by_units = decision.offloaded_units or (decision.recompute != "none" and not is_module)
        by_units = by_units or decision.slice_count > 1
        return PipelinedTraining if by_units else OneProgramTraining
    return SpmdTraining if one_program else PipelinedTraining
