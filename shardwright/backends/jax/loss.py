"""The loss of one step: microbatches one after the other, replicas beside each other, combined by weight."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.backends.jax.convolutions import for_cpu_loops
from shardwright.backends.jax.recompute import computed_again
from shardwright.backends.jax.state import Parts, TrainState, fold_random, put_together, take_apart
from shardwright.backends.jax.trace import Recorder, linen_calls, nnx_calls, recomputed
from shardwright.core.errors import PlanError
from shardwright.core.plan import Plan

Loss = tuple[jax.Array, jax.Array, Any]
"""Loss, weight, and the state beside the parameters."""


@dataclass(frozen=True, slots=True)
class LossFunction:
    """A user's loss function made uniform: (params, random, other, graphdef, batch) → (loss, weight, other)."""

    function: Callable[..., Any]
    keywords: frozenset[str]
    """Which of ``rngs`` and ``state`` it takes."""
    precision: str
    recompute: str
    blocks: frozenset[str]
    """The modules whose calls are computed again in the backward pass: those of the plan's units."""
    recorder: Recorder | None = None
    """Marks module calls, for a program that is cut."""
    laid_out: Callable[..., Loss] | None = None
    """Takes this function and its arguments, and runs it with its values laid out as the plan says."""

    @classmethod
    def of(cls, function: Callable[..., Any], plan: Plan) -> "LossFunction":
        """Under a plan that is bound to JAX."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            parameters = {}.values()
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        names = {p.name for p in parameters}
        keywords = frozenset({"rngs", "state"} if open_ended else names & {"rngs", "state"})
        units = plan.binding("jax").units
        blocks = frozenset(call.path for unit in computed_again(plan) for call in units[unit].calls)
        # A precision that nobody asked for is what the planner counted with, not an order to change the model.
        precision = plan.decision.precision if plan.is_pinned("precision") else "as given"
        # A pipeline recomputes by stage and unit, whatever the model is made of.
        recompute = plan.decision.recompute if plan.decision.pp == 1 else "none"
        return cls(function, keywords, precision, recompute, blocks)

    def __call__(self, params: Any, random: Any, other: Any, graphdef: Any, batch: Any) -> Loss:
        if self.laid_out is not None:
            return self.laid_out(self, params, random, other, graphdef, batch)
        return self.plain(params, random, other, graphdef, batch)

    def plain(self, params: Any, random: Any, other: Any, graphdef: Any, batch: Any) -> Loss:
        """The function as the user wrote it."""
        if self.precision == "bf16":
            params = jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.dtype == jnp.float32 else p, params)
        if graphdef is not None:
            model = put_together(Parts(params, random, other, graphdef))
            marking = nnx_calls(model, self.recorder) if self.recorder else nullcontext()
            with marking, recomputed(model, self.blocks, self.recompute):
                loss, weight, _ = _three(self.function(model, batch))
            return loss, weight, take_apart(model, 0, None).other
        extra = {name: value for name, value in (("rngs", random), ("state", other)) if name in self.keywords}
        with linen_calls(self.recorder) if self.recorder else nullcontext():
            loss, weight, changed = _three(self.function(params, batch, **extra))
        return loss, weight, other if changed is None else changed


def _three(returned: Any) -> Loss:
    """``loss``, ``(loss, weight)`` or ``(loss, weight, state)`` as the last."""
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise PlanError(
            f"the loss function returned {len(parts)} values: expected loss, (loss, weight) or (loss, weight, state)"
        )
    loss, weight, state = [*parts, None, None][:3]
    for name, value in (("loss", loss), ("weight", 1.0 if weight is None else weight)):
        if not jnp.isscalar(value) and not hasattr(value, "dtype"):
            raise PlanError(
                f"the loss function returned a {name} that is a {type(value).__name__}: expected loss, (loss, weight) "
                "or (loss, weight, state), the first two one number each; metrics are for a function of their own"
            )
        if jnp.shape(value) != ():
            raise PlanError(f"the loss function returned a {name} of shape {jnp.shape(value)}: expected one number")
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise PlanError(f"the loss function returned a loss of {jnp.result_type(loss)}: expected a floating number")
    return (
        jnp.asarray(loss, jnp.float32),
        jnp.asarray(1.0 if weight is None else weight, jnp.float32),
        state,
    )


@dataclass(frozen=True, slots=True)
class Microbatches:
    """A global batch as microbatches, and the loss of the m-th of them.

    Replica r of dp holds the r-th of dp equal pieces of the batch, and microbatch m is the m-th piece of that: global
    microbatch r · microbatches + m. ``per_replica`` runs the loss function on every replica's microbatch by itself;
    otherwise (loss scope "global") on the m-th microbatches of all replicas together.
    """

    loss: LossFunction
    graphdef: Any
    structure: Any
    """Of the batch as a pytree; its leaves are handed over one by one."""
    dims: tuple[int | None, ...]
    """The batch dim of every leaf."""
    replicas: int
    microbatches: int
    per_replica: bool

    def split(self, leaf: Any, dim: int | None) -> Any:
        """[…, batch, …] → [microbatch, replica, samples, …]; arrays without a batch dim as they are."""
        if dim is None:
            return leaf
        numbers: Any = jnp if isinstance(leaf, jax.Array) else np
        front = numbers.moveaxis(numbers.asarray(leaf), dim, 0)
        pieces = front.reshape(self.replicas, self.microbatches, -1, *front.shape[1:])
        return numbers.moveaxis(pieces, 1, 0)

    def take(self, split: Sequence[Any], m: Any) -> list[Any]:
        """The m-th microbatches, stacked over replicas."""
        return [leaf if dim is None else leaf[m] for leaf, dim in zip(split, self.dims, strict=True)]

    def total(
        self, params: Any, random: Any, step: Any, other: Any, m: Any, part: Sequence[Any]
    ) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        """Σ weight · loss over replicas, Σ weight, and the other state after it."""

        def one(replica: Any, pieces: list[Any]) -> Loss:
            restored = [_restore(piece, dim) for piece, dim in zip(pieces, self.dims, strict=True)]
            folded = fold_random(random, step, replica * self.microbatches + m)
            batch = jax.tree.unflatten(self.structure, restored)
            loss, weight, after = self.loss(params, folded, other, self.graphdef, batch)
            leaves = zip(jax.tree.leaves(after), given, strict=False)
            kept.append({number for number, (new, old) in enumerate(leaves) if new is old})
            return loss, weight, after

        given = jax.tree.leaves(other)
        kept: list[set[int]] = []
        """Which of the other values come out as they went in."""
        if self.per_replica and self.replicas > 1:
            over = [None if dim is None else 0 for dim in self.dims]
            run = jax.vmap(one, in_axes=(0, over), spmd_axis_name="dp")
            losses, weights, after = run(jnp.arange(self.replicas), list(part))
            leaves, structure = jax.tree.flatten(after)
            merged = [given[i] if i in kept[-1] else _over_replicas(leaf) for i, leaf in enumerate(leaves)]
            after = jax.tree.unflatten(structure, merged)
        else:
            joined = [p if dim is None else p.reshape(-1, *p.shape[2:]) for p, dim in zip(part, self.dims, strict=True)]
            losses, weights, after = one(0, joined)
        weights = jax.lax.stop_gradient(weights)
        return jnp.sum(losses * weights), (jnp.sum(weights), after)


def accumulate(
    batch: Microbatches, state: TrainState, leaves: Sequence[Any], *, mesh: jax.sharding.Mesh, gradients_at: Any
) -> tuple[jax.Array, Any, Any]:
    """Loss and gradients of a global batch, and the model's other state after it, in one program."""
    along_dp = NamedSharding(mesh, PartitionSpec(None, "dp"))
    split = [
        leaf if dim is None else jax.lax.with_sharding_constraint(batch.split(leaf, dim), along_dp)
        for leaf, dim in zip(leaves, batch.dims, strict=True)
    ]
    gradient = jax.value_and_grad(batch.total, has_aux=True)

    def one_microbatch(carry: Any, m: Any) -> tuple[Any, None]:
        loss_sum, weight_sum, gradients, other = carry
        (value, (weight, other)), found = gradient(
            state.params, state.random, state.step, other, m, batch.take(split, m)
        )
        gradients = jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradients, found)
        gradients = jax.lax.with_sharding_constraint(gradients, gradients_at)
        return (loss_sum + value, weight_sum + weight, gradients, other), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, accumulated_dtype(p)), state.params)
    start = (jnp.zeros(()), jnp.zeros(()), jax.lax.with_sharding_constraint(zeros, gradients_at), state.other)
    if batch.microbatches == 1:
        (loss_sum, weight_sum, gradients, other), _ = one_microbatch(start, 0)
    else:
        numbers = jnp.arange(batch.microbatches)
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        body = for_cpu_loops(one_microbatch, start, numbers[0]) if on_cpu else one_microbatch
        (loss_sum, weight_sum, gradients, other), _ = jax.lax.scan(body, start, numbers)
    mean = jax.tree.map(lambda g, p: (g / weight_sum).astype(p.dtype), gradients, state.params)
    return loss_sum / weight_sum, mean, other


def accumulated_dtype(parameter: Any) -> Any:
    """In which the gradients of a parameter add up: at least fp32."""
    return jnp.promote_types(parameter.dtype, jnp.float32)


def updated(optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any, loss: Any) -> Any:
    """An optimizer's updates and state; those that follow the loss (optax.contrib.reduce_on_plateau) are given it."""
    return optax.with_extra_args_support(optimizer).update(gradients, state, params, value=loss)


def _restore(piece: Any, dim: int | None) -> Any:
    return piece if dim is None else jnp.moveaxis(piece, 0, dim)


def _over_replicas(leaf: jax.Array) -> jax.Array:
    """One value of what every replica changed by itself: the mean of numbers, the first of anything else."""
    return leaf.mean(0) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf[0]
