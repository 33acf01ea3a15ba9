"""What training carries from step to step, and how models of both kinds (pytrees, NNX modules) turn into it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from shardwright.backends.jax.capture.tree import dotted, parameter_names, require_order
from shardwright.core.errors import PlanError

NAMED_DEVICES = 8
"""How many an error says by name."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TrainState:
    """The state of training: a pytree of sharded arrays. `train(state, batch)` donates it."""

    step: jax.Array
    """Updates made so far, int32 scalar."""
    params: Any
    optimizer: Any
    random: Any
    """Base random keys. They do not change: every microbatch folds its own from them."""
    other: Any
    """What the model changes beside its parameters: batch statistics, caches."""
    graphdef: Any = field(metadata={"static": True})
    """NNX's description of the module; None for plain pytrees."""
    order: Any = field(default=(), metadata={"static": True})
    """How fused matrices are held (`FusedParameters.order`): () in the model's own order."""

    def require_alive(self) -> Any:
        """The structure of the state as a tree. Raises PlanError when an earlier step took its memory."""
        leaves, structure = jax.tree.flatten(self)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise PlanError(
                "this state was already given to a step, which reused its memory: go on with the state that the step "
                "returned, as in `state, loss = train(state, batch)`"
            )
        return structure


class StepResult(NamedTuple):
    """What a compiled step makes."""

    state: TrainState
    loss: jax.Array
    aux: Any
    """The metrics beside the loss; None without ``has_aux``."""
    grad_norm: jax.Array
    """The global norm of the gradients of what is trained, before the optimizer changes them."""
    evidence: Any
    """Arrays that say whether losses and gradients are finite, `sentinels.Evidence`; None where nobody asks."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A model taken apart, as arrays or as shapes."""

    params: Any
    random: Any
    other: Any
    graphdef: Any

    @property
    def names(self) -> tuple[str, ...]:
        """The dotted name of every parameter, in the order of ``jax.tree.leaves(params)``."""
        if self.graphdef is not None:
            return tuple(dotted(path) for path, _ in nnx.to_flat_state(self.params))
        return parameter_names(self.params)


def take_apart(model: Any, seed: int, other: Any) -> Parts:
    """Parameters, random state and the rest of an NNX module; a pytree is all parameters."""
    require_order((model, other), "the model or its state")
    if isinstance(model, nnx.Module):
        if other is not None:
            raise PlanError("state= is for plain functions: an NNX module holds its own state")
        split: Any = nnx.split(model, nnx.Param, nnx.RngState, ...)
        graphdef, params, random, rest = split
        return Parts(params, random, rest, graphdef)
    return Parts(model, jax.random.key(seed), other, None)


def is_abstract(parts: Parts) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(parts.params))


def put_together(parts: Parts) -> Any:
    """The model that was taken apart: an NNX module, or the pytree."""
    if parts.graphdef is None:
        return parts.params
    # NNX refuses to change variables that were made outside a transformation: make them anew here.
    here = jax.tree.map(lambda leaf: leaf, (parts.params, parts.random, parts.other))
    return nnx.merge(parts.graphdef, *here)


def own_copy(leaf: Any, sharding: jax.sharding.Sharding | jax.Device) -> jax.Array:
    """The array in its place, in memory of its own: the state is donated, the user's arrays are not.

    `jax.device_put` alone, even with ``may_alias=False``, hands an array's memory on where its device is one of several
    that are to hold all of it (JAX 0.10).
    """
    over_processes = isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_addressable
    if over_processes and getattr(leaf, "is_fully_addressable", True):
        return _over_processes(leaf, sharding)
    copied: Any = leaf.copy() if isinstance(leaf, np.ndarray) else jnp.array(leaf, copy=True)
    placed: jax.Array = jax.device_put(copied, sharding)
    return placed


def _over_processes(leaf: Any, sharding: Any) -> jax.Array:
    """An array that every process has, over the devices of all: `jax.device_put` takes no random keys there."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _over_processes(jax.random.key_data(leaf), sharding)
        keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return keys
    given = np.asarray(leaf)
    return jax.make_array_from_callback(given.shape, sharding, lambda index: given[index])


def require_like(found: Any, expected: Any) -> None:
    """Raise PlanError unless the leaves of a state's tree have the shapes and dtypes of those expected."""
    named, shapes = jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected)
    another = "it is another plan's; give its parameters, train.params(state), to this plan's init"
    if len(named) != len(shapes):
        raise PlanError(
            f"the state has {len(named)} arrays where one of this plan and optimizer has {len(shapes)}: {another}"
        )
    for (path, leaf), shape in zip(named, shapes, strict=True):
        if (leaf.shape, leaf.dtype) != (shape.shape, shape.dtype):
            raise PlanError(
                f"array {jax.tree_util.keystr(path)} of the state is {leaf.dtype}{list(leaf.shape)} where one of this "
                f"plan and optimizer has {shape.dtype}{list(shape.shape)}: {another}"
            )


def require_places(arrays: Any, shardings: Any) -> None:
    """Raise PlanError unless the arrays of a state lie as those of this plan: trees of one structure."""
    named, places = jax.tree_util.tree_leaves_with_path(arrays), jax.tree.leaves(shardings)
    for (path, leaf), at in zip(named, places, strict=True):
        if not isinstance(leaf, jax.Array) or not leaf.sharding.is_equivalent_to(at, leaf.ndim):
            found = _described(leaf.sharding) if isinstance(leaf, jax.Array) else "in the host's memory"
            raise PlanError(
                f"array {jax.tree_util.keystr(path)} of the state is {found} where this plan keeps it "
                f"{_described(at)}: the state is another plan's, or was moved; put it there with "
                "state = train.place(state)"
            )


def _described(sharding: jax.sharding.Sharding) -> str:
    """The devices too, which JAX does not say of a NamedSharding."""
    devices: list[jax.Device] = sorted(sharding.device_set, key=lambda device: device.id)
    named = ", ".join(f"{device.platform}:{device.id}" for device in devices[:NAMED_DEVICES])
    more = f" and {len(devices) - NAMED_DEVICES} more" if len(devices) > NAMED_DEVICES else ""
    split = f"{sharding.spec} over {dict(sharding.mesh.shape)}" if isinstance(sharding, NamedSharding) else sharding
    return f"on {named}{more} as {split}"


def fold_random(random: Any, step: jax.Array, microbatch: jax.Array) -> Any:
    """Random state for one microbatch: every key folded with (step, global microbatch), every counter at 0, so that a
    mask depends on nothing else."""

    def fold(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros_like(leaf)
        keys = leaf.reshape(-1)
        return jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, step), microbatch))(keys).reshape(
            leaf.shape
        )

    return jax.tree.map(fold, random)


def abstractly(init: Callable[[], Any]) -> Any:
    """What an init function returns, as shapes: an NNX module or a pytree."""
    return nnx.eval_shape(init)
