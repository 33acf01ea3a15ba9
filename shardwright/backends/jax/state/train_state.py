"""The state that training carries from step to step, and the result of one step."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import PyTreeDef

from shardwright.backends.jax.capture.tree import Parts
from shardwright.core.errors import PlanError


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TrainState:
    """The state of training: a pytree of sharded arrays. `train(state, batch)` donates it."""

    step: jax.Array
    """The number of steps made so far, those that were skipped among them, int32 scalar."""
    params: Any
    """The parameters between steps: in 16 bits those that are trained are float32."""
    optimizer: Any
    random: Any
    """The base random keys. They do not change: every microbatch folds its own from them."""
    other: Any
    """The state that the model changes beside its parameters: batch statistics, caches."""
    graphdef: nnx.GraphDef[Any] | None = field(metadata={"static": True})
    """NNX's description of the module; None for plain pytrees."""
    order: tuple[Any, ...] = field(default=(), metadata={"static": True})
    """The order in which fused matrices are held (`FusedParameters.order`): () is the model's own order."""
    scaling: Any = None
    """The factor of the loss in the next step, and what it follows from (`loss.scaling.Scaling`); None but in
    float16."""

    @property
    def loss_scale(self) -> jax.Array:
        """The factor of the loss in the next step, float32 scalar: 1 but in float16."""
        return jnp.ones((), jnp.float32) if self.scaling is None else self.scaling.scale

    def require_alive(self) -> PyTreeDef:
        """The structure of the state as a tree. Raises PlanError when an earlier step took its memory."""
        leaves, structure = jax.tree.flatten(self)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise PlanError(
                "this state was already given to a step, which reused its memory: go on with the state that the step "
                "returned, as in `state, loss = train(state, batch)`"
            )
        return structure


def parts_of(state: TrainState) -> Parts:
    """The model of a state, without its optimizer's part."""
    return Parts(state.params, state.random, state.other, state.graphdef)


class StepResult(NamedTuple):
    """The results of a compiled step."""

    state: TrainState
    loss: jax.Array
    aux: Any
    """The metrics beside the loss; None without ``has_aux``."""
    grad_norm: jax.Array
    """The global norm of the gradients of the trained parameters, before the optimizer changes them."""
    evidence: Any
    """The arrays that say whether losses and gradients are finite, `sentinels.Evidence`; None where nobody asks."""


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


def _over_processes(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array that every process has, placed over the devices of all: `jax.device_put` takes no random keys there."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _over_processes(jax.random.key_data(leaf), sharding)
        keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return keys
    given = np.asarray(leaf)
    return jax.make_array_from_callback(given.shape, sharding, lambda index: given[index], dtype=given.dtype)


def fold_random(random: Any, step: jax.Array, microbatch: jax.Array) -> Any:
    """The random state for one microbatch: every key folded with (step, global microbatch), every counter at 0, so that
    a mask depends on nothing else."""

    def fold(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros_like(leaf)
        keys = leaf.reshape(-1)
        return jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, step), microbatch))(keys).reshape(
            leaf.shape
        )

    return jax.tree.map(fold, random)
