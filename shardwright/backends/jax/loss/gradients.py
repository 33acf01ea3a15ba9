"""The gradients of a global batch in one program: microbatch after microbatch, added up in at least float32."""

from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.backends.jax.loss.gradients_in_turn import gradients_in_turn
from shardwright.backends.jax.loss.microbatches import Microbatches
from shardwright.backends.jax.program.convolutions import for_cpu_loops
from shardwright.backends.jax.state.shardings import axes_of
from shardwright.backends.jax.state.train_state import TrainState


class Gradients(NamedTuple):
    """The results of one step's microbatches."""

    loss: jax.Array
    mean: Any
    """The gradients of the trained parameters, as `Trained.with_gradients` makes a tree."""
    other: Any
    """The model's other state."""
    aux: Any
    losses: jax.Array
    """The sum of weight · loss of every microbatch, [microbatches]."""


def accumulate(
    batch: Microbatches,
    state: TrainState,
    leaves: Sequence[jax.Array],
    *,
    mesh: jax.sharding.Mesh,
    gradients_at: Any,
    weights_at: Any,
    layouts: Any,
) -> Gradients:
    """The loss and gradients of a global batch, the model's other state after it, and metrics, in one program.

    weights_at: the shardings of the parameters from the beginning of a step to its end; layouts: those with which they
    are whole on every replica. Where these differ, a parameter is gathered for the forward pass of each microbatch, and
    again for its backward pass.
    """
    along_dp = NamedSharding(mesh, PartitionSpec(batch.axes))
    # Microbatches stay the second dim: compilers copy a batch whose first dim they are.
    divided = [
        leaf if dim is None else jax.lax.with_sharding_constraint(batch.by_replica(leaf, dim), along_dp)
        for leaf, dim in zip(leaves, batch.dims, strict=True)
    ]
    trained = batch.loss.trained
    mask = trained.mask(state.params)
    weights = batch.weights(state.params, weights_at)
    given = trained.leaves(weights)
    factor = jnp.float32(1) if state.scaling is None else state.scaling.scale
    at, own, whole = ([place for place, flag in zip(jax.tree.leaves(tree), mask, strict=True) if flag]
                      for tree in (gradients_at, weights_at, layouts))  # fmt: skip
    dims = list(compress(batch.copies or [None] * len(mask), mask))

    def total(given: list[jax.Array], *rest: Any) -> Any:
        value, beside = batch.total(trained.merge(weights, given), *rest)
        return value * factor, (value, *beside)

    is_gathered = own != whole
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    # In turn a gradient is a value of its own, which 16 bits would round before it is added to its sum in float32.
    in_turn = on_cpu and all(leaf.dtype.itemsize > 2 for leaf in given)

    def part(m: Any) -> list[jax.Array]:
        """The m-th microbatches, stacked over replicas."""
        return [
            leaf if dim is None else jax.lax.dynamic_index_in_dim(leaf, m, 1, keepdims=False)
            for leaf, dim in zip(divided, batch.dims, strict=True)
        ]

    def copied(leaves: Sequence[jax.Array]) -> list[jax.Array]:
        if is_gathered:
            leaves = jax.lax.with_sharding_constraint(list(leaves), whole)
        return [batch.copied(leaf, dim, place) for leaf, dim, place in zip(leaves, dims, whole, strict=True)]

    def one_microbatch(carry: Any, m: Any) -> tuple[Any, Any]:
        loss_sum, weight_sum, gradients, other, before = carry
        rest = state.random, state.step, other, m, part(m)

        def apart(leaves: Sequence[jax.Array]) -> list[jax.Array]:
            return _not_before(leaves, own, m)

        def plus(old: jax.Array, dim: int | None, place: Any, new: jax.Array) -> jax.Array:
            found: jax.Array = jax.lax.with_sharding_constraint(old + batch.summed(new, dim, old.dtype), place)
            return found

        added = [partial(plus, *each) for each in zip(gradients, dims, at, strict=True)]
        if in_turn:
            (value, weight, other, sums, rows), gradients = gradients_in_turn(
                total,
                given,
                rest,
                added,
                copied=copied,
                apart=apart if is_gathered else None,
                donated=batch.microbatches == 1,
            )
        else:
            held = apart(given) if is_gathered else given
            copies = copied(held)
            scaled, backward, (value, weight, other, sums, rows) = jax.vjp(
                lambda copies: total(copies, *rest), copies, has_aux=True
            )
            if is_gathered:
                backward = _reading(backward, copies, copied(_not_before(held, own, scaled)))
            (found,) = backward(jnp.ones_like(scaled))
            gradients = [add(new) for add, new in zip(added, found, strict=True)]
        sums = jax.tree.map(jnp.add, before, sums)
        return (loss_sum + value, weight_sum + weight, gradients, other, sums), (rows, value)

    held = trained.leaves(state.params)
    zeros = jax.lax.with_sharding_constraint([jnp.zeros(p.shape, accumulated_dtype(p)) for p in held], at)
    sums = [] if batch.metrics is None else batch.metrics.zeros()
    start = (jnp.zeros(()), jnp.zeros(()), zeros, state.other, sums)
    if batch.microbatches == 1:
        (loss_sum, weight_sum, gradients, other, sums), (rows, value) = one_microbatch(start, 0)
        rows, losses = [each[None] for each in rows], value[None]
    else:
        numbers = jnp.arange(batch.microbatches)
        body = for_cpu_loops(one_microbatch, start, numbers[0]) if on_cpu else one_microbatch
        (loss_sum, weight_sum, gradients, other, sums), (rows, losses) = jax.lax.scan(body, start, numbers)
    divisor = batch.divisor(weight_sum)
    mean = [(g / (divisor * factor)).astype(p.dtype) for g, p in zip(gradients, held, strict=True)]
    aux = None if batch.metrics is None else batch.metrics.all(sums, rows)
    return Gradients(loss_sum / divisor, trained.with_gradients(state.params, mean), other, aux, losses)


def _not_before(leaves: Sequence[jax.Array], at: Sequence[NamedSharding], known: jax.Array) -> list[jax.Array]:
    """The same arrays, which no compiler gathers before a value is known, nor outside of the loop that makes it."""
    held, _ = jax.lax.optimization_barrier((list(leaves), known))
    found: list[jax.Array] = jax.lax.with_sharding_constraint(held, list(at))
    return found


def _reading(backward: Any, before: Sequence[jax.Array], after: Sequence[jax.Array]) -> Any:
    """A function of `jax.vjp` that reads other arrays in place of those it was made with: of parameters that are
    gathered, so that none is whole from the forward pass to the backward pass."""
    instead = {id(old): new for old, new in zip(before, after, strict=True)}
    return jax.tree.map(lambda leaf: instead.get(id(leaf), leaf), backward)


def squared(gradient: jax.Array) -> jax.Array:
    """The sum of squares of one array, in fp32."""
    return jnp.sum(jnp.square(jnp.abs(gradient).astype(jnp.float32)))


def split_squares(gradients: Sequence[jax.Array], at: Sequence[NamedSharding]) -> jax.Array:
    """The sums of squares (`squared`) of arrays with these shardings: devices add up what they hold before they add to
    each other, and the numbers of all arrays that are split over the same axes cross together."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, sharding in enumerate(at):
        groups.setdefault(tuple(sorted(axes_of(sharding))), []).append(number)
    found: list[Any] = [None] * len(gradients)
    for axes, members in groups.items():
        held = [gradients[number] for number in members]
        if axes:
            own: Any = jax.shard_map(
                lambda *held, axes=axes: jax.lax.psum(jnp.stack([squared(a) for a in held]), axes),
                mesh=at[0].mesh,
                in_specs=tuple(at[number].spec for number in members),
                out_specs=PartitionSpec(),
            )
            squares = own(*held)
        else:
            squares = [squared(a) for a in held]
        for position, number in enumerate(members):
            found[number] = squares[position]
    return jnp.stack(found)


def accumulated_dtype(parameter: jax.Array) -> jnp.dtype:
    """The dtype in which the gradients of a parameter add up: at least fp32."""
    return jnp.promote_types(parameter.dtype, jnp.float32)


def updated(optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any, loss: Any) -> Any:
    """An optimizer's updates and state; those that follow the loss (optax.contrib.reduce_on_plateau) are given it."""
    return optax.with_extra_args_support(optimizer).update(gradients, state, params, value=loss)
