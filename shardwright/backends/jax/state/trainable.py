"""The parameters that are trained (``wrt=``): the others get no gradient, no optimizer state and no update."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import optax
from flax import nnx
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from shardwright.backends.jax.capture.tree import is_function
from shardwright.core.errors import PlanError

FORMS = (
    "an NNX filter (nnx.LoRAParam, nnx.PathContains('head')), a function of (path, value) that returns a bool, or a "
    "pytree of bools like the parameters or a prefix of them"
)


@dataclass(frozen=True, slots=True)
class Trained:
    """The choice of the parameters that are trained."""

    wrt: Any = None
    """The user's choice as `train_step` takes it; None: all of them."""

    def mask(self, params: Any) -> tuple[bool, ...]:
        """One bool for each leaf of the parameters. Raises PlanError when none is trained, or ``wrt`` does not fit."""
        leaves = jax.tree.leaves(params)
        if self.wrt is None:
            return (True,) * len(leaves)
        found = self._nnx(params) if isinstance(params, nnx.State) else self._tree(params, leaves)
        if not any(found):
            raise PlanError(f"wrt={self.wrt!r:.80} selects none of the {len(leaves)} parameters: give {FORMS}")
        return found

    def _nnx(self, params: Any) -> tuple[bool, ...]:
        try:
            chosen: Any = nnx.filterlib.to_predicate(self.wrt)
        except TypeError:
            return self._tree(params, jax.tree.leaves(params))
        return tuple(bool(chosen(path, value)) for path, value in nnx.to_flat_state(params))

    def _tree(self, params: Any, leaves: Sequence[Any]) -> tuple[bool, ...]:
        if is_function(self.wrt) and not isinstance(self.wrt, type):
            named = jax.tree_util.tree_flatten_with_path(params)[0]
            return tuple(bool(self.wrt(tuple(map(_key, path)), leaf)) for path, leaf in named)
        if isinstance(self.wrt, str | type):
            raise PlanError(f"wrt={self.wrt!r:.80} does not fit parameters that are no NNX module: give {FORMS}")
        try:
            full = jax.tree.leaves(jax.tree.broadcast(self.wrt, params))
        except ValueError as error:
            raise PlanError(f"wrt= of another structure than the parameters: {error}; give {FORMS}") from error
        if any(not isinstance(flag, bool) for flag in full):
            raise PlanError(
                f"wrt= holds {type(next(f for f in full if not isinstance(f, bool))).__name__}: give {FORMS}"
            )
        return tuple(full)

    def select(self, params: Any) -> Any:
        """The parameters without the leaves that are not trained."""
        return self.with_gradients(params, self.leaves(params))

    def with_gradients(self, params: Any, found: Sequence[Any]) -> Any:
        """A tree like that of `select`, of one value for each trained leaf."""
        structure, mask = jax.tree.structure(params), self.mask(params)
        return jax.tree.unflatten(structure, replaced(mask, [optax.MaskedNode()] * len(mask), found))

    def merge(self, params: Any, changed: Sequence[Any]) -> Any:
        """The parameters with their trained leaves replaced."""
        leaves, structure = jax.tree.flatten(params)
        return jax.tree.unflatten(structure, replaced(self.mask(params), leaves, changed))

    def leaves(self, params: Any) -> list[Any]:
        """The trained leaves."""
        return list(compress(jax.tree.leaves(params), self.mask(params)))

    def optimizer(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """An optimizer that is given all parameters and sees those trained: ``update`` takes gradients as
        `with_gradients` makes them, and its updates are such a tree."""
        inner = optax.with_extra_args_support(optimizer)
        if self.wrt is None:
            return inner

        def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            return inner.update(gradients, state, None if params is None else self.select(params), **extra)

        return optax.GradientTransformationExtraArgs(lambda params: inner.init(self.select(params)), update)

    def apply(self, params: Any, updates: Any) -> Any:
        """The parameters after an optimizer's updates."""
        if self.wrt is None:
            return optax.apply_updates(params, updates)
        changed = optax.apply_updates(self.select(params), updates)
        return self.merge(params, jax.tree.leaves(changed))


ALL = Trained()
"""The choice of every parameter."""


def replaced(flags: Sequence[bool], held: Sequence[Any], changed: Sequence[Any]) -> list[Any]:
    """The held values, with those that have a flag replaced, in turn, by the changed ones."""
    rest = iter(changed)
    return [next(rest) if flag else value for flag, value in zip(flags, held, strict=True)]


def _key(entry: Any) -> Any:
    match entry:
        case DictKey(key) | FlattenedIndexKey(key):
            return key
        case SequenceKey(index):
            return index
        case GetAttrKey(name):
            return name
    return str(entry)
